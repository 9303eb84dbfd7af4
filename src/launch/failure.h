// src/launch/failure.h - failed workers, and the report with the root cause first.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "core/subprocess.h"

namespace accelerate::detail::launch {

// Exit codes of a launcher that has none of a worker to pass on.
inline constexpr int kFailure = 1;
inline constexpr int kWrongInput = 2;
inline constexpr int kPeerGone = 70;

struct WorkerFailure {
  int rank = 0;
  int local_rank = 0;
  std::string host = {};
  pid_t pid = 0;
  ExitStatus status = {};
  /// Microseconds since 1970, to order failures of all machines.
  std::int64_t time_us = 0;
  /// The file with the worker's exception and its message; "" if there is none.
  std::string error_file = {};
  std::string message = {};
  /// The last lines of its stderr, or of its stdout if that is empty.
  std::vector<std::string> last_lines = {};
  /// The launcher ended it because another worker failed.
  bool terminated_by_launcher = false;

  /// Exit code 70: it lost its peers, which is seldom the root cause.
  [[nodiscard]] bool is_consequence() const noexcept;
  /// Exit code 75: it was asked to stop and saved its state, which is not an error.
  [[nodiscard]] bool is_preempted() const noexcept;
};

/// True if all of them are preempted, and there is one.
[[nodiscard]] bool is_preemption(const std::vector<WorkerFailure>& failures);

/// The root cause: the earliest failure. If all workers only lost their peers (exit code 70), the
/// rank that most of them blame, even if the launcher had to end it; else the first that lost them.
/// A preempted worker only if all are. nullopt for an empty list.
[[nodiscard]] std::optional<WorkerFailure> root_cause(const std::vector<WorkerFailure>& failures);

/// Reads time and message from the error file of torch's or our `record`. Returns false if there is
/// no file. The end of a Python stack becomes `last_lines` if these are empty.
bool read_error_file(const std::filesystem::path& path, WorkerFailure& failure);

/// The report in several lines: the root cause, then the other failures. "" if there are none.
[[nodiscard]] std::string failure_report(const std::string& program,
                                         const std::vector<WorkerFailure>& failures);

}  // namespace accelerate::detail::launch
