// accelerate/parallel/tp_plan.h - tensor parallelism for models of stock layers: a plan says by
// name which layers are cut, and how.
//
//     Accelerator accelerator({.parallelism_config = ParallelismConfig{.tp_size = 2}});
//     apply_tp_plan(*net, {{"blocks.*.attend", TpStyle::kColwise, 3},
//                          {"blocks.*.attend_out", TpStyle::kRowwise}},
//                   accelerator.torch_device_mesh());
//     auto [model, optimizer] = accelerator.prepare(net, std::move(adamw));
//
// Part of accelerate/parallel.h. The forward of the model stays as it is, but shapes in it must
// follow the tensors: a process that has half of the heads sees half of the width.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/fwd.h"

namespace accelerate {

class DeviceMesh;

/// What becomes of a layer; in quotes the words of `make_tp_plan`, which are those of Transformers'
/// plans and a few short ones.
enum class TpStyle : std::uint8_t {
  /// "colwise": each process has a part of the outputs of a Linear, or of the columns of an
  /// Embedding. The result is cut along its last dimension.
  kColwise,
  /// "colwise_rep", "colwise_gather_output", "colwise_gather": the same, and all processes get the
  /// whole result.
  kColwiseRep,
  /// "rowwise": each process has a part of the inputs of a Linear, gets that part of the input
  /// and adds its result to those of the others; of an Embedding it has a part of the rows.
  kRowwise,
  /// "rowwise_rep", "rowwise_split_input": the same for a Linear whose input is whole.
  kRowwiseRep,
  /// "embedding_rowwise", "vocab": each process has a part of the vocabulary. `kRowwise` means the
  /// same.
  kVocab,
  /// "sequence_parallel", "sequence": all processes have the module whole and use it on different
  /// parts of a sequence, so that the gradients of its parameters are summed.
  kSequenceParallel,
  /// "replicate", "replicated_with_grad_allreduce" is `kSequenceParallel`: the module stays whole.
  kReplicate,
};

/// A line of a plan.
struct TpRule {
  /// The names of layers, as `named_modules` gives them. '*' stands for any characters but a dot.
  std::string layers = {};
  TpStyle style = TpStyle::kReplicate;
  /// The outputs of a `kColwise` layer are so many blocks of equal size, each of which is cut: 3
  /// for queries, keys and values in one layer.
  std::int64_t blocks = 1;
  /// Instead of `blocks` the sizes of blocks that differ: {512, 128, 128} if there are fewer heads
  /// of keys and values than of queries.
  std::vector<std::int64_t> block_sizes = {};

  bool operator==(const TpRule&) const = default;
};

struct TpPlanOptions {
  /// Megatron's sequence parallelism: between cut layers each process has a part of the sequence
  /// only. Inputs of `kColwise` layers are gathered along it, results of `kRowwise` and `kVocab`
  /// layers scattered. Modules between them need `kSequenceParallel`.
  bool sequence_parallel = false;
  /// The dimension of activations that is the sequence: 1 in [batch, time, width].
  std::int64_t sequence_dim = 1;

  bool operator==(const TpPlanOptions&) const = default;
};

using TpPlan = std::vector<TpRule>;

/// A plan in Transformers' words, for example {{"layers.*.mlp.down_proj", "rowwise"}}. Throws
/// `ArgumentError` for a word that is not one of them.
[[nodiscard]] ACCELERATE_API TpPlan
make_tp_plan(const std::vector<std::pair<std::string, std::string>>& words);

/// Collective. Cuts the layers of `model` that `plan` names over the dimension "tp" of `mesh`, in
/// place: a layer takes the first rule that fits it. All processes get the values of the first one
/// of their group, then each keeps its part, so that a model starts the same however it is cut.
/// What was cut before, by an earlier plan or by a layer of accelerate/parallel.h, stays as it is.
/// Optimizers may be built before or after; `prepare` cuts the state that they have. Load weights
/// before, or by `load_state` after `prepare`. Does nothing if the mesh is null or has no "tp".
///
/// Layers are torch::nn::Linear, accelerate::nn::Linear and torch::nn::Embedding, for
/// `kSequenceParallel` and `kReplicate` any module. The product and the lookup are computed by
/// parts wherever the model uses the weight: in the layer, by torch::linear, also if it is tied to
/// another layer. Throws `ArgumentError` for a rule that fits no layer, a layer of another class, a
/// size that cannot be divided, and a tied weight that is cut in two ways; nothing is cut then.
ACCELERATE_API void apply_tp_plan(torch::nn::Module& model, const TpPlan& plan,
                                  const std::shared_ptr<DeviceMesh>& mesh,
                                  const TpPlanOptions& options = {});

}  // namespace accelerate
