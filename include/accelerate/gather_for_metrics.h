// accelerate/gather_for_metrics.h - what all processes computed for their batches, without what was
// computed for repeated samples.
//
// Part of accelerate/data_loader.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <source_location>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/collectives.h"
#include "accelerate/object_operations.h"
#include "accelerate/tensor_operations.h"

namespace accelerate {

struct GatherForMetricsOptions {
  /// Gather as objects what could be gathered as tensors: for tensors whose shapes differ.
  bool use_gather_object = false;
};

namespace detail {

/// What each process holds of one batch, by rank: how many samples, and how many of them are no
/// repeats.
struct UnevenParts {
  std::vector<std::int64_t> lengths = {};
  std::vector<std::int64_t> genuine = {};
};

/// The parts of the batch of the loader that is iterated; null where nothing is uneven.
[[nodiscard]] ACCELERATE_API std::shared_ptr<const UnevenParts> uneven_parts();
/// Collective. Gathers tensors with a row per sample, whatever their lengths, without repeats;
/// others as they are.
[[nodiscard]] ACCELERATE_API std::vector<at::Tensor> gather_uneven(std::vector<at::Tensor> leaves,
                                                                   const UnevenParts& parts,
                                                                   std::source_location where);
/// Whether `length` gathered items are one per sample. Warns once where not.
[[nodiscard]] ACCELERATE_API bool one_per_sample(std::int64_t length, const UnevenParts& parts);

/// How many of the gathered samples are genuine, and how many there are if one was computed for
/// each sample of each process.
struct MetricsCut {
  std::int64_t genuine = 0;
  std::int64_t padded = 0;
};

/// Returns nullopt if no row is dropped; logs if the number of genuine samples is not known.
[[nodiscard]] ACCELERATE_API std::optional<MetricsCut> metrics_cut();
/// How many of `length` gathered items to keep: all, with a warning, unless there is one per
/// sample.
[[nodiscard]] ACCELERATE_API std::int64_t kept_of(std::int64_t length, const MetricsCut& cut);
[[nodiscard]] ACCELERATE_API at::Tensor kept_of(const at::Tensor& gathered, const MetricsCut& cut);
/// Whether every leaf of a value is a tensor.
[[nodiscard]] ACCELERATE_API bool holds_tensors_alone(const Value& value);
[[nodiscard]] ACCELERATE_API at::Tensor gather_rows_as_objects(const at::Tensor& tensor,
                                                               std::source_location where);
[[noreturn]] ACCELERATE_API void refuse_as_objects();

template <class T>
std::vector<T> gather_list(const std::vector<T>& items, std::source_location where) {
  auto all = accelerate::gather_object(items, where);
  if (const auto parts = uneven_parts()) {
    if (!one_per_sample(std::ssize(all), *parts)) return all;
    std::vector<T> kept;
    auto from = all.begin();
    for (std::size_t rank = 0; rank < parts->lengths.size(); ++rank) {
      kept.insert(kept.end(), from, from + parts->genuine[rank]);
      from += parts->lengths[rank];
    }
    return kept;
  }
  if (const auto cut = metrics_cut()) {
    const auto kept = kept_of(std::ssize(all), *cut);
    all.erase(all.begin() + kept, all.end());
  }
  return all;
}

template <class T>
T gather_as_objects(const T& x, std::source_location where) {
  if constexpr (std::same_as<T, at::Tensor>) {
    return gather_rows_as_objects(x, where);
  } else if constexpr (tree::detail::kIs<T, std::vector>) {
    return gather_list(x, where);
  } else if constexpr (std::same_as<T, Value>) {
    if (x.is_list()) return Value(gather_list(x.as_list(), where));
    refuse_as_objects();
  } else {
    refuse_as_objects();
  }
}

}  // namespace detail

/// Collective. `gather` of a tree of tensors, `gather_object` of a `std::vector` of other things;
/// with the last batches of a prepared loader without what was computed for samples that were
/// repeated to even them out: over a whole pass each sample of the dataset comes once, in order.
/// Processes with data of their own (`already_sharded`, datasets that shard themselves) may hold
/// batches of other lengths: each sample comes once there too, rank by rank.
///
/// Only what has one row, or item, per sample is cut; other results are returned whole, with one
/// warning. Nothing is cut with drop_last, outside of a loop over a prepared loader, or where the
/// number of samples is not known.
///
///     auto predictions = gather_for_metrics(model(x).argmax(-1));
template <class T>
[[nodiscard]] std::remove_cvref_t<T> gather_for_metrics(
    T&& x, const GatherForMetricsOptions& options = {},
    std::source_location where = std::source_location::current()) {
  using Tree = std::remove_cvref_t<T>;
  static_assert(PureTensorTree<Tree> || tree::detail::kIs<Tree, std::vector>,
                "accelerate: gather_for_metrics takes a tree of tensors, or a std::vector of "
                "objects. Pass the tensors and the other things separately.");
  if constexpr (!PureTensorTree<Tree>) {
    return detail::gather_list(x, where);
  } else {
    bool as_objects = options.use_gather_object;
    if constexpr (std::same_as<Tree, Value>) as_objects |= !detail::holds_tensors_alone(x);
    if (as_objects) return detail::gather_as_objects<Tree>(x, where);
    if (const auto parts = detail::uneven_parts()) {
      auto leaves = detail::gather_uneven(tree::leaves(x), *parts, where);
      return tree::unflatten(Tree(std::forward<T>(x)), leaves);
    }
    auto gathered = gather(std::forward<T>(x), where);
    const auto cut = detail::metrics_cut();
    if (!cut) return gathered;
    return tree::map([&](const at::Tensor& leaf) { return detail::kept_of(leaf, *cut); },
                     std::move(gathered));
  }
}

}  // namespace accelerate
