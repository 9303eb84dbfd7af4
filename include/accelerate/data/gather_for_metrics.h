// accelerate/data/gather_for_metrics.h - what all processes computed for their batches, without
// what was computed for repeated samples.
//
// Part of accelerate/data_loader.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <iterator>
#include <optional>
#include <source_location>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/detail/comm/collectives.h"
#include "accelerate/errors.h"
#include "accelerate/operations/objects.h"
#include "accelerate/tree.h"

namespace accelerate {

struct GatherForMetricsOptions {
  /// Gather as objects what could be gathered as tensors: for tensors whose shapes differ.
  bool use_gather_object = false;
};

namespace detail::data {

/// Gathered items [begin, end).
struct ItemRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

struct ACCELERATE_API MetricsGather {
  /// Which of `length` gathered items were computed for genuine samples; nullopt keeps all of them.
  /// Warns once, and keeps all, where there is not one item per sample.
  [[nodiscard]] static std::optional<std::vector<ItemRange>> genuine_items(std::int64_t length);
  /// Collective. Replaces the tensors by those of all processes, without the rows of repeated
  /// samples.
  static void leaves(std::vector<at::Tensor>& leaves, const comm::TreeView& view,
                     std::source_location where);
  [[nodiscard]] static at::Tensor rows_as_objects(const at::Tensor& tensor,
                                                  std::source_location where);
  /// Whether every leaf of a value is a tensor.
  [[nodiscard]] static bool holds_tensors_alone(const Value& value);
};

template <class T>
std::vector<T> gather_list(const std::vector<T>& items, std::source_location where) {
  auto all = accelerate::gather_object(items, where);
  const auto ranges = MetricsGather::genuine_items(std::ssize(all));
  if (!ranges) return all;
  std::vector<T> kept;
  for (const auto& [begin, end] : *ranges) {
    kept.insert(kept.end(), all.begin() + begin, all.begin() + end);
  }
  return kept;
}

template <class T>
T gather_as_objects(const T& x, std::source_location where) {
  if constexpr (std::same_as<T, at::Tensor>) {
    return MetricsGather::rows_as_objects(x, where);
  } else if constexpr (tree::detail::kIs<T, std::vector>) {
    return gather_list(x, where);
  } else {
    if constexpr (std::same_as<T, Value>) {
      if (x.is_list()) return Value(gather_list(x.as_list(), where));
    }
    throw ArgumentError(
        "gather_for_metrics gathers objects as one list: pass a std::vector, a tensor or a list "
        "value, or leave use_gather_object off.");
  }
}

}  // namespace detail::data

/// Collective. `gather` of a tree of tensors, `gather_object` of a `std::vector` of other things;
/// with the last batches of a prepared loader without what was computed for samples that were
/// repeated to even them out: over a whole pass each sample of the dataset comes once, in order.
/// Processes with data of their own (`already_sharded`, datasets that shard themselves) may hold
/// batches of other lengths: each sample comes once there too, rank by rank.
///
/// Only what has one row, or item, per sample is cut; other results are returned whole, with one
/// warning. A tensor without dimensions is a value of the batch and never cut. Nothing is cut with
/// drop_last, outside of a loop over a prepared loader, or where the number of samples is not
/// known.
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
    return detail::data::gather_list(x, where);
  } else {
    bool as_objects = options.use_gather_object;
    if constexpr (std::same_as<Tree, Value>)
      as_objects |= !detail::data::MetricsGather::holds_tensors_alone(x);
    if (as_objects) return detail::data::gather_as_objects<Tree>(x, where);
    return detail::comm::on_leaves(std::forward<T>(x), [&](auto& leaves, const auto& view) {
      detail::data::MetricsGather::leaves(leaves, view, where);
    });
  }
}

}  // namespace accelerate
