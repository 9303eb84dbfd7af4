#include "checkpoint/save_job.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <iterator>
#include <mutex>
#include <set>
#include <system_error>

#include "accelerate/errors.h"
#include "accelerate/state.h"
#include "core/descriptor.h"
#include "core/log.h"
#include "core/run_in_parallel.h"
#include "core/text.h"

namespace accelerate::detail::checkpoint {
namespace {

namespace fs = std::filesystem;
using formats::kManifestName;
using formats::Manifest;
using formats::ManifestFile;

// The disk is the limit: two files at a time keep it busy while one is hashed or encoded.
constexpr std::size_t kFilesAtOnce = 4;

[[noreturn]] void refuse(std::string_view what, const fs::path& path,
                         const std::error_code& error) {
  throw CheckpointError(str("Cannot ", what, " '", path.string(), "': ", error.message(), "."),
                        path);
}

void make_folders(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) refuse("create the folder", folder, error);
}

/// Flushes a file, or the names in a folder, to the disk.
void sync(const fs::path& path) {
  const Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd || (::fsync(fd.get()) != 0 && errno != EINVAL)) {
    refuse("flush", path, {errno, std::generic_category()});
  }
}

/// Whether the name is one that `OutputFile` gives while it writes: "model.bin.4711.815.tmp".
bool is_temporary(std::string_view name) {
  constexpr std::string_view kEnd = ".tmp";
  if (!name.ends_with(kEnd)) return false;
  name.remove_suffix(kEnd.size());
  for (int number = 0; number < 2; ++number) {
    const auto digits = name.find_last_not_of("0123456789");
    if (digits == std::string_view::npos || digits + 1 == name.size() || name[digits] != '.') {
      return false;
    }
    name = name.substr(0, digits);
  }
  return !name.empty();
}

/// One line for a file; see `parse_part`.
std::string line_of(const ManifestFile& file) {
  return str(file.size, " ", file.xxh3, " ", file.name, "\n");
}

std::vector<ManifestFile> parse_part(std::string_view part) {
  std::vector<ManifestFile> files;
  for (const auto& line : split(part, '\n')) {
    if (line.empty()) continue;
    ManifestFile file;
    const char* end = line.data() + line.size();
    const auto size = std::from_chars(line.data(), end, file.size);
    const auto sum = std::from_chars(size.ptr + 1, end, file.xxh3);
    file.name.assign(sum.ptr + 1, end);
    files.push_back(std::move(file));
  }
  return files;
}

/// What the pre-hooks of a save have written beside our files.
std::vector<ManifestFile> other_files(const fs::path& folder, const std::set<std::string>& known) {
  std::vector<ManifestFile> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_directory()) {
      sync(entry.path());
      continue;
    }
    auto name = entry.path().lexically_relative(folder).generic_string();
    if (known.contains(name)) continue;
    sync(entry.path());
    files.push_back(formats::sum_of_file(folder, name));
  }
  return files;
}

/// What the checkpoint before had in this folder and the new one has not, and weights in the other
/// format, which loaders prefer.
std::vector<fs::path> stale_files(const fs::path& folder, const Manifest& now) {
  std::set<std::string> names;
  try {
    const auto before = formats::read_manifest(folder);
    if (before) {
      for (const auto& file : before->files) names.insert(file.name);
    }
  } catch (const FormatError&) {  // it is replaced
  }
  for (const auto& file : now.files) names.erase(file.name);
  const auto is_new = [&](const std::string& name) {
    return std::ranges::find(now.files, name, &ManifestFile::name) != now.files.end();
  };
  for (std::size_t i = 0; is_new(weights_file_name(i, /*safe_serialization=*/false)); ++i) {
    names.insert(weights_file_name(i, /*safe_serialization=*/true));
  }
  std::vector<fs::path> stale;
  for (const auto& name : names) stale.push_back(folder / name);
  return stale;
}

/// First out of sight by a rename, so that nobody meets half of it.
void remove_checkpoint(const fs::path& folder, const fs::path& staging) {
  std::error_code error;
  const auto aside = staging / str("removed_", folder.filename().string());
  fs::create_directories(staging, error);
  fs::rename(folder, aside, error);
  if (!error) fs::remove_all(aside, error);
  if (error) {
    warn(str("The old checkpoint '", folder.string(), "' cannot be removed: ", error.message(),
             ". Remove it by hand."));
  }
}

void prune(const fs::path& project, std::int64_t limit) {
  auto all = formats::numbered_checkpoints(project / "checkpoints");
  const auto excess = static_cast<std::int64_t>(all.size()) - limit;
  if (excess <= 0) return;
  info(str("Deleting ", excess, " checkpoints to make room for new checkpoint."));
  all.resize(static_cast<std::size_t>(excess));
  for (const auto& one : all) remove_checkpoint(one.path, project / kStagingName);
}

}  // namespace

fs::path SaveTarget::place() const {
  return project ? *project / kStagingName / folder.filename() : folder;
}

SaveJob::SaveJob(SaveTarget target, Manifest facts)
    : target_(std::move(target)), facts_(std::move(facts)) {}

SaveJob::~SaveJob() {
  if (published_ || !target_.project || owner_ != rank_) return;
  std::error_code ignored;
  fs::remove_all(target_.place(), ignored);
  fs::remove(*target_.project / kStagingName, ignored);  // if it is empty
}

// ---- the folder ---------------------------------------------------------------------------------

