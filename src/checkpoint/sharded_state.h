// src/checkpoint/sharded_state.h - the state of a sharded model, or of its optimizer, saved and
// loaded.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/state/stateful.h"
#include "checkpoint/sharded_files.h"
#include "checkpoint/state_files.h"

namespace accelerate::detail::checkpoint {

/// State of which each process holds a part. As a `Stateful` it is the part of this process, which
/// fits the same process of as many only.
class ShardedState : public Stateful {
 public:
  [[nodiscard]] virtual ShardedPart part() const = 0;
  [[nodiscard]] virtual StateDictType state_dict_type() const = 0;
  [[nodiscard]] virtual bool has_deepspeed_names() const = 0;
  /// What this process saves.
  [[nodiscard]] virtual ShardItems items() = 0;
  /// Loads from the whole state (`open_stored_state`), saved by any number of processes: reads what
  /// this process holds. Throws `StateDictMismatch` for names that are missing, of which it lists
  /// up to 10, and for other sizes; warns of names that are not needed.
  virtual void load(const Value& stored) = 0;
};

/// Not `strict`: names that are missing when it is loaded are a warning.
[[nodiscard]] ACCELERATE_API std::shared_ptr<ShardedState> sharded_state(
    std::shared_ptr<ShardedModel> model, bool strict = true);
/// `optimizer` has the shards of parameters that `names` belong to: `ShardedModel::names_in`.
/// In files its state is by name: {"state": {name: {"exp_avg": ...}}, "param_groups": [...]}.
[[nodiscard]] ACCELERATE_API std::shared_ptr<ShardedState> sharded_optimizer_state(
    std::shared_ptr<ShardedModel> model, std::shared_ptr<Stateful> optimizer,
    std::vector<std::string> names);

struct ShardedFileOptions {
  /// Which model or optimizer of the run it is.
  std::size_t index = 0;
  /// In which files it is saved. Unset: what the engine says.
  std::optional<StateDictType> type = std::nullopt;
  /// With SHARDED_STATE_DICT: a folder of torch.distributed.checkpoint. Else a file per process,
  /// which as many processes must load.
  bool use_dcp = true;
};

/// Collective. What this process writes for a state.
[[nodiscard]] std::vector<StateFile> sharded_files(ShardedState& state,
                                                   const ShardedFileOptions& options,
                                                   const Exchange& exchange);

/// Collective. Writes them into `folder`, beside what is there, and publishes them as `SaveJob`
/// does. `operation` is what an error names.
ACCELERATE_API void save_sharded_files(ShardedState& state, const std::filesystem::path& folder,
                                       const ShardedFileOptions& options, const char* operation,
                                       std::source_location where);

/// Loads a state from `folder`, where `save_state` or Python has written it in any of these forms,
/// also by a run that did not shard (model.safetensors, optimizer.bin), or from a folder of shards
/// that `folder` itself is. Throws as `ShardedState::load`, and `CheckpointError` if there is none.
ACCELERATE_API void load_sharded_files(ShardedState& state, const std::filesystem::path& folder,
                                       const ShardedFileOptions& options);

/// The names under which a checkpoint may have the weights of a model, those of a run that did not
/// shard first, those of DeepSpeed last.
[[nodiscard]] std::vector<std::string> weights_names(std::size_t index);
/// The first of them that is in the folder; empty if none is.
[[nodiscard]] std::filesystem::path first_in(const std::filesystem::path& folder,
                                             const std::vector<std::string>& names);
/// Only weights are read from a checkpoint of DeepSpeed.
[[nodiscard]] bool is_from_deepspeed(const std::filesystem::path& folder);

}  // namespace accelerate::detail::checkpoint
