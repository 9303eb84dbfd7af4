// src/comm/host_leaders.h - what the leaders of several hosts do among themselves.
//
// Internal. One rank per host. Everything is messages between two of them, tagged with the call of
// the whole group that they belong to. The leaders take each other in the order of the hosts, so
// all hold the same bits.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/group_guard.h"
#include "comm/messages.h"
#include "comm/shm_collectives.h"

namespace accelerate::detail {

/// A call of the whole group, of which something is a part.
struct CallPart {
  Ticket ticket = {};
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};

class HostLeaders {
 public:
  /// `gloo` connects the leaders; this one is number `getRank()`. Nobody else uses it.
  HostLeaders(c10::intrusive_ptr<c10d::Backend> gloo, const std::shared_ptr<GroupGuard>& guard);

  // Collective among the leaders. Tensors are flat, dense and of bytes.

  void barrier(const CallPart& call);
  /// `data` becomes the reduction over all hosts. An average is for the caller to divide.
  void all_reduce(const CallPart& call, const at::Tensor& data, const ShmArithmetic& arithmetic);
  void broadcast(const CallPart& call, const at::Tensor& data, int root);
  /// `blocks[i]` is what host i brings along; the own one is filled.
  void all_gather(const CallPart& call, const std::vector<at::Tensor>& blocks);

  /// Ends what is under way, and whatever comes later, with an error.
  void close() noexcept { messages_.close(); }

 private:
  void exchange(const CallPart& call, const std::vector<at::Tensor>& arriving,
                const std::vector<at::Tensor>& leaving);

  c10::intrusive_ptr<c10d::Backend> gloo_;
  Messages messages_;
  int own_;
  int count_;
};

}  // namespace accelerate::detail
