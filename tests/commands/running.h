// tests/commands/running.h - runs `accelerate` and other programs as processes.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

#include "core/subprocess.h"
#include "launch/planning.h"

namespace accelerate::detail::commands {

using launch::has;
using launch::starts;
using launch::Variables;
using launch::Words;

/// What a command prints, and its exit code.
struct Ran {
  std::string out;
  std::string err;
  int code = -1;
};

/// PATH, and the variables of the test.
inline std::vector<std::string> clean_environment(const Variables& more) {
  std::vector<std::string> result;
  if (!more.contains("HF_HOME")) result.push_back("HF_HOME=" + testing::TempDir() + "/no_home");
  const auto process = Environment::process();
  for (const auto& [name, value] : process.variables()) {
    const bool known = name == "PATH" || name.ends_with("SAN_OPTIONS");
    if (known && !more.contains(name)) result.push_back(name + "=" + value);
  }
  for (const auto& [name, value] : more) result.push_back(name + "=" + value);
  return result;
}

struct Where {
  Variables environment = {};
  std::filesystem::path folder = {};
  std::string program = {};
};

inline Ran ran(const Words& argv, const Where& where = {}) {
  Ran result;
  ProcessSet processes([&](std::size_t, ProcessSet::Stream stream, std::string_view line) {
    (stream == ProcessSet::Stream::kOutput ? result.out : result.err).append(line).push_back('\n');
  });
  processes.spawn({.argv = argv,
                   .program = where.program,
                   .environment = clean_environment(where.environment),
                   .working_directory = where.folder,
                   .output = StreamTarget::kPipe,
                   .error = StreamTarget::kPipe});
  const auto deadline = ProcessSet::Clock::now() + std::chrono::seconds(60);
  if (!processes.wait_all(deadline)) processes.terminate(std::chrono::milliseconds(0));
  result.code = processes.status(0).shell_code();
  return result;
}

inline const std::string kAccelerate = ACCELERATE_CLI;

}  // namespace accelerate::detail::commands
