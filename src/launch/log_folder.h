// src/launch/log_folder.h - the folders of a run's files: <base>/<run id>_<random>/attempt_<k>/
// <local rank>/{stdout.log,stderr.log,error.json}.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace accelerate::detail::launch {

class LogFolder {
 public:
  /// Without a base: a temporary folder, created with its first file (ours, or a worker's error
  /// file). The destructor removes it unless `has_logs`.
  ///
  /// Throws `ConfigError` if the base is not a folder or cannot be created.
  LogFolder(const std::optional<std::filesystem::path>& base, const std::string& run_id,
            bool has_logs);
  ~LogFolder();
  LogFolder(const LogFolder&) = delete;
  LogFolder& operator=(const LogFolder&) = delete;

  /// Throws `ConfigError` if the base exists and is not a folder.
  static void check_base(const std::filesystem::path& base);

  [[nodiscard]] const std::filesystem::path& run() const noexcept { return run_; }
  /// True if the destructor removes the folder.
  [[nodiscard]] bool temporary() const noexcept { return temporary_; }
  /// The folder to remove if the destructor does not run.
  [[nodiscard]] const std::filesystem::path& base() const noexcept { return base_; }

  /// The path of one worker's folder, which may not exist.
  [[nodiscard]] std::filesystem::path of_worker(int attempt, int local_rank) const;
  /// Creates the folder of one worker. Throws `ConfigError` with the reason if that fails.
  [[nodiscard]] std::filesystem::path make_for_worker(int attempt, int local_rank) const;

 private:
  bool temporary_ = false;
  std::filesystem::path base_;
  std::filesystem::path run_;
};

}  // namespace accelerate::detail::launch
