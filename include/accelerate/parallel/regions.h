// accelerate/parallel/regions.h - differentiable collectives for models that are cut over
// processes.
//
//     auto x = nn::copy_to_region(input, group);        // each process computes a part of the rest
//     x = nn::reduce_from_region(part(x), group);       // the sum of the parts
//
// Part of accelerate/parallel.h. `group` is one of a mesh, for example
// `accelerator.torch_device_mesh()->get_group("tp")`. All functions return their input if it is
// null or has one process. Functions are collective in the group, and so is their backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <source_location>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "accelerate/api.h"

namespace accelerate::nn {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

/// Returns `x`, which all processes have alike, for computations that differ. Backward sums the
/// gradients of the processes.
[[nodiscard]] ACCELERATE_API at::Tensor copy_to_region(
    const at::Tensor& x, const ProcessGroupPtr& group,
    std::source_location where = std::source_location::current());

/// Collective. Returns the sum over the processes. Backward hands the gradient on, which all of
/// them have alike.
[[nodiscard]] ACCELERATE_API at::Tensor reduce_from_region(
    const at::Tensor& x, const ProcessGroupPtr& group,
    std::source_location where = std::source_location::current());

/// Collective. Returns `x` of all processes along `dim`, in the order of their ranks. All compute
/// the same with it: backward takes the part of each process out of the gradient.
[[nodiscard]] ACCELERATE_API at::Tensor gather_from_region(
    const at::Tensor& x, std::int64_t dim, const ProcessGroupPtr& group,
    std::source_location where = std::source_location::current());

/// Returns the part of this process of `x`, which all have alike, along `dim`. Backward gathers the
/// gradients. Throws `ArgumentError` if the size cannot be divided among the processes.
[[nodiscard]] ACCELERATE_API at::Tensor scatter_to_region(
    const at::Tensor& x, std::int64_t dim, const ProcessGroupPtr& group,
    std::source_location where = std::source_location::current());

/// Collective. As `gather_from_region`, for computations that differ: backward sums the gradients
/// of the processes and gives each its part.
[[nodiscard]] ACCELERATE_API at::Tensor gather_from_sequence(
    const at::Tensor& x, std::int64_t dim, const ProcessGroupPtr& group,
    std::source_location where = std::source_location::current());

/// Collective. Returns the part of this process, along `dim`, of the sum over the processes.
/// Backward gathers the gradients. Throws as `scatter_to_region`.
[[nodiscard]] ACCELERATE_API at::Tensor reduce_scatter_to_sequence(
    const at::Tensor& x, std::int64_t dim, const ProcessGroupPtr& group,
    std::source_location where = std::source_location::current());

}  // namespace accelerate::nn
