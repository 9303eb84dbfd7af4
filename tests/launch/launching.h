// tests/launch/launching.h - `accelerate launch` with the programs of these tests, in short.
//
//     const auto outcome = run(launch(2, {}, probe({"say=hello", "1:exit=3"})));
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "support/command.h"

namespace accelerate::test {

using Words = std::vector<std::string>;

inline const Words kNothing = {};

inline Words operator+(Words left, const Words& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

/// The program without Torch, and the one with the library, told what to do (actions.h).
inline Words probe(const Words& actions) { return Words{built("tests/launch_probe")} + actions; }
inline Words worker(const Words& actions) { return Words{built("tests/launch_worker")} + actions; }

/// The words of `accelerate launch` for CPU processes on one machine, at a port of its own.
inline Words launch_words(int processes, const Words& flags, const Words& program) {
  return Words{built("bin/accelerate"), "launch", "--cpu", "--num_processes",
               std::to_string(processes), "--main_process_port", "0", "--mixed_precision", "no",
               // One thread each: these tests are about processes.
               "--num_cpu_threads_per_process", "1"} +
         flags + program;
}

inline CommandOptions launch(int processes, const Words& flags, const Words& program) {
  return {.argv = launch_words(processes, flags, program)};
}

inline Words sorted(Words lines) {
  std::sort(lines.begin(), lines.end());
  return lines;
}

inline Words sorted_lines(const std::string& text) { return sorted(lines_of(text)); }

inline bool contains(const std::string& text, const std::string& what) {
  return text.find(what) != std::string::npos;
}

inline bool contains(const Words& lines, const std::string& line) {
  return std::find(lines.begin(), lines.end(), line) != lines.end();
}

/// The text behind `before`, up to the end of the line; "" when it is not there.
inline std::string rest_of_line(const std::string& text, const std::string& before) {
  const auto begin = text.find(before);
  if (begin == std::string::npos) return "";
  const auto end = text.find('\n', begin);
  return text.substr(begin + before.size(), end - begin - before.size());
}

/// How often a test repeats something, or the seed of its random choices, where a variable says it.
inline int number_from_variable(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : otherwise;
}

/// It ended with this code, by itself and in time, and left nothing.
inline void expect_clean_end(const Outcome& outcome, int code) {
  EXPECT_FALSE(outcome.timed_out) << outcome.text();
  EXPECT_EQ(outcome.code, code) << outcome.text();
  EXPECT_EQ(outcome.left_behind, kNothing) << outcome.text();
}

}  // namespace accelerate::test
