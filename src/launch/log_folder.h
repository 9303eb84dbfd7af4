// src/launch/log_folder.h - where the files of a run lie: <base>/<run id>_<random>/attempt_<k>/
// <local rank>/{stdout.log,stderr.log,error.json}.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace accelerate::detail {

class LogFolder {
 public:
  /// Without a base: a temporary folder that is made when the first file is needed (by us, or by a
  /// worker that has an error to write down) and removed by `~LogFolder`, unless logs are in it.
  ///
  /// Throws `ConfigError` for a base that is no folder or cannot be made.
  LogFolder(const std::optional<std::filesystem::path>& base, const std::string& run_id,
            bool has_logs);
  ~LogFolder();
  LogFolder(const LogFolder&) = delete;
  LogFolder& operator=(const LogFolder&) = delete;

  /// Throws `ConfigError` for a base that is there and is no folder.
  static void check_base(const std::filesystem::path& base);

  [[nodiscard]] const std::filesystem::path& run() const noexcept { return run_; }
  /// It will be removed.
  [[nodiscard]] bool temporary() const noexcept { return temporary_; }
  /// What has to be removed when nobody calls the destructor.
  [[nodiscard]] const std::filesystem::path& base() const noexcept { return base_; }

  /// The folder of one worker, not made.
  [[nodiscard]] std::filesystem::path of_worker(int attempt, int local_rank) const;
  /// The same, made. Throws `ConfigError` with the reason when that is not possible.
  [[nodiscard]] std::filesystem::path make_for_worker(int attempt, int local_rank) const;

 private:
  bool temporary_ = false;
  std::filesystem::path base_;
  std::filesystem::path run_;
};

}  // namespace accelerate::detail
