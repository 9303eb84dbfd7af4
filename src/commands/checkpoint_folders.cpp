#include "commands/checkpoint_folders.h"

#include <algorithm>
#include <chrono>
#include <system_error>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::commands {
namespace {

namespace fs = std::filesystem;

// Explicit saves have any name: a folder with such files is a checkpoint.
bool looks_like_checkpoint(const fs::path& folder) {
  return std::ranges::any_of(fs::directory_iterator(folder), [](const fs::directory_entry& entry) {
    const auto ending = entry.path().extension();
    return entry.path().filename() == formats::kManifestName || ending == ".safetensors" ||
           ending == ".bin" || ending == ".pkl" || ending == ".distcp";
  });
}

double seconds_since_1970(fs::file_time_type time) {
  const auto system = std::chrono::file_clock::to_sys(time);
  return std::chrono::duration<double>(system.time_since_epoch()).count();
}

CheckpointFolder facts_of(const fs::path& path) {
  CheckpointFolder facts{.path = path};
  try {
    facts.manifest = formats::read_manifest(path);
  } catch (const CheckpointError& error) {
    facts.problem = str("damaged: ", error.what());
  }
  if (!facts.manifest) {
    if (facts.problem.empty()) facts.problem = "no manifest (written by Python, or torn)";
    for (const auto& file : files_of(path)) {
      std::error_code gone;
      ++facts.files;
      facts.bytes += static_cast<std::int64_t>(fs::file_size(path / file, gone));
      facts.saved_at =
          std::max(facts.saved_at, seconds_since_1970(fs::last_write_time(path / file, gone)));
    }
    return facts;
  }
  facts.saved_at = facts.manifest->saved_at;
  facts.files = static_cast<std::int64_t>(facts.manifest->files.size());
  for (const auto& file : facts.manifest->files) facts.bytes += file.size;
  const auto problems = verify_manifest(path, *facts.manifest, formats::VerifyDepth::kSizes);
  if (!problems.empty()) facts.problem = str("damaged: ", problems.front());
  return facts;
}

}  // namespace

std::string CheckpointFolder::state() const { return problem.empty() ? "complete" : problem; }

const CheckpointFolder* CheckpointList::newest() const {
  const CheckpointFolder* newest = nullptr;
  for (const auto& checkpoint : checkpoints) {
    if (!checkpoint.problem.empty()) continue;
    if (newest == nullptr || checkpoint.saved_at >= newest->saved_at) newest = &checkpoint;
  }
  return newest;
}

CheckpointList list_checkpoints(const fs::path& folder) {
  require_existing(folder);
  auto parent = folder / "checkpoints";
  auto numbered = formats::numbered_checkpoints(parent);
  if (numbered.empty()) numbered = formats::numbered_checkpoints(parent = folder);
  CheckpointList list;
  for (const auto& checkpoint : numbered) list.checkpoints.push_back(facts_of(checkpoint.path));
  if (numbered.empty() && fs::is_directory(folder) && looks_like_checkpoint(folder)) {
    list.checkpoints.push_back(facts_of(folder));
  }
  // save_state prepares PROJECT/checkpoints/checkpoint_N in PROJECT/.accelerate_staging.
  for (const auto& project : {folder, fs::weakly_canonical(parent).parent_path()}) {
    const auto staging = project / ".accelerate_staging";
    std::error_code none;
    const auto left = std::distance(fs::directory_iterator(staging, none), {});
    if (left == 0) continue;
    list.staging = staging;
    list.unfinished = left;
    break;
  }
  if (list.checkpoints.empty() && list.unfinished == 0) {
    throw ConfigError(
        str("'", folder.string(),
            "' has no checkpoints. Name a project folder with checkpoints/, a folder with "
            "checkpoint_N folders, or a checkpoint."));
  }
  return list;
}

std::vector<std::string> files_of(const fs::path& folder) {
  std::vector<std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    auto name = entry.path().lexically_relative(folder).generic_string();
    if (entry.is_regular_file() && name != formats::kManifestName) files.push_back(std::move(name));
  }
  std::ranges::sort(files);
  return files;
}

void require_existing(const fs::path& path) {
  std::error_code error;
  if (fs::exists(path, error)) return;
  std::vector<std::string> names;
  const auto parent = path.has_parent_path() ? path.parent_path() : fs::path(".");
  for (fs::directory_iterator it(parent, error), end; !error && it != end; it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  std::ranges::sort(names);  // of equally near names, the same one each time
  throw ConfigError(str("There is no file or folder '", path.string(), "'.",
                        did_you_mean(path.filename().string(), names)));
}

}  // namespace accelerate::detail::commands
