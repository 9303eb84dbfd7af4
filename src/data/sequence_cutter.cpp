// How batches are cut over the processes of a sequence parallel group, and the stage of a loader
// that hands out several batches for one.
#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "accelerate/data/ulysses_batch_sharder.h"
#include "accelerate/errors.h"
#include "accelerate/logging/name_collectives.h"
#include "accelerate/operations/objects.h"
#include "accelerate/state.h"
#include "accelerate/state/device_mesh.h"
#include "core/text.h"
#include "data/stages.h"

namespace accelerate::detail::data {
namespace {

constexpr const char* kName = "UlyssesBatchSharder";

const at::Tensor* find(const TensorsByName& batch, std::string_view name) {
  const auto found = std::ranges::find(batch, name, &TensorsByName::value_type::first);
  return found == batch.end() ? nullptr : &found->second;
}

/// The length of the sequence. `of` says whose batch it is.
std::int64_t checked_length(const TensorsByName& batch, std::int64_t ranks,
                            const std::optional<std::int64_t>& fixed, const std::string& of) {
  const auto* ids = find(batch, "input_ids");
  if (ids == nullptr || ids->dim() < 2) {
    throw ArgumentError(
        detail::str(kName, ": ", of, " has no input_ids of two dimensions, [batch, length]."));
  }
  if (find(batch, "position_ids") == nullptr) {
    throw ArgumentError(
        detail::str(kName, ": ", of,
                    " has no position_ids. They are needed: a part of a sequence does not "
                    "begin at position 0. Add [batch, length] of them to the dataset."));
  }
  const auto length = ids->size(1);
  for (const auto& [name, tensor] : batch) {
    if (tensor.dim() >= 2 && tensor.size(1) == length) continue;
    throw ArgumentError(detail::str(kName, ": ", name, " of ", of, " has shape ",
                                    c10::IntArrayRef(tensor.sizes()), ", but dimension 1 must be ",
                                    length, ", the length of input_ids."));
  }
  if (length % ranks != 0) {
    throw ArgumentError(detail::str(kName, ": ", of, " has sequences of length ", length,
                                    ", which ", ranks,
                                    " processes cannot share equally. Pad them to a multiple of ",
                                    ranks, ", labels with -100."));
  }
  if (fixed && length != *fixed) {
    throw ArgumentError(detail::str(kName, ": ", of, " has sequences of length ", length,
                                    ", but sp_seq_length is ", *fixed,
                                    ". Pad them, or set sp_seq_length_is_variable."));
  }
  return length;
}

/// Labels moved to the position that predicts them, before anything is cut.
TensorsByName with_shifted_labels(TensorsByName batch) {
  const auto labels = std::ranges::find(batch, "labels", &TensorsByName::value_type::first);
  if (labels == batch.end()) return batch;
  auto shifted = at::full_like(labels->second, -100);
  const auto length = shifted.size(1);
  shifted.narrow(1, 0, length - 1).copy_(labels->second.narrow(1, 1, length - 1));
  batch.erase(labels);
  batch.emplace_back("shift_labels", std::move(shifted));
  return batch;
}

std::shared_ptr<ParallelismConfig> config_of_run() {
  return AcceleratorState::initialized() ? AcceleratorState().parallelism_config() : nullptr;
}

comm::GroupHandle group_of_run() {
  const auto mesh = AcceleratorState::initialized() ? AcceleratorState().device_mesh() : nullptr;
  if (mesh && mesh->has("sp")) return mesh->get_group("sp");
  throw StateError(detail::str(kName,
                               ": there is no group: this run has no dimension sp. Set sp_size of ",
                               "the parallelism_config, or give a group."));
}

/// Hands out several batches for each one of the stage behind it.
class SplittingPass final : public Pass {
 public:
  SplittingPass(std::unique_ptr<Pass> pass, const SplitBatch& split, BatchFacts before)
      : pass_(std::move(pass)), split_(split), facts_(std::move(before)) {}

  std::optional<LoadedBatch> next() override {
    if (place_ == parts_.size() && !refill()) return std::nullopt;
    LoadedBatch loaded;
    loaded.batch = std::move(parts_[place_++]);
    const bool complete = place_ == parts_.size();
    // A state saved in between resumes with the first part.
    if (complete) facts_ = std::move(refilled_);
    loaded.facts = facts_;
    if (complete) facts_.last = false;
    loaded.sequence = complete ? sequence_ : sequence_ - 1;
    return loaded;
  }

 private:
  bool refill() {
    auto whole = pass_->next();
    if (!whole) return false;
    parts_ = split_(whole->batch);
    place_ = 0;
    sequence_ = whole->sequence;
    refilled_ = std::move(whole->facts);
    refilled_.remainder = -1;
    refilled_.padded_size = -1;
    return !parts_.empty();
  }

  std::unique_ptr<Pass> pass_;
  const SplitBatch& split_;  // of the loader, which outlives its passes
  BatchFacts facts_;
  BatchFacts refilled_ = {};
  std::vector<AnyBatch> parts_ = {};
  std::size_t place_ = 0;
  std::int64_t sequence_ = 0;  // of the batch that is split
};

}  // namespace

SequenceCutter::SequenceCutter(UlyssesBatchSharderOptions options, bool same_data)
    : options_(std::move(options)), same_data_(same_data) {
  if (!options_.group) options_.group = group_of_run();
  const auto config = config_of_run();
  const auto handler = config ? config->sp_handler : std::nullopt;
  const bool fixed = handler && !handler->sp_seq_length_is_variable.value_or(true);
  if (!options_.seq_length && fixed) options_.seq_length = handler->sp_seq_length;
}

std::int64_t SequenceCutter::factor() const { return same_data_ ? 1 : options_.group->getSize(); }

std::vector<TensorsByName> SequenceCutter::cut(TensorsByName batch) const {
  const std::int64_t ranks = options_.group->getSize();
  std::vector<TensorsByName> all;
  if (same_data_) {
    all.push_back(batch);
  } else {
    const auto named = name_collectives(kName);
    all = accelerate::all_gather_object(batch, options_.group);
  }
  const auto device = batch.empty() ? at::Device(at::kCPU) : batch.front().second.device();
  std::vector<TensorsByName> parts;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto of = same_data_ ? std::string("the batch") : detail::str("the batch of rank ", i);
    const auto length = checked_length(all[i], ranks, options_.seq_length, of);
    auto& part = parts.emplace_back(with_shifted_labels(std::move(all[i])));
    const auto share = length / ranks;
    for (auto& [name, tensor] : part) {
      tensor = tensor.narrow(1, options_.group->getRank() * share, share).to(device).contiguous();
    }
  }
  return parts;
}

void SequenceCutter::refuse_without_names() {
  throw ArgumentError(detail::str(
      kName, ": the tensors of these batches have no names. Let the dataset ",
      "yield maps from std::string to tensor, or a struct with ", "tensor_tree_fields."));
}

void SequenceCutter::refuse_without_field(const std::string& name) {
  throw ArgumentError(detail::str(kName, ": the struct of a batch has no field ", name,
                                  ". Add one, and list it in tensor_tree_fields."));
}

std::unique_ptr<Pass> splitting_pass(std::unique_ptr<Pass> pass, const SplitBatch& split,
                                     BatchFacts before) {
  return std::make_unique<SplittingPass>(std::move(pass), split, std::move(before));
}

}  // namespace accelerate::detail::data
