// src/checkpoint/sharded_files.h - state of which each process holds a part, and its files.
//
// An engine that shards a model is a `ShardedModel`. What is saved and loaded is a `ShardedState`
// (sharded_state.h) made of it; here is how its parts get into files and together again.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/enums.h"
#include "accelerate/state_dict.h"
#include "accelerate/value.h"
#include "checkpoint/exchange.h"
#include "core/byte_bar.h"
#include "core/output_file.h"
#include "formats/boxes.h"
#include "formats/dcp.h"

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace accelerate::detail::checkpoint {

/// Elements of a tensor that this process holds.
struct LocalShard {
  /// Of the parameter, as the unwrapped module names it.
  std::string name = {};
  /// Of the whole tensor.
  std::vector<std::int64_t> sizes = {};
  at::ScalarType dtype = at::kFloat;
  /// Which elements, in row-major order; they may be none.
  std::int64_t begin = 0;
  std::int64_t end = 0;
  /// These elements. What optimizers keep for each of them has the same shape.
  at::Tensor values = {};
  /// Which state of the parameter it is, for example "exp_avg". Empty: the parameter itself.
  std::string key = {};
  /// A process of a lower rank holds the same elements and saves them.
  bool replica = false;
  /// The name under which the same parameter comes first, if it has several. A file needs one of
  /// them only.
  std::string tied_to = {};
  /// Parts of the whole tensor whose elements `begin` and `end` count, one part after the other;
  /// the whole tensor if there are none.
  std::vector<formats::Box> boxes = {};

  [[nodiscard]] formats::FlatRange range() const { return {begin, end}; }
  /// Whether it has the first element of the whole tensor.
  [[nodiscard]] bool has_first() const;
};

/// Copies the elements of a shard to where they lie in the whole tensor.
ACCELERATE_API void place(const LocalShard& shard, const at::Tensor& whole);

/// An engine that shards a model, as its files see it.
class ShardedModel {
 public:
  virtual ~ShardedModel() = default;

  /// The parts of all parameters, in the order of the module and in the same order on all
  /// processes. Loading writes into `values`.
  [[nodiscard]] virtual std::vector<LocalShard> local_shards() = 0;
  /// What every process holds whole: persistent buffers, and parameters that are not sharded.
  /// Loading writes into the tensors.
  [[nodiscard]] virtual StateDict whole_tensors() = 0;
  /// Loading has written. Must not communicate: another process may have failed to load.
  virtual void loaded() = 0;
  /// The name of each parameter in the groups of an optimizer, in their order; "" for a parameter
  /// that this model has not.
  [[nodiscard]] virtual std::vector<std::string> names_in(
      const torch::optim::Optimizer& optimizer) = 0;
  /// In which files the state is saved.
  [[nodiscard]] virtual StateDictType state_dict_type() const = 0;
  /// SHARDED_STATE_DICT under the names of DeepSpeed: model and optimizer in the folder
  /// pytorch_model, which the file `latest` names.
  [[nodiscard]] virtual bool has_deepspeed_names() const { return false; }
};

/// The part of one process in a state that is saved.
struct ShardItems {
  /// The key above all others in the files: "model" or "optimizer".
  std::string root = {};
  std::vector<LocalShard> shards = {};
  /// A dict of what this process saves whole: tensors and other values, at any depth.
  Value values = Value(Value::Dict());
};

/// Writes the `.distcp` file of a process, and returns what is in it.
[[nodiscard]] std::vector<formats::DcpEntry> write_shard_items(const ShardItems& items,
                                                               OutputFile& file, ByteBar& bar);
/// The bytes of tensors in it.
[[nodiscard]] std::int64_t bytes_in(const ShardItems& items);

/// Collective. The whole state on the first process, nested as in the files but without the root;
/// an empty dict on the others. Memory of each process holds some tensors beside its own.
[[nodiscard]] Value gathered_state(const ShardItems& items, const Exchange& exchange);

/// What belongs to a model or an optimizer in the folder of a checkpoint.
enum class ShardedPart : std::uint8_t { kModel, kOptimizer };

/// "pytorch_model_fsdp_0", "optimizer_0": the folder of SHARDED_STATE_DICT.
[[nodiscard]] std::string sharded_folder_name(ShardedPart part, std::size_t index);
/// "pytorch_model", "pytorch_model_1": the same with the names of DeepSpeed, for both parts.
[[nodiscard]] std::string deepspeed_folder_name(std::size_t index);
/// "pytorch_model_fsdp.bin", "optimizer_1.bin": the file of FULL_STATE_DICT.
[[nodiscard]] std::string full_file_name(ShardedPart part, std::size_t index);
/// The file of a process: "pytorch_model_fsdp_rank3.bin", "pytorch_model_fsdp_1_rank3.bin" with
/// LOCAL_STATE_DICT; with SHARDED_STATE_DICT without torch.distributed.checkpoint also the first
/// one has a number: "pytorch_model_fsdp_0_rank3.bin".
[[nodiscard]] std::string local_file_name(ShardedPart part, std::size_t index, int process_index,
                                          bool first_has_number);

}  // namespace accelerate::detail::checkpoint
