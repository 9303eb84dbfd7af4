// src/checkpoint/state_files.h - the files of a run's state and what each holds.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "accelerate/checkpoint/accelerator_state.h"
#include "accelerate/state_dict.h"
#include "accelerate/value.h"
#include "checkpoint/sharded_files.h"
#include "core/byte_bar.h"
#include "core/output_file.h"

namespace accelerate::detail::checkpoint {

/// A text is written as it is.
using StateContent = std::variant<Value, StateDict, ShardItems, std::string>;

struct StateFile {
  /// Relative to the folder of the checkpoint. Shards are in a folder there, which `SaveJob` gives
  /// its `.metadata`.
  std::string name;
  StateContent content;
  /// A safetensors file; else a torch archive.
  bool safetensors = false;
};

/// An object that takes weights straight from a file, tensor by tensor.
class LoadsWeights {
 public:
  virtual void load_weights(const std::filesystem::path& file,
                            const LoadAcceleratorStateOptions& options) = 0;
  /// False if only `load_state_dict` can be called, with all tensors in memory.
  [[nodiscard]] virtual bool can_load_weights() const = 0;

 protected:
  ~LoadsWeights() = default;
};

/// "model.safetensors", "model_1.safetensors", "pytorch_model.bin", ...
[[nodiscard]] std::string weights_file_name(std::size_t index, bool safe_serialization);
/// The file of an object that is not a model. `own`: that of this process, not the common one.
[[nodiscard]] std::string state_file_name(const StateEntry& entry, int process_index, bool own);

/// Collective. The files that this process has to write. Calls `state_dict` of all entries on all
/// processes. `model_states` are those of the models that are not a `ShardedState`.
[[nodiscard]] std::vector<StateFile> files_of_process(std::span<const StateDict> model_states,
                                                      std::span<const StateEntry> entries,
                                                      const SaveAcceleratorStateOptions& options);

/// `bar` counts the bytes of tensors: `bytes_in` for all files. Returns the entries of a file of
/// shards, for `.metadata`.
std::vector<formats::DcpEntry> write_state_file(const StateFile& file, OutputFile& output,
                                                ByteBar& bar);
[[nodiscard]] std::int64_t bytes_in(std::span<const StateFile> files);

}  // namespace accelerate::detail::checkpoint
