// src/comm/two_level_backend.h - collectives of a group that spans several hosts.
//
// Internal. The ranks of a host talk through shared memory, and only one of them, the leader, talks
// to the leaders of other hosts, through Gloo: with L ranks per host the network carries an L-th of
// what Gloo alone would send, and a small collective waits for fewer messages.
//
//     all_reduce   reduced on each host, in rank order; between the leaders, in the order of the
//                  hosts; shared on each host again. So all ranks hold the same bits.
//     all_gather   gathered on each host; blocks exchanged; the whole shared again
//     broadcast    on the host of the root; along a tree of leaders; on the other hosts
//     barrier      on each host; between the leaders; on each host again
//
// Hosts may have different numbers of ranks, in any order. All other collectives are forwarded to
// Gloo among all ranks of the group.
//
// A collective is announced to the guard of the group once. All its stages carry that ticket, which
// is compared before data moves, in shared memory and between the leaders: ranks in different calls
// are found as on the two transports themselves.
//
// Numbers of 16 bits are added up in float32 and rounded twice: the sum of a host, and that of all
// hosts.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/executor_backend.h"
#include "comm/group_guard.h"
#include "comm/host_leaders.h"
#include "comm/shm_backend.h"
#include "state/process_group.h"
#include "state/roster.h"

namespace accelerate::detail::comm {

/// The ranks of each host, in order. The hosts are in the order of their first ranks.
using RanksByHost = std::vector<std::vector<int>>;

class TwoLevelBackend final : public ExecutorBackend {
 public:
  /// Collective. Returns null on all ranks if a host grants no shared memory, and sets `why_not` to
  /// the same text on all. `gloo` is the guarded one among all ranks.
  [[nodiscard]] static c10::intrusive_ptr<TwoLevelBackend> try_make(
      const c10::intrusive_ptr<c10d::Store>& store, const state::ProcessGroupOptions& options,
      const state::Roster& roster, const RanksByHost& hosts, const ShmOptions& shm_options,
      const c10::intrusive_ptr<c10d::Backend>& gloo, const std::shared_ptr<GroupGuard>& guard,
      std::string& why_not);

  class HostGuard;
  /// Use `try_make`. `shm` is null if the host has one rank, `leaders` if this rank is no leader.
  TwoLevelBackend(const state::ProcessGroupOptions& options, RanksByHost hosts,
                  c10::intrusive_ptr<c10d::Backend> gloo, std::shared_ptr<GroupGuard> guard,
                  std::shared_ptr<HostGuard> host_guard, c10::intrusive_ptr<ShmBackend> shm,
                  std::unique_ptr<HostLeaders> leaders);
  ~TwoLevelBackend() override { close(); }

  const std::string getBackendName() const override { return "two_level"; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  c10d::ErrorType getError() override;

  // --- in two levels

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

  // --- forwarded to Gloo

  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return gloo_->allreduce_sparse(tensors, options);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return gloo_->reduce(tensors, options);
  }
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return gloo_->reduce_scatter(outputs, inputs, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return gloo_->reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override {
    return gloo_->allgather_coalesced(outputs, inputs, options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return gloo_->allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    return gloo_->gather(outputs, inputs, options);
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override {
    return gloo_->scatter(outputs, inputs, options);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override {
    return gloo_->alltoall(outputs, inputs, options);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override {
    return gloo_->alltoall_base(output, input, output_splits, input_splits, options);
  }
  WorkPtr send(Tensors& tensors, int receiver, int tag) override {
    return gloo_->send(tensors, receiver, tag);
  }
  WorkPtr recv(Tensors& tensors, int sender, int tag) override {
    return gloo_->recv(tensors, sender, tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return gloo_->recvAnysource(tensors, tag);
  }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_for_all) override {
    gloo_->monitoredBarrier(options, wait_for_all);
  }

 private:
  class StagedCall;
  struct Reducing;
  using Stages = std::function<void(const CallPart&)>;

  [[nodiscard]] WorkPtr start(BackendCall call, Stages stages);
  void close() noexcept override;
  void leave_levels() noexcept;

  // On the thread that carries out the call.
  void carry_out(const CallPart& part, const Stages& stages);
  void all_reduce(const CallPart& call, const Reducing& reducing);
  void all_gather(const CallPart& call, const at::Tensor& input, const at::Tensor& by_host);
  void broadcast(const CallPart& call, const at::Tensor& data, int root);
  void share_on_host(const CallPart& call, const at::Tensor& data, int local_root);

  RanksByHost hosts_;
  std::vector<int> order_;  // the ranks, host by host
  int host_ = 0;            // the own one
  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::shared_ptr<GroupGuard> guard_;
  std::shared_ptr<HostGuard> host_guard_;
  c10::intrusive_ptr<ShmBackend> shm_;
  std::unique_ptr<HostLeaders> leaders_;
  std::exception_ptr failure_;  // of the first call that failed halfway
};

}  // namespace accelerate::detail::comm
