// src/model_parallel/context_parallel.h - the scope in which tensors and attention are split over
// the processes of a context parallel group.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "accelerate/api.h"
#include "model_parallel/sequence_messages.h"

namespace accelerate::detail::model_parallel {

/// What `maybe_context_parallel` is given.
struct SequenceBuffers {
  std::vector<at::Tensor> tensors = {};
  std::vector<std::int64_t> dims = {};
  std::vector<at::Tensor> not_restored = {};
};

/// While the result lives the buffers are the part of this process, in head-tail order, and
/// attention of this thread is that over the group. It does not communicate, and its end gives the
/// buffers the tensors that they had back. Throws `ArgumentError` for buffers that cannot be cut,
/// and has changed nothing then.
[[nodiscard]] ACCELERATE_API std::shared_ptr<void> enter_context_parallel(
    const SequenceBuffers& buffers, const GroupHandle& group, const std::string& cp_comm_strategy);

}  // namespace accelerate::detail::model_parallel
