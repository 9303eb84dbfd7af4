// Every system call of a save fails once, in every way that it may: see saving_program.cpp.
//
// ACCELERATE_FAULT_STRIDE says how many calls are passed over between two faults (29),
// ACCELERATE_FAULT_FIRST where the first one is (each run draws its own and names it).
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include "launch/launching.h"

namespace accelerate::test {
namespace {

namespace fs = std::filesystem;

/// In memory: nothing is really flushed, and thousands of saves take seconds.
class FolderInMemory {
 public:
  FolderInMemory() : path_(::mkdtemp(name_.data())) {}
  ~FolderInMemory() { fs::remove_all(path_); }
  FolderInMemory(const FolderInMemory&) = delete;
  FolderInMemory& operator=(const FolderInMemory&) = delete;
  [[nodiscard]] const fs::path& path() const { return path_; }

 private:
  std::string name_ = "/dev/shm/accelerate_faults.XXXXXX";
  fs::path path_;
};

void expect_faults_do_no_harm(int processes, const Words& settings) {
  SCOPED_TRACE(std::to_string(processes) + " processes, " + testing::PrintToString(settings));
  const FolderInMemory folder;
  const auto stride = std::to_string(number_from_variable("ACCELERATE_FAULT_STRIDE", 29));
  const auto first = std::to_string(number_from_variable(
      "ACCELERATE_FAULT_FIRST", static_cast<int>(std::random_device{}() % 1000)));
  auto options = launch(processes, {},
                        Words{built("tests/saving_program"), "folder=" + folder.path().string(),
                              "faults=1", "stride=" + stride, "first=" + first} +
                            settings);
  options.environment = {{"LD_PRELOAD", built("tests/fault_shim.so")},
                         {"FAULT_FOLDER", (folder.path() / "saved").string()}};
  const auto outcome = run(options, patient(Seconds(300)));
  expect_clean_end(outcome, 0);
  EXPECT_FALSE(contains(outcome.error, "Interrupted system call")) << outcome.error;
  std::ifstream report(folder.path() / "report");
  std::string word;
  int faults = 0;
  report >> word >> faults;
  EXPECT_GT(faults, 10) << "is the shim loaded?";
  std::printf("%d processes, %s: %d faults, first=%s\n", processes,
              testing::PrintToString(settings).c_str(), faults, first.c_str());
}

TEST(SaveFaults, WithAutomaticNamesLeaveTheCheckpointBefore) {
  expect_faults_do_no_harm(1, {});
  expect_faults_do_no_harm(2, {});
}
TEST(SaveFaults, OfAsynchronousSavesLeaveTheCheckpointBefore) {
  expect_faults_do_no_harm(1, {"async=1"});
  expect_faults_do_no_harm(2, {"async=1"});
}
TEST(SaveFaults, InAFolderThatTheCallerNamedAreDetected) {
  expect_faults_do_no_harm(1, {"explicit=1"});
  expect_faults_do_no_harm(2, {"explicit=1"});
  expect_faults_do_no_harm(1, {"explicit=1", "async=1"});
  expect_faults_do_no_harm(2, {"explicit=1", "async=1"});
}
TEST(SaveFaults, InAFolderThatPythonWroteAreDetected) {
  expect_faults_do_no_harm(1, {"explicit=1", "unlisted=1"});
  expect_faults_do_no_harm(2, {"explicit=1", "unlisted=1"});
}

}  // namespace
}  // namespace accelerate::test
