// src/core/log_format.h - Python's %-style formats for log records.
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "accelerate/logging.h"

namespace accelerate::detail {

/// A format such as "%(asctime)s %(levelname)-8s %(message)s", parsed once.
class LogFormat {
 public:
  /// Throws `ConfigError` for a field that does not exist or a conversion that does not fit it.
  LogFormat(const std::string& format, std::string datefmt);

  [[nodiscard]] std::string apply(const LogRecord& record) const;

 private:
  struct Field {
    std::string name;
    std::string flags;  // what stands between the name and the conversion: "-8", "03", ".3"
    char conversion = 's';
  };
  [[nodiscard]] std::variant<std::string, long long, double> value_of(
      const std::string& name, const LogRecord& record) const;
  [[nodiscard]] std::string asctime(const LogRecord& record) const;

  std::vector<std::variant<std::string, Field>> parts_;
  std::string datefmt_;
};

/// "main" for "int {anonymous}::main(int, char**)": the bare name of a function.
[[nodiscard]] std::string bare_function_name(std::string_view signature);

}  // namespace accelerate::detail
