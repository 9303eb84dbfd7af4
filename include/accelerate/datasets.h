// accelerate/datasets.h - what a data loader can load from, and how a batch is read from it.
//
// Indexed data, the first of these that fits:
//   - tensors: one, or a pair, tuple, array, map, torch::data::Example or struct with
//     `tensor_tree_fields` of them; a sample is a row of each,
//   - `get(index, generator)`, `get_batch(indices)` as in LibTorch, `get(index)`, and a `size()`,
//   - ranges with random access: std::vector, std::views::iota, ...
//   - `FunctionDataset{size, f}`: sample i is `f(i)`.
// Iterable data: `next()` that returns an optional, with `reset()` if passes start over; LibTorch's
// stateful, stream and chunk datasets; a callable that returns an optional; any other range.
//
// All of them may have `set_epoch(epoch)`. A dataset may be given as a `std::shared_ptr` to it.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <ranges>
#include <utility>
#include <vector>

#include "accelerate/detail/data/batch_tensors.h"
#include "accelerate/tree.h"

namespace accelerate {

/// A dataset whose sample i is `f(i)`, or `f(i, generator)` with the generator of the batch.
template <class F>
class FunctionDataset {
  static_assert(std::invocable<F&, std::int64_t> ||
                    std::invocable<F&, std::int64_t, at::Generator&>,
                "accelerate: the function of a FunctionDataset takes the index of a sample, a "
                "std::int64_t, and may take an at::Generator& as well.");

 public:
  FunctionDataset(std::int64_t size, F f) : size_(size), f_(std::move(f)) {}

  [[nodiscard]] std::int64_t size() const { return size_; }
  auto get(std::size_t index)
    requires std::invocable<F&, std::int64_t>
  {
    return std::invoke(f_, static_cast<std::int64_t>(index));
  }
  auto get(std::size_t index, at::Generator& generator)
    requires std::invocable<F&, std::int64_t, at::Generator&>
  {
    return std::invoke(f_, static_cast<std::int64_t>(index), generator);
  }

 private:
  std::int64_t size_;
  F f_;
};

namespace detail::data {

template <class D>
constexpr bool is_columns() {
  using tree::Node;
  constexpr Node kind = tree::detail::node_of<D, at::Tensor>();
  return (kind == Node::kLeaf || kind == Node::kFixed || kind == Node::kRecord ||
          kind == Node::kMapping) &&
         PureTensorTree<D>;
}
template <class D>
concept Columns = is_columns<D>();
template <class D>
concept GetsWithGenerator =
    requires(D& dataset, at::Generator& generator) { dataset.get(std::size_t{}, generator); };
template <class D>
concept GetsBatches =
    requires(D& dataset, c10::ArrayRef<std::size_t> indices) { dataset.get_batch(indices); };
template <class D>
concept Gets = requires(D& dataset) { dataset.get(std::size_t{}); };
template <class D>
concept RandomAccess = std::ranges::random_access_range<D> && std::ranges::sized_range<D>;
template <class D>
concept Subscripts = requires(D& dataset) {
  dataset[std::size_t{}];
  dataset.size();
} && !std::ranges::range<D>;
template <class D>
concept IndexedDataset = Columns<D> || GetsWithGenerator<D> || GetsBatches<D> || Gets<D> ||
                         RandomAccess<D> || Subscripts<D>;

/// Datasets that may say how many samples they have.
template <class D>
concept HasLength = Columns<D> || requires(const D& dataset) { dataset.size(); } ||
                    std::ranges::sized_range<const D>;

template <class T>
constexpr bool kIsVector = tree::detail::kIs<T, std::vector>;

/// Samples, if the dataset says how many.
template <class D>
std::optional<std::int64_t> dataset_length(const D& dataset) {
  if constexpr (Columns<D>) {
    CommonLength length;
    tree::for_each(
        dataset, [&](const TreePath& path, const at::Tensor& tensor) { length.add(path, tensor); });
    return length.get();
  } else if constexpr (requires { static_cast<std::int64_t>(dataset.size()); }) {
    return static_cast<std::int64_t>(dataset.size());
  } else if constexpr (requires { dataset.size().has_value(); }) {
    const auto size = dataset.size();
    return size ? std::optional(static_cast<std::int64_t>(*size)) : std::nullopt;
  } else if constexpr (std::ranges::sized_range<const D>) {
    return static_cast<std::int64_t>(std::ranges::size(dataset));
  } else {
    return std::nullopt;
  }
}

template <class D>
void tell_epoch(D& dataset, std::int64_t epoch) {
  if constexpr (requires { dataset.set_epoch(epoch); }) dataset.set_epoch(epoch);
}

}  // namespace detail::data
}  // namespace accelerate
