#include "launch/log_folder.h"

#include <algorithm>
#include <random>
#include <string_view>
#include <system_error>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::launch {
namespace {

std::string random_word() {
  constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyz0123456789";
  std::random_device device;
  std::uniform_int_distribution<std::size_t> pick(0, kLetters.size() - 1);
  std::string word;
  while (word.size() < 12) word += kLetters[pick(device)];
  return word;
}

void make(const std::filesystem::path& folder, const std::string& what) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (!error) return;
  throw ConfigError(str(what, " '", folder.string(), "' cannot be created: ", error.message(),
                        ". Choose another --log_dir."));
}

}  // namespace

LogFolder::LogFolder(const std::optional<std::filesystem::path>& base, const std::string& run_id,
                     bool has_logs)
    : temporary_(!base && !has_logs) {
  if (base) {
    check_base(*base);
    base_ = std::filesystem::absolute(*base);
    make(base_, "the folder for logs");
  } else {
    std::error_code no_such_folder;  // TMPDIR may name a missing folder
    auto parent = std::filesystem::temp_directory_path(no_such_folder);
    if (no_such_folder) parent = "/tmp";
    base_ = parent / ("torchelastic_" + random_word());
  }
  std::string name = run_id;
  std::ranges::replace(name, '/', '_');
  run_ = base_ / (name + "_" + random_word());
}

void LogFolder::check_base(const std::filesystem::path& base) {
  std::error_code ignored;
  if (!std::filesystem::exists(base, ignored) || std::filesystem::is_directory(base, ignored)) {
    return;
  }
  throw ConfigError(
      str("--log_dir is '", base.string(), "', which is a file. It must be a folder."));
}

LogFolder::~LogFolder() {
  std::error_code ignored;
  if (temporary_) std::filesystem::remove_all(base_, ignored);
}

std::filesystem::path LogFolder::of_worker(int attempt, int local_rank) const {
  return run_ / str("attempt_", attempt) / str(local_rank);
}

std::filesystem::path LogFolder::make_for_worker(int attempt, int local_rank) const {
  auto folder = of_worker(attempt, local_rank);
  make(folder, "the folder for the logs of a worker");
  return folder;
}

}  // namespace accelerate::detail::launch
