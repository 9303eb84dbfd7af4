// src/checkpoint/save_job.h - a checkpoint of all processes: written, agreed upon, published.
//
// With automatic names the files are written to .accelerate_staging/checkpoint_<n> beside the
// folder `checkpoints`, and one rename publishes all of them. In a folder that the caller named,
// each file is written under a temporary name; when all processes have written theirs, the files
// are renamed one by one and the manifest (formats/manifest.h) comes last: until then the old
// manifest tells that the files are a mixture. A folder of shards is written under a temporary name
// as a whole; its `.metadata`, of what all processes have written, comes before the rename.
//
// A file is flushed before it gets its name, a folder before and after it gets its name, and old
// checkpoints are removed at last. What a crash has left, the next save removes; a lock keeps it
// from files of a save that is still under way.
#pragma once

#include <cstdint>
#include <filesystem>
#include <list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/exchange.h"
#include "checkpoint/snapshot.h"
#include "checkpoint/state_files.h"
#include "core/descriptor.h"
#include "formats/manifest.h"

namespace accelerate::detail::checkpoint {

/// Where files are written before they are published, below the folder of the project.
inline constexpr std::string_view kStagingName = ".accelerate_staging";

struct SaveTarget {
  /// The folder of the checkpoint when it is published.
  std::filesystem::path folder;
  /// The folder is <project>/checkpoints/checkpoint_<number>, and the project keeps so many.
  bool automatic = false;
  std::optional<std::int64_t> total_limit = std::nullopt;
  /// Show a progress bar, see `ByteBar`.
  std::optional<bool> progress = std::nullopt;
  /// Write a manifest, and remove what the one before names and the new one does not. Off: the
  /// files are put beside those that are there.
  bool manifest = true;
};

/// The part of one process in a save. All processes call its functions in the order of declaration.
class SaveJob {
 public:
  /// `facts` are what the manifest will say, without the files.
  SaveJob(SaveTarget target, formats::Manifest facts);
  ~SaveJob();
  SaveJob(const SaveJob&) = delete;
  SaveJob& operator=(const SaveJob&) = delete;

  /// Collective. Makes the folder, removes what a crash has left, and finds out which processes see
  /// the same folder. Throws `ArgumentError` if a checkpoint with this automatic name exists, or
  /// processes were given different folders, and `CheckpointError` if another save to the folder
  /// is under way.
  void open(const Exchange& exchange);
  /// What this process writes.
  void add(std::vector<StateFile> files) { files_ = std::move(files); }
  /// Copies tensors, so that training may go on. Without a copy `run` writes from the tensors.
  void take_snapshot(SnapshotBuffers& buffers) { buffers.copy(files_); }
  /// Collective. Writes and publishes. `buffers` may be null; they carry tensors of a device.
  void run(const Exchange& exchange, SnapshotBuffers* buffers);

  /// Where files are written.
  [[nodiscard]] const std::filesystem::path& place() const noexcept { return place_; }
  /// Rank of the process that makes this folder and writes its manifest: 0, or the first one of a
  /// host that does not see the folder of rank 0.
  [[nodiscard]] int owner() const noexcept { return owner_; }
  /// After `run` threw: whether the same name can be used again on all hosts.
  [[nodiscard]] bool left_nothing() const;

 private:
  /// What a process has written, for the process that writes the manifest.
  [[nodiscard]] std::string write_files(SnapshotBuffers* buffers);
  void make_place();
  /// Where a file, or a folder of shards, is written.
  [[nodiscard]] std::filesystem::path staged(const std::filesystem::path& name) const;
  void collect(const std::vector<std::string>& parts);
  void write_shard_metadata(const std::string& folder,
                            std::span<const std::vector<formats::DcpEntry>> parts);
  void publish_files();
  void write_manifest();
  void invalidate_unlisted_files() const;
  void seal();
  void publish_folder();
  void prune() const;

  SaveTarget target_;
  std::filesystem::path folder_;   // of the target; absolute, in case the program changes its own
  std::filesystem::path staging_;  // with automatic names
  std::filesystem::path place_;
  Descriptor lock_;  // of the owner, from `open` on
  formats::Manifest manifest_;
  std::optional<OutputFile> manifest_file_;
  std::vector<StateFile> files_;
  std::list<OutputFile> outputs_;
  std::vector<std::string> shard_folders_;
  std::string suffix_;  // of the temporary names of folders: ".4711.815.tmp"
  int owner_ = 0;
  int rank_ = -1;
  std::vector<int> owners_;  // of all processes
  bool published_ = false;
};

}  // namespace accelerate::detail::checkpoint
