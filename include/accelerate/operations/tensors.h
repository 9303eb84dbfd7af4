// accelerate/operations/tensors.h - operations on tensor trees that stay in this process.
//
// Part of accelerate/operations.h. Every function takes any tree (accelerate/tree.h) and gives the
// same type back; what is not a tensor is passed through unless a contract says otherwise. A tree
// given by rvalue is changed in place. `ArgumentError` names the leaf.
#pragma once

#include <c10/core/Device.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/detail/comm/leaf_checks.h"
#include "accelerate/detail/comm/tensor_operations.h"
#include "accelerate/operations/tensor_information.h"
#include "accelerate/tree.h"

namespace accelerate {

/// Whether `x` is a struct that names its members, the counterpart of a named tuple.
template <class T>
[[nodiscard]] constexpr bool is_namedtuple(const T&) {
  return tree::detail::node_of<T, at::Tensor>() == tree::Node::kRecord;
}

/// A container of the type of `like` made from the items of `range`. Tuples, pairs, arrays and
/// structs that name their members take one item per member, and `ArgumentError` is thrown for more
/// or fewer.
template <class T, class Range>
[[nodiscard]] T honor_type([[maybe_unused]] const T& like, const Range& range) {
  constexpr auto kind = tree::detail::node_of<T, at::Tensor>();
  if constexpr (std::same_as<T, Range>) {
    return range;
  } else if constexpr (kind == tree::Node::kFixed || kind == tree::Node::kRecord) {
    return detail::comm::with_members(like, range);
  } else if constexpr (std::is_constructible_v<T, const Range&>) {
    return T(range);
  } else {
    return T(range.begin(), range.end());
  }
}

/// The tree with `f(leaf)` in place of each leaf, by default each tensor. `f` may return another
/// type, see `tree::transform`. A `Value` holds leaves of the types at::Tensor, TensorInformation,
/// bool, std::int64_t, double and std::string. With `error_on_other_type` a leaf of another type
/// throws `ArgumentError` that names the type, `f`, the expected type and the leaf.
template <class Leaf = at::Tensor, class F, class T>
auto recursively_apply(F&& f, T&& tree, ApplyOptions options = {}) {
  using Tree = std::remove_cvref_t<T>;
  using Result = std::invoke_result_t<F&, const Leaf&>;
  if (options.error_on_other_type) detail::comm::refuse_others<Leaf, F>(std::as_const(tree));
  if constexpr (!tree::detail::holds<Tree, Leaf, tree::detail::Leaves::kAny>()) {
    return Tree(std::forward<T>(tree));
  } else if constexpr (std::same_as<Leaf, at::Tensor> && std::same_as<Result, at::Tensor>) {
    return tree::map(f, std::forward<T>(tree));
  } else {
    return tree::transform<Result, Leaf>(f, tree);
  }
}

/// Moves the tensors to `device`; one that is there already is returned as it is. Entries and
/// members named in `skip_keys` stay where they are with all that is in them, at any depth.
///
/// Other objects move too if they have a member `to(device, non_blocking)` or `to(device)`, or a
/// function `send_to_device(T, at::Device, const SendOptions&)` beside their type. Modules move as
/// in Python: the module itself, which all holders and pointers of it share.
template <detail::comm::Sendable T>
[[nodiscard]] std::remove_cvref_t<T> send_to_device(T&& tree, at::Device device,
                                                    const SendOptions& options = {}) {
  std::remove_cvref_t<T> result = std::forward<T>(tree);
  detail::comm::SendVisitor visitor{device, options};
  tree::detail::walk<at::Tensor>(result, visitor, TreePath());
  return result;
}

/// The tree with a `TensorInformation` in place of each tensor.
template <class T>
[[nodiscard]] auto get_data_structure(const T& tree) {
  return tree::transform<TensorInformation>(detail::comm::TensorOps::information, tree);
}

/// The tree with its shape, a list of sizes, in place of each tensor.
template <class T>
[[nodiscard]] auto get_shape(const T& tree) {
  return tree::transform<std::vector<std::int64_t>>(detail::comm::TensorOps::shape, tree);
}

/// Tensors on the CPU, not initialised, of the shapes and dtypes that `structure` describes.
template <class S>
[[nodiscard]] auto initialize_tensors(const S& structure) {
  return tree::transform<at::Tensor, TensorInformation>(detail::comm::TensorOps::empty, structure);
}

/// The size of dimension 0 of the first leaf: item 0 of sequences, the first entry of mappings.
/// Throws `ArgumentError` when that leaf is no tensor or has no dimension, or a container on the
/// way is empty.
template <class T>
[[nodiscard]] std::int64_t find_batch_size(const T& tree) {
  return detail::comm::batch_size(tree, TreePath());
}

/// As `find_batch_size`, but returns nullopt instead of throwing.
template <class T>
[[nodiscard]] std::optional<std::int64_t> ignorant_find_batch_size(const T& tree) noexcept {
  try {
    return find_batch_size(tree);
  } catch (const ArgumentError&) {
    return std::nullopt;
  }
}

/// The device of the first tensor in the tree; nullopt if there is none.
template <class T>
[[nodiscard]] std::optional<at::Device> find_device(const T& tree) {
  std::optional<at::Device> device;
  const auto look = [&](const TreePath&, const at::Tensor& leaf) {
    if (!device) device = leaf.device();
  };
  tree::detail::LeafVisitor<decltype(look)> visitor{look};
  tree::detail::walk<at::Tensor>(tree, visitor, TreePath());
  return device;
}

/// The tree as lists of numbers, tensors of no dimension as numbers. bfloat16 and half are read as
/// float, so that the number printed is the number held; complex numbers are tuples (re, im).
/// Throws `ArgumentError` for tensors that are sparse, nested or without data, and for unsigned
/// numbers beyond what a `Value` holds.
template <class T>
[[nodiscard]] Value listify(const T& tree) {
  tree::detail::LeafVisitor<decltype(detail::comm::TensorOps::check_listable)> check{
      detail::comm::TensorOps::check_listable};
  tree::detail::walk<at::Tensor>(tree, check, TreePath());
  return to_value(tree::transform<Value>(detail::comm::TensorOps::listify, tree));
}

/// `tensor[start:stop:step]` on dimension 0 of each tensor, with Python's rules for negative and
/// large positions. A tensor of no dimension throws `ArgumentError`.
template <class T>
[[nodiscard]] std::remove_cvref_t<T> slice_tensors(T&& tree, const Slice& slice) {
  return tree::map(
      [&](const TreePath& path, const at::Tensor& leaf) {
        return detail::comm::TensorOps::slice(path, leaf, slice);
      },
      std::forward<T>(tree));
}

/// Batches of one structure, concatenated leaf by leaf along `dim`. Throws `ArgumentError` with the
/// path when the structures differ, or when several batches hold a leaf that is not a tensor. A
/// lone batch without tensors is returned as it is.
template <class T>
[[nodiscard]] T concatenate(std::span<const T> batches, std::int64_t dim = 0) {
  if (batches.empty()) detail::comm::TensorOps::refuse_no_batches();
  if constexpr (!TensorTree<T>) {
    if (batches.size() > 1) detail::comm::RefuseLeaf::other("concatenate", "", typeid(T));
    return batches.front();
  } else {
    if (batches.size() > 1) detail::comm::refuse_others<at::Tensor>("concatenate", batches.front());
    std::vector<tree::Flat> parts;
    for (const T& batch : batches) parts.push_back(tree::flatten(batch, tree::Order::kSorted));
    return tree::unflatten(batches.front(), detail::comm::TensorOps::concatenate(parts, dim),
                           tree::Order::kSorted);
  }
}
template <class T>
[[nodiscard]] T concatenate(const std::vector<T>& batches, std::int64_t dim = 0) {
  return concatenate(std::span<const T>(batches), dim);
}

/// Half and bfloat16 tensors as float; all others are returned as they are.
template <class T>
[[nodiscard]] std::remove_cvref_t<T> convert_to_fp32(T&& tree) {
  return recursively_apply(detail::comm::TensorOps::to_fp32, std::forward<T>(tree));
}

/// A callable that passes what `forward` returns through `convert_to_fp32`. It can be called where
/// `forward` can: a module holder, or a lambda that is `mutable`, not through a const object.
template <class F>
class ConvertOutputsToFp32 {
 public:
  explicit ConvertOutputsToFp32(F forward) : forward_(std::move(forward)) {}

