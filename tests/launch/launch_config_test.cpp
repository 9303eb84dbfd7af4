#include "launch/launch_config.h"

#include <gtest/gtest.h>

#include "accelerate/errors.h"
#include "support/message_of.h"

namespace accelerate::detail::launch {
namespace {

StreamChoice parse(const std::string& text) { return StreamChoice::parse(text, "--tee"); }

std::string refusal(const std::string& text) {
  return test::message_of<ConfigError>([&] { static_cast<void>(parse(text)); });
}

TEST(StreamChoice, TakesOneNumberForAllWorkers) {
  EXPECT_EQ(parse("0"), (StreamChoice{.all = Streams::kNone}));
  EXPECT_EQ(parse("1"), (StreamChoice{.all = Streams::kOutput}));
  EXPECT_EQ(parse("2").of(17), Streams::kError);
  EXPECT_EQ(parse(" 3 ").of(0), Streams::kBoth);
}

TEST(StreamChoice, TakesSingleWorkersAndLeavesTheOthersOut) {
  const auto choice = parse("0:3,1:1,12:2");
  EXPECT_EQ(choice.of(0), Streams::kBoth);
  EXPECT_EQ(choice.of(1), Streams::kOutput);
  EXPECT_EQ(choice.of(2), Streams::kNone);
  EXPECT_EQ(choice.of(12), Streams::kError);
  EXPECT_EQ(parse("5:0").of(0), Streams::kNone);
}

TEST(StreamChoice, NamesFlagAndTextOfWhatItCannotRead) {
  const std::string remedy =
      " Write 0 (none), 1 (stdout), 2 (stderr) or 3 (both) for all workers, or single ones by "
      "their local rank: 0:3,1:1.";
  EXPECT_EQ(refusal("4"), "--tee is '4', but '4' names no streams." + remedy);
  EXPECT_EQ(refusal(""), "--tee is '', but '' names no streams." + remedy);
  EXPECT_EQ(refusal("all"), "--tee is 'all', but 'all' names no streams." + remedy);
  EXPECT_EQ(refusal("-1"), "--tee is '-1', but '-1' names no streams." + remedy);
  EXPECT_EQ(refusal("0:3,1"), "--tee is '0:3,1', but '1' names no local rank." + remedy);
  EXPECT_EQ(refusal("0:3,"), "--tee is '0:3,', but '' names no local rank." + remedy);
  EXPECT_EQ(refusal("x:3"), "--tee is 'x:3', but 'x' is not a local rank." + remedy);
  EXPECT_EQ(refusal("-1:3"), "--tee is '-1:3', but '-1' is not a local rank." + remedy);
  EXPECT_EQ(refusal("0:9"), "--tee is '0:9', but '9' names no streams." + remedy);
  EXPECT_EQ(refusal("0:1:2"), "--tee is '0:1:2', but '1:2' names no streams." + remedy);
  EXPECT_EQ(refusal("0:1,0:2"), "--tee is '0:1,0:2', but local rank 0 comes twice." + remedy);
  EXPECT_EQ(refusal("99999999999:1"),
            "--tee is '99999999999:1', but '99999999999' is not a local rank." + remedy);
}

}  // namespace
}  // namespace accelerate::detail::launch
