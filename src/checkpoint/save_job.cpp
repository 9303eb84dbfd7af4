#include "checkpoint/save_job.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <system_error>

#include "accelerate/errors.h"
#include "accelerate/state.h"
#include "core/folders.h"
#include "core/log.h"
#include "core/run_in_parallel.h"
#include "core/text.h"
#include "formats/dcp_writer.h"
#include "formats/pickle.h"

namespace accelerate::detail::checkpoint {
namespace {

namespace fs = std::filesystem;
using formats::kDcpMetadataName;
using formats::kManifestName;
using formats::Manifest;
using formats::ManifestFile;

// The disk is the limit: some files at a time keep it busy while others are hashed or encoded.
constexpr std::size_t kFilesAtOnce = 4;

/// The path as it is if the working folder does not exist any more: making it will fail.
fs::path from_root(const fs::path& path) {
  std::error_code error;
  auto result = fs::absolute(path, error);
  return error ? path : result;
}

/// Whether a folder can be moved from one to the other: they are on the same mount.
bool are_on_one_mount(const fs::path& a, const fs::path& b) {
  struct statx of_a{}, of_b{};
  const auto look = [](const fs::path& path, struct statx& result) {
    return ::statx(AT_FDCWD, path.c_str(), 0, STATX_BASIC_STATS | STATX_MNT_ID, &result) == 0;
  };
  if (!look(a, of_a) || !look(b, of_b)) return true;  // one is not there yet
  return of_a.stx_dev_major == of_b.stx_dev_major && of_a.stx_dev_minor == of_b.stx_dev_minor &&
         of_a.stx_mnt_id == of_b.stx_mnt_id;
}

/// Beside the folder of checkpoints, which Python expects to have nothing else in it; inside if
/// that is a link to, or a mount of, another file system.
fs::path staging_beside(const fs::path& checkpoints) {
  const auto project = checkpoints.parent_path();
  return (are_on_one_mount(project, checkpoints) ? project : checkpoints) / kStagingName;
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

/// What a process tells the others about a file.
struct WrittenFile {
  ManifestFile file;
  std::vector<formats::DcpEntry> entries;  // of shards
};

std::string encoded(const std::vector<WrittenFile>& files) {
  Value::List list;
  for (const auto& [file, entries] : files) {
    list.push_back(Value::tuple({file.name, file.size, static_cast<std::int64_t>(file.xxh3),
                                 formats::dcp_entries_to_value(entries)}));
  }
  return formats::pickle_dumps(Value(std::move(list)));
}

std::vector<WrittenFile> decoded(std::string_view part) {
  std::vector<WrittenFile> files;
  const auto list = formats::pickle_loads(part);
  for (const auto& item : list.items()) {
    const auto fields = item.items();
    files.push_back({.file = {.name = fields[0].as_string(),
                              .size = fields[1].as_int(),
                              .xxh3 = static_cast<std::uint64_t>(fields[2].as_int())},
                     .entries = formats::dcp_entries_from(fields[3])});
  }
  return files;
}

/// The folder of shards that a file belongs to; empty for other files.
std::string shard_folder(const fs::path& name) { return name.parent_path().string(); }

/// What the pre-hooks of a save have written beside our files, flushed.
void add_other_files(const fs::path& folder, const std::string& below,
                     const std::set<std::string>& known, std::vector<ManifestFile>& files) {
  for (const auto& entry : entries_in(folder / below)) {
    const auto name = below + entry.path().filename().string();
    std::error_code error;
    if (entry.is_directory(error)) {
      if (!entry.is_symlink(error)) add_other_files(folder, name + "/", known, files);
    } else if (!known.contains(name)) {
      flush_path(entry.path());
      files.push_back(formats::sum_of_file(folder, name));
    }
  }
  if (!below.empty()) flush_path(folder / below);
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

}  // namespace

SaveJob::SaveJob(SaveTarget target, Manifest facts)
    : target_(std::move(target)),
      folder_(from_root(target_.folder)),
      staging_(target_.automatic ? staging_beside(folder_.parent_path()) : fs::path()),
      place_(target_.automatic ? staging_ / folder_.filename() : folder_),
      manifest_(std::move(facts)) {}

SaveJob::~SaveJob() {
  if (published_ || !lock_) return;
  std::error_code ignored;
  for (const auto& file : files_) {
    if (!shard_folder(file.name).empty()) fs::remove_all(staged(file.name).parent_path(), ignored);
  }
  if (!target_.automatic) return;
  fs::remove_all(place_, ignored);
  fs::remove(staging_, ignored);  // if it is empty
}

bool SaveJob::left_nothing() const {
  if (!target_.automatic) return true;
  std::error_code error;
  const auto is_rank_0 = [](int owner) { return owner == 0; };
  return std::ranges::all_of(owners_, is_rank_0) && !fs::exists(folder_, error);
}

// ---- the folder ---------------------------------------------------------------------------------

void SaveJob::make_place() {
  const auto locked = target_.automatic ? folder_.parent_path().parent_path() : folder_;
  make_folders(locked);
  lock_ = lock_folder(locked, "save_state");
  std::error_code error;
  if (target_.automatic) {
    if (fs::exists(folder_, error)) {
      throw ArgumentError(
          str("Checkpoint directory ", target_.folder.string(), " (", manifest_.iteration,
              ") already exists. Set the iteration to start with: ProjectConfiguration::iteration, "
              "or Accelerator::set_save_iteration."));
    }
    remove_path(staging_);  // left by a crash
  }
  make_folders(place_);
  for (const auto& entry : entries_in(place_)) {
    if (is_temporary(entry.path().filename().string())) remove_path(entry.path());
  }
}

void SaveJob::open(const Exchange& exchange) {
  const PartialState state;
  const int rank = state.process_index();
  rank_ = rank;
  std::optional<OutputFile> token_file;  // others look for it: those that find it see this folder
  const auto given = exchange([&] {
    std::string token;
    if (rank == 0) {
      make_place();
      token = token_file.emplace(place_ / "save").temporary().filename().string();
    }
    return str(token, "\n", target_.folder.string());
  });
  const auto token = given[0].substr(0, given[0].find('\n'));
  suffix_ = token.substr(token.find('.'));
  const auto folder_of = [&](std::size_t other) {
    return given[other].substr(given[other].find('\n') + 1);
  };
  for (std::size_t other = 1; other < given.size(); ++other) {
    if (folder_of(other) == folder_of(0)) continue;
    throw ArgumentError(str("save_state: process 0 saves to '", folder_of(0), "' and process ",
                            other, " to '", folder_of(other), "'. All must name one folder."));
  }
  const auto answers = exchange([&] {
    std::error_code error;
    const bool sees = fs::exists(place_ / token, error);
    owner_ = sees ? 0 : rank - state.local_process_index();
    if (owner_ == 0 && !sees) {
      throw CheckpointError(
          str("Process ", rank, " does not see the folder '", place_.string(),
              "' that process 0 has made on the same host. Let them name the same folder."),
          place_);
    }
    if (owner_ == rank && rank != 0) make_place();
    return std::to_string(owner_);
  });
  owners_.clear();
  for (const auto& answer : answers) owners_.push_back(std::stoi(answer));
}

// ---- the files ----------------------------------------------------------------------------------

fs::path SaveJob::staged(const fs::path& name) const {
  const auto folder = shard_folder(name);
  if (folder.empty() || target_.automatic) return place_ / name;
  return place_ / (folder + suffix_) / name.filename();
}

std::string SaveJob::write_files(SnapshotBuffers* buffers) {
  for (const auto& file : files_) {
    if (!shard_folder(file.name).empty()) make_folders(staged(file.name).parent_path());
    outputs_.emplace_back(staged(file.name));
  }
  std::vector<OutputFile*> outputs;
  for (auto& output : outputs_) outputs.push_back(&output);
  // Buffers hold the tensors of one file at a time.
  const std::size_t threads = buffers != nullptr ? 1 : kFilesAtOnce;
  ByteBar bar("saving", bytes_in(files_), target_.progress);
  std::mutex mutex;
  std::vector<WrittenFile> written;
  run_in_parallel(files_.size(), threads, [&](std::size_t i) {
    const bool is_sharded = !shard_folder(files_[i].name).empty();
    // Shards are brought from a device one by one.
    if (buffers != nullptr && !is_sharded) buffers->copy({&files_[i], 1});
    auto entries = write_state_file(files_[i], *outputs[i], bar);
    const auto sum = outputs[i]->finish_and_sum();
    if (target_.automatic || is_sharded) outputs[i]->publish_unflushed();
    const std::lock_guard lock(mutex);
    written.push_back({.file = {.name = files_[i].name, .size = sum.size, .xxh3 = sum.xxh3},
                       .entries = std::move(entries)});
  });
  return encoded(written);
}

void SaveJob::run(const Exchange& exchange, SnapshotBuffers* buffers) {
  const auto parts = exchange([&] { return write_files(buffers); });
  const bool owns = owner_ == rank_;
  const auto by_owner = [&](const std::function<void()>& work) {
    exchange([&] {
      if (owns) work();
      return std::string();
    });
  };
  by_owner([&] {
    collect(parts);
    if (!target_.manifest) return;
    if (!target_.automatic) invalidate_unlisted_files();
    write_manifest();
  });
  if (!target_.automatic) {
    // Nothing is written any more: what follows are renames, to be a mixture for a short time only.
    exchange([&] {
      publish_files();
      return std::string();
    });
  }
  by_owner([&] { seal(); });
  published_ = true;
  // Only now: hosts that do not share the folder keep an old checkpoint until all have the new one.
  if (!target_.automatic) return;
  try {
    by_owner([&] { prune(); });
  } catch (const CommError&) {
    // A process is gone. The checkpoint is published; the next collective says what has happened.
  }
}

// ---- the manifest -------------------------------------------------------------------------------

void SaveJob::collect(const std::vector<std::string>& parts) {
  std::set<std::string> known;
  std::map<std::string, std::vector<std::vector<formats::DcpEntry>>> shards;  // by folder
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    for (auto& [file, entries] : decoded(parts[rank])) {
      const auto folder = shard_folder(file.name);
      if (!folder.empty()) {
        auto& of_processes = shards[folder];
        of_processes.resize(parts.size());
        std::ranges::move(entries, std::back_inserter(of_processes[rank]));
      }
      if (owners_[rank] != owner_) continue;
      known.insert(file.name);
      manifest_.files.push_back(std::move(file));
    }
  }
  for (const auto& [folder, of_processes] : shards) write_shard_metadata(folder, of_processes);
  if (target_.automatic) {
    for (const auto& folder : shard_folders_) known.insert(str(folder, "/", kDcpMetadataName));
    add_other_files(place_, "", known, manifest_.files);
  }
  std::ranges::sort(manifest_.files, {}, &ManifestFile::name);
}

void SaveJob::write_shard_metadata(const std::string& folder,
                                   std::span<const std::vector<formats::DcpEntry>> parts) {
  const auto name = str(folder, "/", kDcpMetadataName);
  OutputFile file(staged(name));
  file.write(formats::dcp_metadata(parts, (target_.folder / folder).string()));
  const auto sum = file.finish_and_sum();
  file.publish();
  manifest_.files.push_back({.name = name, .size = sum.size, .xxh3 = sum.xxh3});
  shard_folders_.push_back(folder);
}

void SaveJob::publish_files() {
  auto output = outputs_.begin();
  for (const auto& file : files_) {
    if (shard_folder(file.name).empty()) output->publish_unflushed();
    ++output;
  }
  for (const auto& folder : shard_folders_) {
    replace_folder(staged(fs::path(folder) / kDcpMetadataName).parent_path(), place_ / folder);
  }
}

void SaveJob::write_manifest() {
  manifest_file_.emplace(place_ / kManifestName).write(formats::write_manifest(manifest_));
  manifest_file_->finish();
}

/// A folder without a manifest, which Python wrote, gets one that cannot hold: until the files are
/// replaced, they are a mixture.
void SaveJob::invalidate_unlisted_files() const {
  std::error_code error;
  const auto is_there = [&](const ManifestFile& file) {
    return fs::exists(place_ / file.name, error);
  };
  if (is_there({.name = std::string(kManifestName)}) ||
      std::ranges::none_of(manifest_.files, is_there)) {
    return;
  }
  auto manifest = manifest_;
  manifest.files = {{.name = "what an interrupted save_state would have written"}};
  OutputFile file(place_ / kManifestName);
  file.write(formats::write_manifest(manifest));
  file.publish();
}

void SaveJob::seal() {
  const auto problems = formats::verify_manifest(place_, manifest_, formats::VerifyDepth::kSizes);
  if (!problems.empty()) {
    throw CheckpointError(
        str("The checkpoint in '", place_.string(), "' is not published: ", problems.front()),
        place_);
  }
  if (!target_.manifest) return flush_path(place_);
  if (!target_.automatic) {
    // Before the new manifest: with a weights file that it does not name, the folder is a mixture.
    const auto stale = stale_files(place_, manifest_);
    std::error_code ignored;
    for (const auto& one : stale) {
      remove_path(one);
      if (one.parent_path() != place_) fs::remove(one.parent_path(), ignored);  // if it is empty
    }
    if (!stale.empty()) flush_path(place_);
  }
  manifest_file_->publish();
  if (target_.automatic) publish_folder();
}

void SaveJob::publish_folder() {
  const auto checkpoints = folder_.parent_path();
  make_folders(checkpoints);
  rename_path(place_, folder_);
  try {
    flush_path(checkpoints);
  } catch (const CheckpointError&) {
    std::error_code ignored;  // it is complete, but a crash may lose it: then it was not saved
    fs::rename(folder_, place_, ignored);
    throw;
  }
}

void SaveJob::prune() const {
  std::error_code error;
  try {
    auto others = formats::numbered_checkpoints(folder_.parent_path());
    std::erase_if(others, [&](const auto& one) { return one.path == folder_; });
    const auto excess = target_.total_limit
                            ? static_cast<std::int64_t>(others.size()) + 1 - *target_.total_limit
                            : 0;
    if (excess > 0) {
      info(str("Deleting ", excess, " checkpoints to make room for new checkpoint."));
      make_folders(staging_);
    }
    for (std::int64_t i = 0; i < excess; ++i) {
      // A rename comes first, so that a reader never sees half of a checkpoint.
      const auto& old = others[static_cast<std::size_t>(i)].path;
      const auto aside = staging_ / str("removed_", old.filename().string());
      rename_path(old, aside);
      remove_path(aside);
    }
  } catch (const CheckpointError& failure) {
    warn(str("An old checkpoint remains: ", failure.what(), " The next save tries again."));
  }
  fs::remove(staging_, error);  // if it is empty
}

}  // namespace accelerate::detail::checkpoint