  template <class... Args>
    requires std::invocable<F&, Args...>
  auto operator()(Args&&... args) {
    return convert_to_fp32(std::invoke(forward_, std::forward<Args>(args)...));
  }
  template <class... Args>
    requires std::invocable<const F&, Args...>
  auto operator()(Args&&... args) const {
    return convert_to_fp32(std::invoke(forward_, std::forward<Args>(args)...));
  }
  /// The callable inside.
  [[nodiscard]] const F& wrapped() const noexcept { return forward_; }

 private:
  F forward_;
};

template <class F>
[[nodiscard]] ConvertOutputsToFp32<F> convert_outputs_to_fp32(F forward) {
  return ConvertOutputsToFp32<F>(std::move(forward));
}

/// Pads each tensor along `dim` to the smallest multiple of `num_processes` that is not below
/// `batch_size`; one that is that long already is returned as it is. Throws `ArgumentError` for one
/// that is longer, or has no such dimension, and for leaves of a `Value` that are no tensors.
template <PureTensorTree T>
[[nodiscard]] std::remove_cvref_t<T> pad_input_tensors(T&& tree, std::int64_t batch_size,
                                                       std::int64_t num_processes,
                                                       std::int64_t dim = 0,
                                                       PadFill fill = PadFill::kZeros) {
  const detail::comm::InputPadding padding(batch_size, num_processes, dim, fill);
  detail::comm::refuse_others<at::Tensor>("pad_input_tensors", std::as_const(tree));
  return tree::map(
      [&](const TreePath& path, const at::Tensor& leaf) { return padding.apply(path, leaf); },
      std::forward<T>(tree));
}

}  // namespace accelerate
