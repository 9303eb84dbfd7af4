// src/comm/host_leaders.h - collectives among the leaders of several hosts.
//
// Internal. One rank per host is its leader. All data travels as messages between two leaders,
// tagged with the call of the group. Reductions follow the order of the hosts, so all leaders hold
// the same bits.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/group_guard.h"
#include "comm/message_exchange.h"
#include "comm/shm_collectives.h"

namespace accelerate::detail::comm {

/// The call of the whole group to which a stage belongs.
struct CallPart {
  Ticket ticket = {};
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};

class HostLeaders {
 public:
  /// `gloo` connects the leaders, of which this is number `getRank()`, and has no other user.
  HostLeaders(c10::intrusive_ptr<c10d::Backend> gloo, const std::shared_ptr<GroupGuard>& guard);

  // Collective among the leaders. Tensors are flat, dense and of bytes.

  void barrier(const CallPart& call);
  /// `data` becomes the reduction over all hosts. An average is for the caller to divide.
  void all_reduce(const CallPart& call, const at::Tensor& data, const ShmArithmetic& arithmetic);
  void broadcast(const CallPart& call, const at::Tensor& data, int root);
  /// `blocks[i]` becomes the block of host i; the own one is the input.
  void all_gather(const CallPart& call, const std::vector<at::Tensor>& blocks);

  /// Ends the running collective, and every later one, with an error.
  void close() noexcept { messages_.close(); }

 private:
  void exchange(const CallPart& call, const std::vector<at::Tensor>& arriving,
                const std::vector<at::Tensor>& leaving);

  c10::intrusive_ptr<c10d::Backend> gloo_;
  MessageExchange messages_;
  int own_;
  int count_;
};

}  // namespace accelerate::detail::comm
