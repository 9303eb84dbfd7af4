// accelerate/tree.h - nested data with tensors in it: one recursion, typed in, typed out.
//
// A tree is a tensor, or a vector, deque, list, array, pair, tuple, map, unordered_map,
// torch::OrderedDict, optional, variant, torch::data::Example, `Value`, or struct of your own (see
// accelerate/tree/traits.h) of trees. A tensor that is not defined counts as absent: it is passed
// over and stays as it is; collectives refuse it.
//
//     auto halves = tree::map([](const at::Tensor& t) { return t.to(at::kHalf); }, batch);
//     tree::for_each(batch, [](const TreePath& path, const at::Tensor& t) { show(path.str(), t);
//     });
//
// Mappings are visited in container order: an std::map by key, as it lies. Use torch::OrderedDict
// or Value::Dict where the order of insertion matters.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/detail/comm/tree_rebind.h"
#include "accelerate/detail/comm/tree_walk.h"
#include "accelerate/tree/traits.h"
#include "accelerate/value/path.h"

namespace accelerate::tree {

namespace detail {

/// Says what is wrong with a type that is no tree, at compile time.
template <class T>
constexpr void check_tree() {
  static_assert(
      TensorTree<T>,
      "accelerate: this type is not a tensor tree, there can be no tensor in it. Trees are "
      "at::Tensor and the containers of the standard library, torch::OrderedDict, "
      "torch::data::Example and accelerate::Value with tensors in them. For a struct of "
      "your own write tensor_tree_fields(std::type_identity<YourType>) beside it; "
      "accelerate/tree/traits.h shows how.");
}
template <class T>
constexpr void check_pure_tree() {
  static_assert(
      PureTensorTree<T>,
      "accelerate: this type cannot be sent to other processes as tensors: it is no tensor "
      "tree, or some leaves of it are not tensors. Pass the tensors alone, list only the "
      "tensor members in tensor_tree_fields(std::type_identity<YourType>), or use "
      "gather_object and broadcast_object_list for other data.");
}

/// Trees that do not fit together.
struct ACCELERATE_API Mismatch {
  /// Throws `ArgumentError`: the two trees differ at `path`.
  [[noreturn]] static void refuse_structure(const char* operation, const std::string& path,
                                            std::size_t tree);
  /// Throws `ArgumentError` unless as many tensors came as the tree has leaves.
  static void check_leaf_count(std::size_t given, std::size_t expected);
};

}  // namespace detail

/// Calls `f(const TreePath&, const at::Tensor&)` for each tensor.
template <class T, class F>
void for_each(const T& tree, F&& f, Order order = Order::kContainer) {
  detail::check_tree<T>();
  detail::LeafVisitor<std::remove_reference_t<F>> visitor{f, order};
  detail::walk<at::Tensor>(tree, visitor, TreePath());
}

/// The same tree with `f(tensor)`, or `f(path, tensor)`, in place of each tensor. A tree given by
/// rvalue is changed in place, so that it need not be copyable.
template <class F, class T>
[[nodiscard]] std::remove_cvref_t<T> map(F&& f, T&& tree) {
  detail::check_tree<std::remove_cvref_t<T>>();
  std::remove_cvref_t<T> result = std::forward<T>(tree);
  const auto replace = [&f]([[maybe_unused]] const TreePath& path, at::Tensor& leaf) {
    if constexpr (std::is_invocable_v<F&, const TreePath&, const at::Tensor&>) {
      leaf = std::invoke(f, path, std::as_const(leaf));
    } else {
      leaf = std::invoke(f, std::as_const(leaf));
    }
  };
  detail::LeafVisitor<decltype(replace)> visitor{replace};
  detail::walk<at::Tensor>(result, visitor, TreePath());
  return result;
}

/// The tree with `f(leaf)`, an `R`, in place of each leaf: `rebind_t<T, R>`, where a vector stays a
/// vector, a map a map, and a struct becomes a `Value::Dict`. Absent tensors become `R{}`.
///
///     auto sizes = tree::transform<std::int64_t>([](const at::Tensor& t) { return t.numel(); },
///     batch);
template <class R, class Leaf = at::Tensor, class F, class T>
[[nodiscard]] rebind_t<T, R, Leaf> transform(F&& f, const T& tree) {
  return detail::rebuild<R, Leaf>(f, tree);
}

/// The tensors of a tree and where they were.
struct Flat {
  std::vector<at::Tensor> tensors = {};
  std::vector<std::string> paths = {};
};

/// The tensors alone, in visiting order.
template <class T>
[[nodiscard]] std::vector<at::Tensor> leaves(const T& tree, Order order = Order::kContainer) {
  std::vector<at::Tensor> result;
  for_each(tree, [&](const TreePath&, const at::Tensor& leaf) { result.push_back(leaf); }, order);
  return result;
}

/// The tensors with their paths, in visiting order.
template <class T>
[[nodiscard]] Flat flatten(const T& tree, Order order = Order::kContainer) {
  Flat flat;
  const auto take = [&](const TreePath& path, const at::Tensor& leaf) {
    flat.tensors.push_back(leaf);
    flat.paths.push_back(path.str());
  };
  for_each(tree, take, order);
  return flat;
}

/// A tree like `like` with these tensors as its leaves, in the order of `flatten`. Throws
/// `ArgumentError` when there are more or fewer of them than leaves.
template <class T>
[[nodiscard]] std::remove_cvref_t<T> unflatten(T&& like, std::span<const at::Tensor> tensors,
                                               Order order = Order::kContainer) {
  detail::check_tree<std::remove_cvref_t<T>>();
  std::remove_cvref_t<T> result = std::forward<T>(like);
  std::size_t next = 0;
  const auto put = [&](const TreePath&, at::Tensor& leaf) {
    if (next < tensors.size()) leaf = tensors[next];
    ++next;
  };
  detail::LeafVisitor<decltype(put)> visitor{put, order};
  detail::walk<at::Tensor>(result, visitor, TreePath());
  detail::Mismatch::check_leaf_count(tensors.size(), next);
  return result;
}

/// The tree with `f(x, y)` in place of each pair of corresponding tensors. Mappings are matched by
/// key. Throws `ArgumentError` with the path of the first leaf that only one of the trees has.
template <class F, class T>
[[nodiscard]] T zip(F&& f, const T& a, const T& b) {
  auto left = flatten(a, Order::kSorted);
  const auto right = flatten(b, Order::kSorted);
  for (std::size_t i = 0; i < std::max(left.paths.size(), right.paths.size()); ++i) {
    if (i >= right.paths.size()) detail::Mismatch::refuse_structure("zip", left.paths[i], 0);
    if (i >= left.paths.size()) detail::Mismatch::refuse_structure("zip", right.paths[i], 1);
    if (left.paths[i] != right.paths[i]) {
      const bool in_both = std::ranges::find(right.paths, left.paths[i]) != right.paths.end();
      detail::Mismatch::refuse_structure("zip", in_both ? right.paths[i] : left.paths[i],
                                         in_both ? 1 : 0);
    }
    left.tensors[i] = std::invoke(f, std::as_const(left.tensors[i]), right.tensors[i]);
  }
  return unflatten(a, left.tensors, Order::kSorted);
}

}  // namespace accelerate::tree
