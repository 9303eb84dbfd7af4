// tests/resume/resuming.h - runs of resume_program, broken and unbroken, and their traces.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include "launch/launching.h"

namespace accelerate::test {

/// The lines of a process by the number of the batch. A batch that was computed twice, because the
/// first time came after the last checkpoint, must have the same line both times.
using Lines = std::map<int, std::string>;
inline Lines lines_of_process(const std::filesystem::path& folder, int rank) {
  Lines lines;
  std::ifstream file(folder / ("trace." + std::to_string(rank)));
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    int batch = 0;
    words >> word >> batch;
    const auto [found, is_new] = lines.emplace(batch, line);
    if (is_new || found->second == line) continue;
    ADD_FAILURE() << "process " << rank << " computed a batch twice:\n"
                  << found->second << "\n"
                  << line;
    break;
  }
  return lines;
}

struct Case {
  int processes = 1;
  Words settings = {};
  const char* name = "resume_program";

  /// The words of the program, which puts its checkpoints and traces into `folder`.
  [[nodiscard]] Words program(const std::filesystem::path& folder, const Words& more = {}) const {
    return Words{built("tests/" + std::string(name)), "folder=" + folder.string()} + settings +
           more;
  }
  [[nodiscard]] CommandOptions command(const std::filesystem::path& folder,
                                       const Words& more = {}) const {
    return launch(processes, {}, program(folder, more));
  }
};

inline void run_unbroken(const Case& one, const std::filesystem::path& folder) {
  expect_clean_end(run(one.command(folder), patient(Seconds(120))), 0);
}

/// How many lines process 0 has written; a batch that was computed twice counts twice.
inline int batches_in(const std::filesystem::path& folder) {
  std::ifstream file(folder / "trace.0");
  int lines = 0;
  for (std::string line; std::getline(file, line);) ++lines;
  return lines;
}

inline void expect_same_traces(int processes, const std::filesystem::path& unbroken,
                               const std::filesystem::path& broken) {
  for (int rank = 0; rank < processes; ++rank) {
    const auto expected = lines_of_process(unbroken, rank);
    EXPECT_GT(expected.size(), 10U);
    const auto lines = lines_of_process(broken, rank);
    EXPECT_EQ(lines.size(), expected.size()) << "process " << rank;
    for (const auto& [batch, line] : expected) {
      const auto found = lines.find(batch);
      ASSERT_NE(found, lines.end()) << "batch " << batch << " of process " << rank;
      ASSERT_EQ(found->second, line) << "process " << rank;
    }
  }
}

}  // namespace accelerate::test
