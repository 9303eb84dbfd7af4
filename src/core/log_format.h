// src/core/log_format.h - Python's %-style formats for log entries.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "accelerate/logging.h"

namespace accelerate::detail::inline core {

/// A format such as "%(asctime)s %(levelname)-8s %(message)s", parsed once.
class LogFormat {
 public:
  /// Throws `ConfigError` for a field that does not exist or a conversion that does not fit it.
  LogFormat(const std::string& format, std::string datefmt);

  [[nodiscard]] std::string apply(const LogEntry& entry) const;

 private:
  struct Part {
    std::string text;       ///< literal text, or the name of a field
    std::string directive;  ///< what printf takes: "%-8s"; "" for literal text
  };
  void add_field(const std::string& format, std::string name, const std::string& flags,
                 char conversion);

  std::vector<Part> parts_;
  std::string datefmt_;
};

/// "main" for "int {anonymous}::main(int, char**)": the bare name of a function.
[[nodiscard]] std::string bare_function_name(std::string_view signature);

}  // namespace accelerate::detail::inline core
