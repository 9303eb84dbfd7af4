// src/comm/peers.h - the processes of one collective call, and the messages they exchange.
//
// Internal. All of c10d that the collectives need is behind this class: every failure that leaves
// it is a `CommError` that says what was being done and where it was asked for.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <functional>
#include <source_location>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/detail/comm/collectives.h"
#include "accelerate/fwd.h"
#include "accelerate/state.h"
#include "comm/call_checks.h"
#include "core/call_site.h"

namespace accelerate::detail::comm {

class ShmBackend;

/// Newer versions of LibTorch call it by another name.
template <class Group>
c10::intrusive_ptr<c10d::Work> all_gather_into(Group& group, at::Tensor& out, at::Tensor& in,
                                               const c10d::AllgatherOptions& options) {
  if constexpr (requires { group.all_gather_single(out, in, options); }) {
    return group.all_gather_single(out, in, options);
  } else {
    return group._allgather_base(out, in, options);
  }
}

class Peers {
 public:
  Peers(const char* operation, const Call& call);

  [[nodiscard]] bool alone() const noexcept { return size_ <= 1; }
  [[nodiscard]] int size() const noexcept { return size_; }
  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] const char* operation() const noexcept { return operation_; }
  [[nodiscard]] const std::source_location& where() const noexcept { return where_; }
  [[nodiscard]] const PartialState& state() const noexcept { return state_; }
  [[nodiscard]] const c10::intrusive_ptr<c10d::ProcessGroup>& group() const noexcept {
    return group_;
  }
  /// "gather at train.cpp:31".
  [[nodiscard]] std::string call_site() const;

  /// Throws `ArgumentError` for tensors that no message can carry: on a device that the group does
  /// not serve, or not dense. From now on ranks whose tensors have other dtypes, shapes or places
  /// in the tree are strays.
  void check(const Tensors& leaves, const TreeView& view) const;
  /// Throws `ArgumentError` for a rank outside of the group.
  void check_rank(int rank, const char* what) const;

  /// Collective. `in` of every process, in rank order, into `out`, both contiguous.
  void all_gather(at::Tensor out, at::Tensor in) const;
  /// Collective. Overwrites `tensor`, contiguous, with that of `root`.
  void broadcast(at::Tensor tensor, int root) const;
  struct AllReduce {
    at::Tensor tensor;
    c10d::ReduceOp::RedOpType operation = c10d::ReduceOp::SUM;
  };
  /// Collective. Overwrites each tensor, contiguous, with what the operation makes of those of all
  /// processes.
  /// All are under way before the first is waited for.
  void all_reduce(const std::vector<AllReduce>& messages) const;

  /// Collective. As above, from one tensor into another; requires `share_memory`.
  void all_reduce_into(const at::Tensor& out, const at::Tensor& in,
                       c10d::ReduceOp::RedOpType operation) const;

  /// Runs code that talks to other processes; what it throws leaves as `CommError`.
  void guarded(const std::function<void()>& communicate) const;

  /// Whether tensors on the CPU, which the group must serve, travel through memory that all its
  /// processes share.
  [[nodiscard]] bool share_memory() const;

  /// Where data that has no device of its own travels.
  [[nodiscard]] at::Device message_device() const;

 private:
  [[nodiscard]] bool serves(c10::DeviceType device) const;
  [[nodiscard]] ShmBackend* shared_memory() const;

  const char* operation_;
  std::source_location where_;
  AtCallSite site_;
  mutable UserCall call_;
  mutable std::string places_;  // what `call_.more` refers to
  AsUserCall as_call_;
  PartialState state_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  int size_ = 1;
  int rank_ = 0;
};

/// " at ['mask']" for a leaf of a tree; "" for a bare tensor.
[[nodiscard]] std::string leaf_place(const TreeView& view, std::size_t leaf);

/// Collective. Starts to gather `in` of every process, in rank order, into `out`, both contiguous.
/// With `asynchronous` the caller goes on; the tensors must live until the work is complete.
[[nodiscard]] c10::intrusive_ptr<c10d::Work> start_all_gather(c10d::ProcessGroup& group,
                                                              at::Tensor& out, at::Tensor& in,
                                                              bool asynchronous);

/// The same on all processes whose trees have the same places (`TreeView::places`).
[[nodiscard]] std::uint64_t hash_of(const std::vector<std::string>& places);

/// A tensor for what a message brings.
[[nodiscard]] at::Tensor empty_result(at::IntArrayRef sizes, const at::TensorOptions& options);

/// The elements of a contiguous tensor as a flat tensor of bytes that shares its memory.
[[nodiscard]] at::Tensor bytes_of(const at::Tensor& tensor);
/// Contiguous, with lazy conjugation and negation carried out.
[[nodiscard]] at::Tensor dense(const at::Tensor& tensor);

/// Where each of several tensors lies in one buffer. Offsets suit every dtype.
class Packing {
 public:
  /// Only `leaves[i]` for i in `which` are packed.
  Packing(const Tensors& leaves, std::vector<std::size_t> which);

  [[nodiscard]] std::int64_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] const std::vector<std::size_t>& which() const noexcept { return which_; }
  [[nodiscard]] std::int64_t offset(std::size_t slot) const { return offsets_[slot]; }

  /// A buffer with the tensors in it.
  [[nodiscard]] at::Tensor packed(const Tensors& leaves) const;
  /// The part of `buffer` for one tensor, in its dtype and shape.
  [[nodiscard]] at::Tensor part(const at::Tensor& buffer, std::size_t slot,
                                const at::Tensor& like) const;

 private:
  std::vector<std::size_t> which_;
  std::vector<std::int64_t> offsets_;
  std::int64_t bytes_ = 0;
};

/// The indices of the tensors, device by device: a message carries one device only.
[[nodiscard]] std::vector<std::vector<std::size_t>> by_device(const Tensors& leaves);

/// What a process says about its call in debug mode.
struct DebugFacts {
  const char* operation;
  /// Arguments that must agree, such as "from_process=0". Only called in debug mode.
  std::function<std::string()> arguments = nullptr;
  /// What stands for a tensor in the report; by default its shape.
  Value (*of)(const at::Tensor&) = nullptr;
  /// Why a tensor cannot take part; by default `not_dense`.
  std::string (*problem)(const at::Tensor&) = nullptr;
};

/// Collective in debug mode, else nothing. Compares the inputs of all processes; throws the same
/// `DistributedOperationException` on each when they do not fit together.
void verify(const Peers& peers, const Tensors& leaves, const TreeView& view,
            const DebugFacts& facts);

}  // namespace accelerate::detail::comm
