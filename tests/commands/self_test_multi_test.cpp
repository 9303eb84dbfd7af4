// `accelerate test` with the processes of a configuration file, whole and with a broken rank.
#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "core/text.h"
#include "support/command.h"

namespace accelerate::test {
namespace {

using detail::str;

constexpr const char* kSuccess = "Test is a success! You are ready for your distributed training!";

/// Runs it with this many processes; `fault` breaks one of them.
Outcome self_test(int processes, const std::string& precision = "no",
                  const std::string& fault = "") {
  const Folder folder;
  const std::string config = folder / "config.yaml";
  std::ofstream(config) << "distributed_type: " << (processes > 1 ? "MULTI_CPU" : "'NO'")
                        << "\nuse_cpu: true\nmain_process_port: 0\nnum_processes: " << processes
                        << "\nmixed_precision: '" << precision << "'\n";
  Variables environment = {{"OMP_NUM_THREADS", "1"}};
  if (!fault.empty()) environment.emplace_back("ACCELERATE_SELF_TEST_FAULT", fault);
  return run({.argv = {built("bin/accelerate"), "test", "--config_file", config},
              .environment = environment});
}

/// The name of each check that passed, in order.
std::vector<std::string> passed(const Outcome& outcome) {
  std::vector<std::string> names;
  for (const auto& line : lines_of(outcome.output)) {
    if (line.starts_with("ok  ")) names.push_back(line.substr(4, line.find(':') - 4));
  }
  return names;
}

const std::vector<std::string> kChecks = {
    "state",           "process order",     "collectives",
    "split",           "random states",     "data loader",
    "mixed precision", "training",          "gradient accumulation",
    "trigger",         "saving and loading"};

class SelfTestOn : public testing::TestWithParam<int> {};

TEST_P(SelfTestOn, PassesAndSaysWhatItChecked) {
  const auto outcome = self_test(GetParam());
  EXPECT_EQ(outcome.code, 0) << outcome.text();
  const auto lines = lines_of(outcome.output);
  ASSERT_EQ(lines.size(), kChecks.size() + 2) << outcome.text();
  EXPECT_EQ(lines.front(), GetParam() == 1 ? "Self-test: 1 process, NO, mixed precision 'no'"
                                           : str("Self-test: ", GetParam(),
                                                 " processes, MULTI_CPU, mixed precision 'no'"));
  EXPECT_EQ(passed(outcome), kChecks);
  EXPECT_EQ(lines.back(), kSuccess);
  EXPECT_EQ(outcome.left_behind, std::vector<std::string>{});
}
INSTANTIATE_TEST_SUITE_P(Processes, SelfTestOn, testing::Values(1, 2, 3));

TEST(SelfTest, TrainsInThePrecisionOfTheConfiguration) {
  const auto outcome = self_test(2, "bf16");
  EXPECT_EQ(outcome.code, 0) << outcome.text();
  EXPECT_EQ(count_of(outcome.output, "computes in BFloat16"), 1) << outcome.text();
}

TEST(SelfTest, NamesCheckRankAndValuesWhereARankIsBroken) {
  const std::vector<std::string> seen = {
      "rank 0: rank of process 1: expected 1, got 2",
      "rank 1: runs after the local main process: expected true, got false",
      "rank 0: gather of the ranks: expected [0, 1], got [0, 2]",
      "rank 0: all parts in rank order: expected 0, 1, 2, 3, 4, got 0, 1, 2, 4, 4",
      "rank 1: numbers drawn after synchronize_rng_states: expected [0.88",
      "rank 0: samples of a pass: expected [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], got [",
      "rank 1: dtype inside the model: expected Float, got Double",
      "rank 0: losses: expected [0.07",
      "rank 0: losses: expected [0.07",
      "rank 0: check_trigger after one rank has set it: expected true, got false",
      "rank 1: second.bias: expected [0.094994], got [1.09499]"};
  for (std::size_t i = 0; i < kChecks.size(); ++i) {
    const auto outcome = self_test(2, "no", "1:" + kChecks[i]);
    EXPECT_EQ(outcome.code, 1) << outcome.text();
    EXPECT_EQ(passed(outcome), std::vector(kChecks.begin(), kChecks.begin() + i));
    const auto message = str("accelerate: Self-test failed at '", kChecks[i], "': ", seen[i]);
    EXPECT_GE(count_of(outcome.error, message), 1) << outcome.text();
    EXPECT_EQ(count_of(outcome.output, kSuccess), 0) << outcome.text();
    EXPECT_EQ(outcome.left_behind, std::vector<std::string>{});
  }
}

TEST(SelfTest, FailsWhereARankEndsWithoutAWord) {
  const auto outcome = self_test(2, "no", "1:exit");
  EXPECT_EQ(outcome.code, 1) << outcome.text();
  EXPECT_EQ(count_of(outcome.error, "rank      : 1 "), 1) << outcome.text();
  EXPECT_EQ(count_of(outcome.output, kSuccess), 0) << outcome.text();
}

TEST(SelfTest, RefusesAFaultThatItDoesNotKnow) {
  const auto outcome = self_test(1, "no", "1:colectives");
  EXPECT_EQ(outcome.code, 2) << outcome.text();
  EXPECT_EQ(count_of(outcome.error, "ACCELERATE_SELF_TEST_FAULT is '1:colectives', expected"), 1);
}

}  // namespace
}  // namespace accelerate::test
