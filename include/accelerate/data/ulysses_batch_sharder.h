// accelerate/data/ulysses_batch_sharder.h - batches of which each process of a sequence parallel
// group has a part of the sequence.
//
// Part of accelerate/accelerator.h. Batches have names: maps and torch::OrderedDict from
// std::string to tensor, and structs with `tensor_tree_fields` (accelerate/tree.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/data_loader.h"
#include "accelerate/fwd.h"

namespace accelerate {

struct UlyssesBatchSharderOptions {
  /// Null: the sp dimension of the run's mesh.
  c10::intrusive_ptr<c10d::ProcessGroup> group = nullptr;
  /// The only length that is accepted. Unset: that of the run's `sp_handler`, if it is fixed.
  std::optional<std::int64_t> seq_length = std::nullopt;
};

namespace detail::data {

using TensorsByName = std::vector<std::pair<std::string, at::Tensor>>;

class ACCELERATE_API SequenceCutter {
 public:
  /// `same_data`: all processes of the group are given the same batches.
  SequenceCutter(UlyssesBatchSharderOptions options, bool same_data);

  /// How many batches it makes of one.
  [[nodiscard]] std::int64_t factor() const;
  /// Collective unless the processes have the same data. The parts of this process of the batches
  /// of all processes, in rank order.
  [[nodiscard]] std::vector<TensorsByName> cut(TensorsByName batch) const;

  /// Throws `ArgumentError`.
  [[noreturn]] static void refuse_without_names();
  [[noreturn]] static void refuse_without_field(const std::string& name);

 private:
  UlyssesBatchSharderOptions options_;
  bool same_data_;
};

/// What a batch of this type has by name. An entry that is not defined counts as absent.
template <class Batch>
TensorsByName named_tensors(const Batch& batch) {
  TensorsByName named;
  constexpr auto kNode = tree::detail::node_of<Batch, at::Tensor>();
  const auto add = [&](const auto& name, const auto& value) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(value)>, at::Tensor>) {
      if (value.defined()) named.emplace_back(std::string(name), value);
    }
  };
  if constexpr (kNode == tree::Node::kRecord) {
    for_each_field(batch, tree::detail::fields<Batch>(),
                   [&](const auto& field, const auto& member) { add(field.name, member); });
  } else if constexpr (requires(Batch& map) {
                         map.find(std::string());
                         map.begin();
                       }) {
    for (const auto& entry : batch) {
      add(tree::detail::entry_key(entry), tree::detail::entry_value(entry));
    }
  } else {
    SequenceCutter::refuse_without_names();
  }
  return named;
}

/// A batch like `like` that has these tensors, and no others.
template <class Batch>
Batch with_tensors(Batch like, const TensorsByName& named) {
  if constexpr (tree::detail::node_of<Batch, at::Tensor>() == tree::Node::kRecord) {
    std::size_t placed = 0;
    for_each_field(like, tree::detail::fields<Batch>(), [&](const auto& field, auto& member) {
      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(member)>, at::Tensor>) {
        const auto found = std::ranges::find(named, field.name, &TensorsByName::value_type::first);
        member = found == named.end() ? at::Tensor() : found->second;
        placed += found == named.end() ? 0 : 1;
      }
    });
    // What is added is the last one.
    if (placed < named.size()) SequenceCutter::refuse_without_field(named.back().first);
  } else if constexpr (requires { like.insert(named.front().first, named.front().second); }) {
    like.clear();
    for (const auto& [name, tensor] : named) like.insert(name, tensor);
  } else if constexpr (requires { like.emplace(named.front().first, named.front().second); }) {
    like.clear();
    for (const auto& [name, tensor] : named) like.emplace(name, tensor);
  }
  return like;
}

}  // namespace detail::data

/// A loader over the parts of this process. Where the processes of a group read different batches,
/// as DeepSpeed's do, each refill brings the batches of all of them and yields them one after the
/// other: it has P times as many batches as `loader`. Loaders that an `Accelerator` has prepared
/// give all processes of a group the same batches, which are cut as they come.
///
/// `position_ids` must be there; dimension 1 of each tensor is the sequence, and P must divide its
/// length. `labels` become `shift_labels`: moved left by one, -100 in the last place. Each failure
/// is an `ArgumentError` that names the tensor.
template <class Batch>
class UlyssesBatchSharder : public DataLoader<Batch> {
 public:
  explicit UlyssesBatchSharder(const DataLoader<Batch>& loader,
                               const UlyssesBatchSharderOptions& options = {})
      : DataLoader<Batch>(cutting(*loader._core(), options)) {}

 private:
  static std::shared_ptr<detail::data::LoaderCore> cutting(
      const detail::data::LoaderCore& loader, const UlyssesBatchSharderOptions& options) {
    const detail::data::SequenceCutter cutter(options, loader.same_in_sequence_group());
    return loader.splitting(cutter.factor(), [cutter](const detail::data::AnyBatch& batch) {
      std::vector<detail::data::AnyBatch> parts;
      const auto& whole = batch.as<Batch>();
      for (const auto& part : cutter.cut(detail::data::named_tensors(whole))) {
        parts.emplace_back(new Batch(detail::data::with_tensors(whole, part)));
      }
      return parts;
    });
  }
};

}  // namespace accelerate
