// src/comm/shm_backend.h - collectives between the ranks of one host, through memory they share.
//
// Internal. Serves dense CPU tensors of every dtype. Reductions follow the rank order, so all ranks
// hold the same bits, in every run.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/executor_backend.h"
#include "comm/guard.h"
#include "comm/shm_collectives.h"
#include "comm/shm_mailbox.h"
#include "comm/shm_segment.h"

namespace accelerate::detail::comm {

class ShmBackend final : public ExecutorBackend {
 public:
  /// Collective. Returns null on all ranks if one of them cannot take part, and sets `why_not` to
  /// the same text on all: it is on another host, in another container, the system grants no
  /// memory, or there are more than 64 ranks. Waits for the other ranks up to
  /// `options.meeting_timeout`. Two groups need stores with different prefixes.
  [[nodiscard]] static c10::intrusive_ptr<ShmBackend> try_make(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const ShmOptions& options,
      std::shared_ptr<CallGuard> guard, std::string& why_not);

  /// Use `try_make`.
  ShmBackend(std::shared_ptr<ShmSegment> segment, std::shared_ptr<CallGuard> guard,
             const ShmOptions& options);
  ~ShmBackend() override { close(); }

  const std::string getBackendName() const override { return "shm"; }
  c10d::ErrorType getError() override;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  /// `allreduce` that leaves `input` unchanged. `output` has its size and dtype. Other ranks may
  /// call either of the two.
  void all_reduce_into(const at::Tensor& output, const at::Tensor& input,
                       const c10d::ReduceOp& operation);
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_for_all) override;

  /// Messages of one sender with one tag arrive in order. A tensor of up to `mailbox_bytes` is sent
  /// at once, before it is received.
  WorkPtr send(Tensors& tensors, int receiver, int tag) override;
  WorkPtr recv(Tensors& tensors, int sender, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  struct Call;

  [[nodiscard]] WorkPtr start(Call call, ShmCollective rounds);
  [[nodiscard]] ShmCollective all_reduce(Call& call, const at::Tensor& tensor,
                                         const c10d::ReduceOp& operation);
  [[nodiscard]] WorkPtr post(Tensors& tensors, int peer, int tag, c10d::OpType type);
  void close() noexcept override;

  std::shared_ptr<ShmSegment> segment_;
  std::shared_ptr<CallGuard> guard_;
  std::shared_ptr<ShmMailbox> mailbox_;
  std::int64_t inline_bytes_;
};

}  // namespace accelerate::detail::comm
