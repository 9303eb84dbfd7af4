#include "comm/desync_detector.h"

#include <gtest/gtest.h>

#include <thread>

#include "comm/call_log.h"

namespace accelerate::detail::comm {
namespace {

using namespace std::chrono_literals;

constexpr DesyncDetector::Clock::time_point kStart{};

DesyncDetector detector_of(int ranks) {
  std::vector<std::string> names;
  for (int r = 0; r < ranks; ++r) names.push_back("rank " + std::to_string(r));
  return DesyncDetector(names, {}, kStart);
}

ReportedCall call(std::uint64_t sequence, std::uint64_t signature, const std::string& text,
                  bool complete = false) {
  return {.sequence = sequence,
          .signature = signature,
          .text = text,
          .complete = complete,
          .open = complete ? sequence + 1 : sequence};
}

std::string text_of(const std::optional<Finding>& finding) {
  return finding ? finding->text : "nothing";
}

TEST(DesyncDetector, FindsNothingWhileAllGoOn) {
  auto detector = detector_of(3);
  detector.waits(0, call(1, 7, "gather at a.cpp:1"), kStart);
  detector.reports(1, call(1, 7, "gather at a.cpp:1"), kStart);
  EXPECT_EQ(detector.disputed(), 1U);
  EXPECT_EQ(text_of(detector.finding(kStart + 5s)), "nothing");
  detector.moves_on(0);
  EXPECT_EQ(detector.disputed(), 0U);
}

TEST(DesyncDetector, NamesTheMinorityWhenAllHaveReported) {
  auto detector = detector_of(3);
  detector.waits(0, call(4, 7, "gather float32[4] at a.cpp:1"), kStart);
  detector.reports(1, call(4, 8, "gather float32[5] at a.cpp:1"), kStart);
  EXPECT_EQ(text_of(detector.finding(kStart)), "nothing") << "rank 2 has not been heard";
  detector.reports(2, call(4, 7, "gather float32[4] at a.cpp:1"), kStart);
  const auto finding = detector.finding(kStart);
  ASSERT_TRUE(finding);
  EXPECT_EQ(finding->rank, 1);
  EXPECT_EQ(finding->text,
            "rank 1 is in another collective than the others:\n"
            "  rank 0: gather float32[4] at a.cpp:1\n"
            "  rank 1: gather float32[5] at a.cpp:1\n"
            "  rank 2: gather float32[4] at a.cpp:1");
}

TEST(DesyncDetector, DoesNotWaitForeverForMissingReports) {
  auto detector = detector_of(3);
  detector.waits(0, call(2, 7, "a"), kStart);
  detector.reports(1, call(2, 8, "b"), kStart);
  detector.reports(2, call(1, 5, "c", true), kStart);
  EXPECT_EQ(text_of(detector.finding(kStart)), "nothing");
  const auto finding = detector.finding(kStart + 300ms);
  ASSERT_TRUE(finding);
  EXPECT_EQ(finding->rank, -1);
  EXPECT_EQ(finding->text,
            "the ranks are in different collectives:\n  rank 0: a\n  rank 1: b\n"
            "  rank 2: not there yet, after c");
}

TEST(DesyncDetector, ShowsBothSidesOfTwoRanks) {
  auto detector = detector_of(2);
  detector.waits(0, call(1, 7, "gather"), kStart);
  detector.waits(1, call(1, 8, "reduce"), kStart);
  const auto finding = detector.finding(kStart);
  ASSERT_TRUE(finding);
  EXPECT_EQ(finding->rank, -1);
  EXPECT_EQ(finding->text,
            "the ranks are in different collectives:\n  rank 0: gather\n  rank 1: reduce");
}

TEST(DesyncDetector, NamesTheRankThatEndedWhileOthersWait) {
  auto detector = detector_of(2);
  detector.left(1, call(3, 7, "gather at a.cpp:1", true));
  EXPECT_EQ(text_of(detector.finding(kStart)), "nothing") << "nobody waits";
  detector.waits(0, call(4, 7, "gather at a.cpp:9"), kStart);
  EXPECT_EQ(text_of(detector.finding(kStart)),
            "rank 1 has ended after gather at a.cpp:1, and rank 0 waits in gather at a.cpp:9");
}

TEST(DesyncDetector, LetsARankEndThatTookPartInEverything) {
  auto detector = detector_of(2);
  detector.left(1, call(4, 7, "gather", true));
  detector.waits(0, call(4, 7, "gather"), kStart);
  EXPECT_EQ(text_of(detector.finding(kStart)), "nothing");
  EXPECT_EQ(text_of(detector.finding(kStart + 30s)).substr(0, 6), "rank 0")
      << "silence of others counts";
}

TEST(DesyncDetector, NamesTheRankThatLeftWithSeveralCollectivesUnderWay) {
  auto detector = detector_of(2);
  auto last = call(6, 9, "all_reduce float32[6]");
  last.open = 4;
  detector.left(1, last);
  detector.waits(0, call(4, 7, "all_reduce float32[4]"), kStart);
  EXPECT_EQ(text_of(detector.finding(kStart)),
            "rank 1 has ended in all_reduce float32[6], and rank 0 waits in all_reduce float32[4]");
}

TEST(DesyncDetector, NamesTheRankThatLeftWhenItsLastDataIsLost) {
  auto detector = detector_of(3);
  detector.left(1, call(4, 7, "gather", true));
  detector.waits(0, call(4, 7, "gather"), kStart);
  detector.transport_failed(0, call(4, 7, "gather"), "reset by peer", kStart);
  EXPECT_EQ(text_of(detector.finding(kStart + 1s)), "nothing") << "another rank may have died";
  detector.transport_failed(0, call(5, 7, "reduce"), "reset by peer", kStart + 1s);
  EXPECT_EQ(text_of(detector.finding(kStart + 1s)), "rank 1 has ended after gather");
  detector.reports(2, call(5, 7, "reduce", true), kStart + 1s);
  detector.died(2);
  EXPECT_EQ(text_of(detector.finding(kStart + 1s)), "rank 2 died after reduce");
}

TEST(DesyncDetector, NamesADeadRankWithItsLastCall) {
  auto detector = detector_of(2);
  detector.died(1);
  detector.seen(1, "", call(9, 7, "barrier at b.cpp:2"));
  EXPECT_EQ(text_of(detector.finding(kStart)), "nothing") << "nobody waits for it";
  detector.waits(0, call(9, 7, "barrier at b.cpp:2"), kStart);
  EXPECT_EQ(text_of(detector.finding(kStart)),
            "rank 1 died in barrier at b.cpp:2, and rank 0 waits in barrier at b.cpp:2");
}

TEST(DesyncDetector, LetsARankDieThatHasDoneAllThatOthersWaitFor) {
  auto detector = detector_of(2);
  detector.died(1);
  detector.seen(1, "", call(9, 7, "barrier", true));
  detector.waits(0, call(9, 7, "barrier"), kStart);
  EXPECT_EQ(text_of(detector.finding(kStart)), "nothing");
  detector.transport_failed(0, call(9, 7, "barrier"), "reset by peer", kStart);
  EXPECT_EQ(text_of(detector.finding(kStart)), "rank 1 died after barrier")
      << "it had not, after all";
}

TEST(DesyncDetector, ShowsTheExceptionOfARankBeforeItsDeath) {
  auto detector = detector_of(2);
  detector.threw(1, "disk full");
  detector.died(1);
  EXPECT_EQ(text_of(detector.finding(kStart)),
            "rank 1 failed before its first collective: disk full");
}

TEST(DesyncDetector, ComparesWithTheLastCallOfARankThatHasLeft) {
  auto detector = detector_of(2);
  detector.left(0, call(3, 7, "gather float32[4] at a.cpp:1", true));
  detector.waits(1, call(3, 8, "gather float32[9] at a.cpp:1"), kStart);
  const auto found = text_of(detector.finding(kStart));
  EXPECT_NE(found.find("float32[4]"), std::string::npos) << found;
  EXPECT_NE(found.find("float32[9]"), std::string::npos) << found;
}

TEST(DesyncDetector, FindsThatARankCompletedACallInWhichAnotherWaits) {
  auto detector = detector_of(3);
  detector.left(0, call(5, 7, "barrier", true));
  detector.waits(1, call(3, 8, "gather float32[9] at a.cpp:1"), kStart);
  detector.reports(2, call(2, 6, "barrier", true), kStart);
  detector.reports(2, call(2, 6, "barrier", true), kStart + 11s);
  detector.reports(1, call(2, 6, "barrier", true), kStart + 11s);
  EXPECT_EQ(text_of(detector.finding(kStart + 11s)), "nothing") << "rank 2 is late for it";
  detector.reports(2, call(3, 8, "gather float32[9] at a.cpp:1"), kStart + 11s);
  const auto found = text_of(detector.finding(kStart + 11s));
  EXPECT_NE(found.find("rank 0 has ended"), std::string::npos) << found;
  EXPECT_NE(found.find("gather float32[9]"), std::string::npos) << found;
}

TEST(DesyncDetector, BlamesSilenceAfterTenSecondsWithTheStateOfTheProcess) {
  auto detector = detector_of(2);
  detector.heard(0, kStart + 10s);
  EXPECT_EQ(text_of(detector.finding(kStart + 10s)), "nothing");
  EXPECT_EQ(detector.suspects(kStart + 10s), std::vector<int>{1});
  detector.seen(1, "stopped", call(2, 1, "gather", true));
  EXPECT_EQ(text_of(detector.finding(kStart + 11s)),
            "rank 1 has given no sign of life for 11 s (the process is stopped), after gather");
}

TEST(DesyncDetector, ForgivesSilenceThatWasItsOwnFault) {
  auto detector = detector_of(2);
  detector.forgive(kStart + 60s);
  EXPECT_EQ(text_of(detector.finding(kStart + 61s)), "nothing");
}

TEST(DesyncDetector, WaitsForTheCauseOfAFailedConnection) {
  auto detector = detector_of(2);
  detector.transport_failed(0, call(2, 7, "gather"), "reset by peer", kStart);
  EXPECT_EQ(text_of(detector.finding(kStart + 1s)), "nothing");
  EXPECT_EQ(text_of(detector.finding(kStart + 2s)),
            "the connection of rank 0 failed in gather: reset by peer");
  detector.died(1);
  EXPECT_EQ(detector.finding(kStart + 2s)->rank, 1);
}

TEST(DesyncDetector, BlamesTheLateRankWhenTheTransportGivesUpAtTheTimeout) {
  DesyncDetector detector({"rank 0", "rank 1"}, {.timeout = 3s}, kStart);
  detector.reports(1, call(4, 7, "reduce at a.cpp:0", true), kStart);
  detector.waits(0, call(5, 7, "gather at a.cpp:1"), kStart + 100ms);
  EXPECT_EQ(text_of(detector.finding(kStart + 3s)), "nothing") << "the transport decides";
  detector.transport_failed(0, call(5, 7, "gather at a.cpp:1"), "timed out", kStart + 3s);
  EXPECT_EQ(text_of(detector.finding(kStart + 3s)), "nothing") << "it may have died";
  const auto finding = detector.finding(kStart + 3300ms);
  EXPECT_EQ(text_of(finding),
            "rank 0 has waited for 3 s, which is the timeout, in gather at a.cpp:1 for rank 1, "
            "after reduce at a.cpp:0. It is alive, but did not come.");
  EXPECT_EQ(finding->rank, 1);
  detector.died(1);
  EXPECT_EQ(text_of(detector.finding(kStart + 3300ms)).substr(0, 11), "rank 1 died");
}

TEST(DesyncDetector, NamesALateRankOnceWithoutBlame) {
  auto detector = detector_of(2);
  detector.waits(0, call(5, 7, "gather at a.cpp:1"), kStart);
  detector.reports(1, call(4, 7, "reduce at a.cpp:0", true), kStart);
  EXPECT_FALSE(detector.notice(kStart + 59s));
  const auto notice = detector.notice(kStart + 60s);
  ASSERT_TRUE(notice);
  EXPECT_EQ(
      *notice,
      "rank 0 has waited for 60 s in gather at a.cpp:1 for rank 1, after reduce at a.cpp:0. It "
      "is alive; this is no error unless it is stuck.");
  EXPECT_FALSE(detector.notice(kStart + 120s));
}

TEST(CallLogTest, CountsTheTimeInWhichAtLeastOneCallIsUnderWay) {
  using std::chrono::milliseconds;
  const auto pause = [] { std::this_thread::sleep_for(milliseconds(20)); };
  const auto before = nanoseconds_in_collectives();
  const auto start = CallLog::Clock::now();
  CallLog log;
  const auto first = log.enter({.kind = "all_reduce"}, {});
  pause();
  const auto second = log.enter({.kind = "all_reduce"}, {});
  pause();
  log.leave(first);
  pause();
  log.leave(second);
  const auto took = CallLog::Clock::now() - start;
  pause();  // none is under way
  const auto on_device = log.enter({.kind = "all_reduce", .on_device = true}, {});
  pause();
  log.leave(on_device);
  log.leave(on_device);
  const auto counted = std::chrono::nanoseconds(nanoseconds_in_collectives() - before);
  EXPECT_GE(counted, milliseconds(60));
  EXPECT_LE(counted, took);
  add_time_in_collectives(milliseconds(5));
  EXPECT_EQ(nanoseconds_in_collectives() - before, (counted + milliseconds(5)).count());
}

}  // namespace
}  // namespace accelerate::detail::comm
