#include "tracking/outbox.h"

#include <gtest/gtest.h>

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <csignal>

#include "accelerate/errors.h"
#include "core/captured_log.h"
#include "support/command.h"
#include "tracking/proto_reader.h"
#include "tracking/tracker_files.h"

namespace accelerate::detail::tracking {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

/// Takes items while it is open.
struct Receiver {
  std::mutex mutex;
  std::atomic<bool> open = true;
  std::vector<std::string> received;

  std::size_t operator()(std::span<const OutboxItem> items) {
    if (!open) throw ConfigError("it is closed.");
    if (items.front().bytes == "bad") throw ArgumentError("it is bad.");
    const std::lock_guard lock(mutex);
    received.push_back(items.front().bytes);
    return 1;
  }
};

OutboxOptions quick(bool in_background) {
  return {.tracker = "test",
          .in_background = in_background,
          .first_delay = milliseconds(1),
          .longest_delay = milliseconds(4),
          .deadline = milliseconds(2000)};
}

TEST(OutboxTest, KeepsItemsInOrderUntilTheyCanBeDelivered) {
  for (const bool in_background : {false, true}) {
    const test::CapturedLog log;
    Receiver receiver;
    Outbox outbox(quick(in_background), std::ref(receiver));
    receiver.open = false;
    outbox.post({.target = "", .bytes = "a"});
    outbox.post({.target = "", .bytes = "b"});
    std::this_thread::sleep_for(milliseconds(20));
    outbox.post({.target = "", .bytes = "c"});
    std::this_thread::sleep_for(milliseconds(20));
    receiver.open = true;
    outbox.post({.target = "", .bytes = "d"});
    outbox.finish();
    EXPECT_EQ(receiver.received, (std::vector<std::string>{"a", "b", "c", "d"}));
    ASSERT_EQ(log.messages().size(), 1U);  // however often it failed
    EXPECT_EQ(log.messages()[0],
              "The tracker test cannot write: it is closed. Values are kept and written later; "
              "training goes on.");
  }
}

TEST(OutboxTest, DropsAnItemThatWillNeverBeAccepted) {
  const test::CapturedLog log;
  Receiver receiver;
  Outbox outbox(quick(false), std::ref(receiver));
  for (const char* bytes : {"a", "bad", "b", "bad"}) outbox.post({.target = "", .bytes = bytes});
  outbox.finish();
  EXPECT_EQ(receiver.received, (std::vector<std::string>{"a", "b"}));
  ASSERT_EQ(log.messages().size(), 2U);
  EXPECT_EQ(log.messages()[0], "The tracker test does not take a value: it is bad.");
  EXPECT_EQ(log.messages()[1], "The tracker test could not write 2 entries, which are lost.");
}

TEST(OutboxTest, DropsTheOldestItemsBeyondItsLimitAndCountsThem) {
  const test::CapturedLog log;
  Receiver receiver;
  auto options = quick(false);
  options.max_bytes = 10 * (1000 + sizeof(OutboxItem));
  options.first_delay = options.longest_delay = std::chrono::hours(1);
  Outbox outbox(options, std::ref(receiver));
  receiver.open = false;
  for (int i = 0; i < 25; ++i) outbox.post({.target = "", .bytes = std::string(1000, 'a' + i)});
  receiver.open = true;
  outbox.finish();
  ASSERT_EQ(receiver.received.size(), 10U);
  EXPECT_EQ(receiver.received[0][0], 'a' + 15);
  ASSERT_EQ(log.messages().size(), 2U);
  EXPECT_EQ(log.messages()[1], "The tracker test could not write 15 entries, which are lost.");
}

TEST(OutboxTest, FinishesInTimeWithoutAServer) {
  const test::CapturedLog log;
  auto options = quick(true);
  options.deadline = milliseconds(50);
  const auto start = Clock::now();
  Outbox outbox(options, [](auto) -> std::size_t { throw ConfigError("nobody is there."); });
  outbox.post({.target = "", .bytes = "a"});
  outbox.finish();
  EXPECT_LT(Clock::now() - start, test::patient(std::chrono::seconds(2)));
  ASSERT_EQ(log.messages().size(), 2U);
  EXPECT_EQ(log.messages()[1], "The tracker test could not write 1 entry, which is lost.");
}

TEST(OutboxTest, SurvivesWhoeverTakesItsMessages) {
  Receiver receiver;
  Outbox outbox(quick(true), std::ref(receiver));
  std::atomic<int> messages = 0;
  basic_config({.sink = [&](const LogEntry&) {
    if (messages++ == 0) outbox.post({.target = "", .bytes = "from the sink"});
    throw std::runtime_error("the sink is broken.");
  }});
  outbox.post({.target = "", .bytes = "bad"});
  while (messages == 0) std::this_thread::sleep_for(milliseconds(1));
  outbox.post({.target = "", .bytes = "a"});
  outbox.finish();
  basic_config({});
  std::ranges::sort(receiver.received);
  EXPECT_EQ(receiver.received, (std::vector<std::string>{"a", "from the sink"}));
}

TEST(OutboxTest, DoesNotWaitForAServer) {
  Receiver receiver;
  std::atomic<bool> all_posted = false;
  Outbox outbox(quick(true), [&](auto items) {
    all_posted.wait(false);
    return receiver(items);
  });
  for (int i = 0; i < 20; ++i) outbox.post({.target = "", .bytes = "a"});
  all_posted = true;
  all_posted.notify_all();
  outbox.finish();
  EXPECT_EQ(receiver.received.size(), 20U);
}

TEST(TrackerFiles, AppendAllOrNothing) {
  const test::Folder folder;
  const std::filesystem::path path = folder / "sub/file";
  append_to_file(path, "first\n");
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{.rlim_cur = 10, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  EXPECT_THROW(append_to_file(path, "second, which does not fit\n"), ConfigError);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(test::content_of(path), "first\n");
  append_to_file(path, "second\n");
  EXPECT_EQ(test::content_of(path), "first\nsecond\n");
}

TEST(TrackerFiles, SayWhereAnotherTryIsInVain) {
  const test::Folder folder;
  append_to_file(folder / "file", "");
  make_folder(folder / "sub");
  const std::filesystem::path below = folder / "file/below";
  EXPECT_THROW(append_to_file(below, "x"), ArgumentError);
  EXPECT_THROW(make_folder(below), ArgumentError);
  EXPECT_THROW(append_to_file(folder / "sub", "x"), ArgumentError);
  EXPECT_THROW(replace_file(folder / "sub", "x"), ArgumentError);
  EXPECT_THROW(append_to_file(folder / std::string(300, 'x'), "x"), ArgumentError);
  EXPECT_THROW(append_to_file("/proc/no/such", "x"), ConfigError);
}

TEST(TrackerFiles, StayInTheirFolder) {
  EXPECT_EQ(inside("runs", "train/loss"), "runs/train/loss");
  for (const char* key : {"", "../up", "a/../../b", "/etc/passwd", "a//b", "a/."}) {
    EXPECT_THROW(static_cast<void>(inside("runs", key)), ArgumentError) << key;
  }
}

}  // namespace
}  // namespace accelerate::detail::tracking
