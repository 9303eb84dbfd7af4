// accelerate/detail/data/batch_type.h - a batch without its type: how the compiled part of a data
// loader owns, moves and sends batches of the user's types.
//
// Internal to accelerate/data_loader.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <iterator>
#include <memory>
#include <span>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "accelerate/detail/comm/collectives.h"
#include "accelerate/detail/comm/leaf_checks.h"
#include "accelerate/operations/tensors.h"
#include "accelerate/tree.h"
#include "accelerate/value.h"
#include "accelerate/value/from_value.h"

namespace accelerate::detail::data {

/// Owns a batch of a type that only the typed face of the loader knows. Move only.
class AnyBatch {
 public:
  AnyBatch() = default;
  /// Takes ownership.
  template <class Batch>
  explicit AnyBatch(Batch* batch) noexcept
      : batch_(batch, [](void* owned) { delete static_cast<Batch*>(owned); }) {}

  /// `Batch` must be the type that it was made with.
  template <class Batch>
  [[nodiscard]] Batch& as() const noexcept {
    return *static_cast<Batch*>(batch_.get());
  }
  explicit operator bool() const noexcept { return batch_ != nullptr; }

 private:
  std::unique_ptr<void, void (*)(void*)> batch_{nullptr, [](void*) {}};
};

/// What a prepared loader does with batches of one type. Functions that a type does not support are
/// null; leaves are visited in the order of sorted keys.
struct BatchType {
  const std::type_info* id = nullptr;
  /// A tensor may occur in the type: `leaves`, `flatten` and `set_leaves` are there.
  bool holds_tensors = false;
  /// Every leaf is a tensor: `view`, `skeleton` and `from_skeleton` are there too.
  bool holds_tensors_only = false;

  /// Rows of the first tensor. Throws `ArgumentError` where it cannot be found.
  std::int64_t (*batch_size)(const AnyBatch&) = nullptr;
  /// Length of a batch that is a list without tensors.
  std::int64_t (*list_size)(const AnyBatch&) = nullptr;
  /// Throws `ArgumentError` for a leaf that is no tensor.
  void (*refuse_others)(std::string_view operation, const AnyBatch&) = nullptr;
  void (*send)(AnyBatch&, at::Device, bool non_blocking) = nullptr;

  std::vector<at::Tensor> (*leaves)(const AnyBatch&) = nullptr;
  tree::Flat (*flatten)(const AnyBatch&) = nullptr;
  void (*set_leaves)(AnyBatch&, std::span<const at::Tensor>) = nullptr;

  comm::TreeView (*view)(const AnyBatch&) = nullptr;
  /// The containers, with a tensor of no elements in each place.
  Value (*skeleton)(const AnyBatch&) = nullptr;
  AnyBatch (*from_skeleton)(const Value&) = nullptr;
};

template <class Batch>
constexpr void add_tree_functions(BatchType& type) {
  constexpr auto kSorted = tree::Order::kSorted;
  type.holds_tensors = true;
  type.leaves = [](const AnyBatch& batch) { return tree::leaves(batch.as<Batch>(), kSorted); };
  type.flatten = [](const AnyBatch& batch) { return tree::flatten(batch.as<Batch>(), kSorted); };
  type.set_leaves = [](AnyBatch& batch, std::span<const at::Tensor> leaves) {
    auto& typed = batch.as<Batch>();
    typed = tree::unflatten(std::move(typed), leaves, kSorted);
  };
}

template <class Batch>
constexpr void add_dispatch_functions(BatchType& type) {
  type.holds_tensors_only = true;
  type.view = [](const AnyBatch& batch) {
    return comm::TreeView(std::as_const(batch.as<Batch>()));
  };
  type.skeleton = [](const AnyBatch& batch) {
    const auto emptied = [](const at::Tensor& leaf) { return leaf.flatten().narrow(0, 0, 0); };
    return Value(to_value(tree::map(emptied, std::as_const(batch.as<Batch>()))));
  };
  type.from_skeleton = [](const Value& skeleton) {
    return AnyBatch(new Batch(from_value<Batch>(skeleton)));
  };
}

template <class Batch>
constexpr BatchType batch_type() {
  BatchType type;
  type.id = &typeid(Batch);
  type.batch_size = [](const AnyBatch& batch) {
    return accelerate::find_batch_size(std::as_const(batch.as<Batch>()));
  };
  if constexpr (tree::detail::kIs<Batch, std::vector> && !TensorTree<Batch>) {
    type.list_size = [](const AnyBatch& batch) {
      return static_cast<std::int64_t>(std::ssize(batch.as<Batch>()));
    };
  }
  type.refuse_others = [](std::string_view operation, const AnyBatch& batch) {
    detail::comm::refuse_others<at::Tensor>(operation, std::as_const(batch.as<Batch>()));
  };
  if constexpr (comm::Sendable<Batch>) {
    type.send = [](AnyBatch& batch, at::Device device, bool non_blocking) {
      auto& typed = batch.as<Batch>();
      typed = send_to_device(std::move(typed), device, {.non_blocking = non_blocking});
    };
  }
  if constexpr (TensorTree<Batch>) add_tree_functions<Batch>(type);
  if constexpr (PureTensorTree<Batch>) add_dispatch_functions<Batch>(type);
  return type;
}

template <class Batch>
inline constexpr BatchType kBatchType = batch_type<Batch>();

}  // namespace accelerate::detail::data
