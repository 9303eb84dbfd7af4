// src/model_parallel/sequence_messages.h - what the processes that share a sequence send one
// another.
//
// All functions are collective in their group. `what` is the name by which reports know the
// message, also during backward. Tensors are contiguous.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "accelerate/api.h"

namespace accelerate::detail::model_parallel {

using GroupHandle = c10::intrusive_ptr<c10d::ProcessGroup>;

/// What this process has sent since it began, by the bytes that left it for other processes.
struct SequenceTraffic {
  std::int64_t all_gather_calls = 0;
  std::int64_t all_gather_bytes = 0;
  std::int64_t all_to_all_calls = 0;
  std::int64_t all_to_all_bytes = 0;
};
[[nodiscard]] ACCELERATE_API SequenceTraffic sequence_traffic();

/// A tensor on its way around the ring.
class RingMessage {
 public:
  RingMessage() = default;
  /// Starts to send `mine` to the next rank, and to receive that of the rank before, which has the
  /// same shape.
  RingMessage(const GroupHandle& group, at::Tensor mine, const char* what);

  /// What has arrived.
  [[nodiscard]] at::Tensor wait();

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  at::Tensor sent_;
  at::Tensor received_;
};

/// The tensors of all ranks, of one shape: [ranks, ...].
[[nodiscard]] at::Tensor gather_rows(const GroupHandle& group, at::Tensor mine, const char* what);
/// Row r of `rows` goes to rank r; row r of the result is what rank r has sent.
[[nodiscard]] at::Tensor exchange_rows(const GroupHandle& group, at::Tensor rows, const char* what);

}  // namespace accelerate::detail::model_parallel
