// src/launch/failure.h - a worker that failed, and the report that shows the first of them first.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "core/subprocess.h"

namespace accelerate::detail {

struct WorkerFailure {
  int rank = 0;
  int local_rank = 0;
  std::string host = {};
  pid_t pid = 0;
  ExitStatus status = {};
  /// Microseconds since 1970: the order of failures over all machines.
  std::int64_t time_us = 0;
  /// Where the worker wrote its exception, if it did, and what it wrote.
  std::string error_file = {};
  std::string message = {};
  /// What it wrote last, stderr before stdout.
  std::vector<std::string> last_lines = {};
  /// We ended it, because of another.
  bool terminated_by_launcher = false;

  /// Exit code 70: it lost its peers, which is seldom the cause.
  [[nodiscard]] bool is_consequence() const noexcept;
};

/// The one to blame: not ended by us, not a mere loss of peers where another failed too, then the
/// earliest. Nothing for an empty list.
[[nodiscard]] std::optional<WorkerFailure> root_cause(const std::vector<WorkerFailure>& failures);

/// Time and message from the error file of torch's or our `record`; false where there is none. The
/// end of a Python stack becomes the last lines where none are known.
bool read_error_file(const std::filesystem::path& path, WorkerFailure& failure);

/// The report for people, several lines: the root cause first, then the others. "" when there are
/// no failures.
[[nodiscard]] std::string failure_report(const std::string& program,
                                         const std::vector<WorkerFailure>& failures);

}  // namespace accelerate::detail
