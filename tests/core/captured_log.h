// tests/core/captured_log.h - the messages of the library, for tests that assert them.
#pragma once

#include <string>
#include <vector>

#include "accelerate/logging.h"

namespace accelerate::test {

/// Collects messages until the end of the scope; nothing goes to stderr. Warnings and worse, or
/// those of another level and worse.
class CapturedLog {
 public:
  explicit CapturedLog(LogLevel level = LogLevel::kWarning) {
    basic_config({.level = level,
                  .sink = [this](const LogEntry& record) { messages_.push_back(record.message); }});
  }
  ~CapturedLog() { basic_config({.level = LogLevel::kWarning}); }
  CapturedLog(const CapturedLog&) = delete;
  CapturedLog& operator=(const CapturedLog&) = delete;

  [[nodiscard]] const std::vector<std::string>& messages() const { return messages_; }

 private:
  std::vector<std::string> messages_;
};

}  // namespace accelerate::test