void SaveJob::make_place() {
  const auto place = target_.place();
  std::error_code error;
  if (target_.project) {
    if (fs::exists(target_.folder, error)) {
      throw ArgumentError(
          str("Checkpoint directory ", target_.folder.string(), " (", facts_.iteration,
              ") already exists. Set the iteration to start with: ProjectConfiguration::iteration, "
              "or Accelerator::set_save_iteration."));
    }
    fs::remove_all(*target_.project / kStagingName, error);  // left by a crash
    if (error) refuse("remove the leftover", *target_.project / kStagingName, error);
  }
  make_folders(place);
  std::vector<fs::path> leftovers;
  for (const auto& entry : fs::directory_iterator(place, error)) {
    if (is_temporary(entry.path().filename().string())) leftovers.push_back(entry.path());
  }
  if (error) refuse("read the folder", place, error);
  for (const auto& leftover : leftovers) fs::remove(leftover, error);
}

/// A file whose name other processes look for: those that find it see this folder.
std::string SaveJob::leave_token() {
  const auto name = str("save.", ::getpid(), ".",
                        std::chrono::system_clock::now().time_since_epoch().count(), ".tmp");
  const auto path = target_.place() / name;
  const Descriptor fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
  if (!fd) refuse("write", path, {errno, std::generic_category()});
  return name;
}

void SaveJob::open(const Exchange& exchange) {
  const PartialState state;
  const int rank = state.process_index();
  rank_ = rank;
  const auto given = exchange([&] {
    std::string token;
    if (rank == 0) {
      make_place();
      token = leave_token();
    }
    return str(token, "\n", target_.folder.string());
  });
  const auto token = given[0].substr(0, given[0].find('\n'));
  const auto folder_of = [&](std::size_t other) {
    return given[other].substr(given[other].find('\n') + 1);
  };
  for (std::size_t other = 1; other < given.size(); ++other) {
    if (folder_of(other) == folder_of(0)) continue;
    throw ArgumentError(str("save_state: process 0 saves to '", folder_of(0), "' and process ",
                            other, " to '", folder_of(other), "'. All must name one folder."));
  }
  const auto answers = exchange([&] {
    const auto path = target_.place() / token;
    const bool sees = ::access(path.c_str(), F_OK) == 0;
    owner_ = sees ? 0 : rank - state.local_process_index();
    if (owner_ == rank && rank != 0) make_place();
    return std::to_string(owner_);
  });
  owners_.clear();
  for (const auto& answer : answers) owners_.push_back(std::stoi(answer));
  if (rank == 0) ::unlink((target_.place() / token).c_str());
}

// ---- the files ----------------------------------------------------------------------------------

std::string SaveJob::write_files(SnapshotBuffers* buffers) {
  for (const auto& file : files_) outputs_.emplace_back(target_.place() / file.name);
  std::vector<OutputFile*> outputs;
  for (auto& output : outputs_) outputs.push_back(&output);
  // Buffers hold the tensors of one file at a time.
  const std::size_t threads = buffers != nullptr ? 1 : kFilesAtOnce;
  std::mutex mutex;
  std::string part;
  run_in_parallel(files_.size(), threads, [&](std::size_t i) {
    if (buffers != nullptr) buffers->copy({&files_[i], 1});
    write_state_file(files_[i], *outputs[i]);
    const auto sum = outputs[i]->finish_and_sum();
    if (target_.project) outputs[i]->publish();
    const std::lock_guard lock(mutex);
    part += line_of({.name = files_[i].name, .size = sum.size, .xxh3 = sum.xxh3});
  });
  return part;
}

void SaveJob::run(const Exchange& exchange, SnapshotBuffers* buffers) {
  const auto parts = exchange([&] { return write_files(buffers); });
  const auto nothing = std::string();
  if (!target_.project) {
    exchange([&] {
      for (auto& output : outputs_) output.publish();
      return nothing;
    });
  }
  exchange([&] {
    if (owner_ == rank_) seal(parts);
    return nothing;
  });
  published_ = true;
}

// ---- the manifest -------------------------------------------------------------------------------

void SaveJob::seal(const std::vector<std::string>& parts) {
  const auto place = target_.place();
  auto manifest = facts_;
  std::set<std::string> known;
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    if (owners_[rank] != owner_) continue;
    for (auto& file : parse_part(parts[rank])) {
      if (known.insert(file.name).second) manifest.files.push_back(std::move(file));
    }
  }
  if (target_.project) {
    auto others = other_files(place, known);
    std::ranges::move(others, std::back_inserter(manifest.files));
  }
  std::ranges::sort(manifest.files, {}, &ManifestFile::name);
  const auto problems = formats::verify_manifest(place, manifest, formats::VerifyDepth::kSizes);
  if (!problems.empty()) {
    throw CheckpointError(
        str("The checkpoint in '", place.string(), "' is not published: ", problems.front()),
        place);
  }
  const auto stale = target_.project ? std::vector<fs::path>() : stale_files(place, manifest);
  OutputFile file(place / kManifestName);
  file.write(formats::write_manifest(manifest));
  file.publish();
  if (target_.project) publish_folder();
  for (const auto& one : stale) {
    std::error_code error;
    fs::remove(one, error);
    if (error) refuse("remove the stale file", one, error);
  }
}

void SaveJob::publish_folder() {
  std::error_code error;
  make_folders(target_.folder.parent_path());
  fs::rename(target_.place(), target_.folder, error);
  if (error) refuse("publish the checkpoint", target_.folder, error);
  sync(target_.folder.parent_path());
  if (target_.total_limit) prune(*target_.project, *target_.total_limit);
  fs::remove(*target_.project / kStagingName, error);
}

}  // namespace accelerate::detail::checkpoint
