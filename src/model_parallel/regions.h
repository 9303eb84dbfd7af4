// src/model_parallel/regions.h - the collectives of accelerate/parallel/regions.h by name.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "accelerate/parallel/regions.h"

namespace accelerate::detail::model_parallel {

using nn::ProcessGroupPtr;

/// What a collective does to a tensor. Those with a dimension divide or join it.
enum class Move : std::uint8_t { kKeep, kSum, kGather, kTake, kSumAndTake };

/// A collective, and that of its backward.
struct Region {
  Move forward = Move::kKeep;
  Move backward = Move::kKeep;
  std::int64_t dim = 0;
};
inline constexpr Region kCopy{Move::kKeep, Move::kSum};
inline constexpr Region kReduce{Move::kSum, Move::kKeep};
[[nodiscard]] constexpr Region gather_along(std::int64_t dim) {
  return {Move::kGather, Move::kTake, dim};
}
[[nodiscard]] constexpr Region scatter_along(std::int64_t dim) {
  return {Move::kTake, Move::kGather, dim};
}
[[nodiscard]] constexpr Region gather_sequence_along(std::int64_t dim) {
  return {Move::kGather, Move::kSumAndTake, dim};
}
[[nodiscard]] constexpr Region reduce_scatter_along(std::int64_t dim) {
  return {Move::kSumAndTake, Move::kGather, dim};
}

[[nodiscard]] inline bool is_alone(const ProcessGroupPtr& group) {
  return !group || group->getSize() == 1;
}

/// Collective. Carries the region out, recorded for backward. Its messages go by `name` (the first
/// 30 bytes of it): processes that come to other regions are strays.
[[nodiscard]] at::Tensor pass(const at::Tensor& x, const Region& region,
                              const ProcessGroupPtr& group, std::string_view name);

/// Collective, not recorded. Overwrites `x`, contiguous.
void all_reduce(at::Tensor x, const ProcessGroupPtr& group, std::string_view name,
                c10d::ReduceOp::RedOpType reduction = c10d::ReduceOp::SUM);
/// Collective, not recorded. Gives all processes the tensors of the first one.
void broadcast_from_first(const std::vector<at::Tensor>& tensors, const ProcessGroupPtr& group,
                          std::string_view name);

}  // namespace accelerate::detail::model_parallel
