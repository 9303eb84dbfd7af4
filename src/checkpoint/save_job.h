// src/checkpoint/save_job.h - a checkpoint of all processes: written, agreed upon, published.
//
// With automatic names the files are written to .accelerate_staging/checkpoint_<n> beside the
// folder `checkpoints`, and one rename publishes all of them. In a folder that the caller named,
// each file is written under a temporary name; when all processes have written theirs, the files
// are renamed one by one and the manifest (formats/manifest.h) comes last: until then the old
// manifest tells that the files are a mixture.
#pragma once

#include <cstdint>
#include <filesystem>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/exchange.h"
#include "checkpoint/snapshot.h"
#include "checkpoint/state_files.h"
#include "formats/manifest.h"

namespace accelerate::detail::checkpoint {

/// Where files are written before they are published, below the folder of the project.
inline constexpr std::string_view kStagingName = ".accelerate_staging";

struct SaveTarget {
  /// The folder of the checkpoint when it is published.
  std::filesystem::path folder;
  /// With automatic names: the folder of the project, and how many checkpoints it keeps.
  std::optional<std::filesystem::path> project = std::nullopt;
  std::optional<std::int64_t> total_limit = std::nullopt;

  /// Where files are written.
  [[nodiscard]] std::filesystem::path place() const;
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
  /// processes were given different folders.
  void open(const Exchange& exchange);
  /// What this process writes.
  void add(std::vector<StateFile> files) { files_ = std::move(files); }
  /// Copies tensors, so that training may go on. Without a copy `run` writes from the tensors.
  void take_snapshot(SnapshotBuffers& buffers) { buffers.copy(files_); }
  /// Collective. Writes and publishes. `buffers` may be null; they carry tensors of a device.
  void run(const Exchange& exchange, SnapshotBuffers* buffers);

  [[nodiscard]] const SaveTarget& target() const noexcept { return target_; }

 private:
  /// What a process has written, for the process that writes the manifest.
  [[nodiscard]] std::string write_files(SnapshotBuffers* buffers);
  void make_place();
  [[nodiscard]] std::string leave_token();
  void seal(const std::vector<std::string>& parts);
  void publish_folder();

  SaveTarget target_;
  formats::Manifest facts_;
  std::vector<StateFile> files_;
  std::list<OutputFile> outputs_;
  /// Rank of the process that makes the folder and writes its manifest: 0, or the first one of a
  /// host that does not see the folder of rank 0.
  int owner_ = 0;
  int rank_ = -1;
  std::vector<int> owners_;  // of all processes
  bool published_ = false;
};

}  // namespace accelerate::detail::checkpoint
