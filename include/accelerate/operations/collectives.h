// accelerate/operations/collectives.h - move tensors between processes.
//
// Part of accelerate/operations.h. Functions marked "Collective" must be called by every process of
// the group, in the same order, with trees of the same structure; tensors agree in shape and dtype
// unless a contract says otherwise. Each takes any tree of tensors (accelerate/tree.h) and moves it
// as a whole: one message for many tensors (`reduce` says when there are more). Mappings are
// matched by key, whatever their order.
//
// Without a group the processes of `PartialState` take part; `gather(tree, group)` and so on take
// an explicit one. A single process gets its input back.
//
// Before anything is sent each throws `ArgumentError`, with the leaf and a remedy, for tensors that
// cannot be sent or are not defined; `CommError` when the others fail, are gone or pass another
// structure, shape or dtype; in debug mode (ACCELERATE_DEBUG_MODE) `DistributedOperationException`,
// the same on all processes, when the inputs do not fit together.
#pragma once

#include <c10/core/Scalar.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <optional>
#include <source_location>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/detail/comm/collectives.h"
#include "accelerate/enums.h"
#include "accelerate/fwd.h"
#include "accelerate/tree.h"

namespace accelerate {

/// Collective. The tensors of all processes concatenated along dimension 0, in rank order, on the
/// device of the input. A tensor of no dimension counts as one of length 1. Any dtype and stride.
/// The result does not require grad.
///
///     auto losses = gather(loss.detach());  // [num_processes]
template <class T>
[[nodiscard]] std::remove_cvref_t<T> gather(
    T&& tree, std::source_location where = std::source_location::current()) {
  return detail::comm::on_leaves(std::forward<T>(tree), [&](auto& leaves, const auto& view) {
    detail::comm::LeafCollectives::gather(leaves, view, {nullptr, where});
  });
}
template <class T>
[[nodiscard]] std::remove_cvref_t<T> gather(
    T&& tree, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    std::source_location where = std::source_location::current()) {
  return detail::comm::on_leaves(std::forward<T>(tree), [&](auto& leaves, const auto& view) {
    detail::comm::LeafCollectives::gather(leaves, view, {&group, where});
  });
}

/// Collective. Writes the tensors of `from_process` into those of all others, also where these
/// require grad: the tensors of `tree` are changed, as in Python. Returns the same tensors.
template <class T>
std::remove_cvref_t<T> broadcast(T&& tree, int from_process = 0,
                                 std::source_location where = std::source_location::current()) {
  return detail::comm::on_leaves(std::forward<T>(tree), [&](auto& leaves, const auto& view) {
    detail::comm::LeafCollectives::broadcast(leaves, view, from_process, {nullptr, where});
  });
}
template <class T>
std::remove_cvref_t<T> broadcast(T&& tree, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                 int from_process = 0,
                                 std::source_location where = std::source_location::current()) {
  return detail::comm::on_leaves(std::forward<T>(tree), [&](auto& leaves, const auto& view) {
    detail::comm::LeafCollectives::broadcast(leaves, view, from_process, {&group, where});
  });
}

/// Collective unless `kNone`. New tensors with the sum, mean (the sum, then divided) or maximum
/// over all processes, the same bits on each; `kNone` copies. Sums are computed in the dtype of the
/// tensor: trees of up to 256 KiB in one message and in rank order, larger ones by one message per
/// dtype and in the order of the backend, so the last bits may depend on the size of the tree.
/// A maximum with NaN in it is NaN. Of bool tensors sum and maximum are "any". `ArgumentError`:
/// mean of integers or bool, maximum of complex numbers, any of float8. `scale` acts on no device
/// this library knows and is warned about.
///
/// A result of an input that requires grad stays attached to it; its gradient is that of the copy,
/// divided by the number of processes for the mean: other processes are not differentiated through.
template <class T>
[[nodiscard]] std::remove_cvref_t<T> reduce(
    T&& tree, Reduction reduction = Reduction::kMean, double scale = 1.0,
    std::source_location where = std::source_location::current()) {
  return detail::comm::on_leaves(std::forward<T>(tree), [&](auto& leaves, const auto& view) {
    detail::comm::LeafCollectives::reduce(leaves, view, reduction, scale, {nullptr, where});
  });
}
template <class T>
[[nodiscard]] std::remove_cvref_t<T> reduce(
    T&& tree, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    Reduction reduction = Reduction::kMean,
    std::source_location where = std::source_location::current()) {
  return detail::comm::on_leaves(std::forward<T>(tree), [&](auto& leaves, const auto& view) {
    detail::comm::LeafCollectives::reduce(leaves, view, reduction, 1.0, {&group, where});
  });
}

struct PadOptions {
  std::int64_t dim = 0;
  /// What to fill with; must be a value of the dtype of every tensor.
  at::Scalar pad_index = 0;
  /// Put the padding in front.
  bool pad_first = false;
};

/// Collective. Pads each tensor along `dim` to the longest of all processes, so that the tree can
/// be gathered. Returned as they are: the longest tensors, tensors without that dimension, nested
/// tensors (with a warning). Processes must agree on the number of dimensions.
template <class T>
[[nodiscard]] std::remove_cvref_t<T> pad_across_processes(
    T&& tree, const PadOptions& options = {},
    std::source_location where = std::source_location::current()) {
  return detail::comm::on_leaves(std::forward<T>(tree), [&](auto& leaves, const auto& view) {
    detail::comm::LeafCollectives::pad_across_processes(
        leaves, view, {options.dim, options.pad_index, options.pad_first}, {nullptr, where});
  });
}
template <class T>
[[nodiscard]] std::remove_cvref_t<T> pad_across_processes(
    T&& tree, const c10::intrusive_ptr<c10d::ProcessGroup>& group, const PadOptions& options = {},
    std::source_location where = std::source_location::current()) {
  return detail::comm::on_leaves(std::forward<T>(tree), [&](auto& leaves, const auto& view) {
    detail::comm::LeafCollectives::pad_across_processes(
        leaves, view, {options.dim, options.pad_index, options.pad_first}, {&group, where});
  });
}

/// Collective. Exactly one process passes a tensor, the others nothing; each gets a copy of it,
/// with its shape and dtype, on its own device; so does a single process. Throws `ArgumentError` on
/// every process when none or several pass one, or the tensor is not dense.
[[nodiscard]] ACCELERATE_API at::Tensor copy_tensor_to_devices(
    const std::optional<at::Tensor>& tensor = std::nullopt,
    std::source_location where = std::source_location::current());

}  // namespace accelerate
