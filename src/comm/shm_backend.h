// src/comm/shm_backend.h - collectives between the ranks of one host, through memory they share.
//
// Internal. Serves CPU tensors of every dtype that moves as bytes; reductions are carried out in
// rank order, so all ranks hold the same bits and every run gives the same.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/guard.h"
#include "comm/shm_lane.h"
#include "comm/shm_mailbox.h"
#include "comm/shm_segment.h"

namespace accelerate::detail {

class ShmBackend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  /// Collective. Null on all ranks when one of them cannot take part: it is on another host, in
  /// another container, the system grants no memory, or there are more than 64 ranks. Then
  /// `why_not` says the same on all of them. Ranks that do not come are waited for as long as
  /// `options.meeting_timeout` says. Two groups need stores with different prefixes.
  [[nodiscard]] static c10::intrusive_ptr<ShmBackend> try_make(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const ShmOptions& options,
      std::shared_ptr<CallGuard> guard, std::string& why_not);

  /// Use `try_make`.
  ShmBackend(std::shared_ptr<ShmSegment> segment, std::shared_ptr<CallGuard> guard,
             const ShmOptions& options);
  /// Works that are under way fail, here and on ranks that need this one for them.
  ~ShmBackend() override;

  const std::string getBackendName() const override { return "shm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return sequence_.load(); }
  c10d::ErrorType getError() override;
  void abort() override { close(); }
  void shutdown() override { close(); }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  /// The same call to the other ranks as `allreduce`, which overwrites what it is given. `output`
  /// has the size and dtype of `input`.
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
  /// at once, whether or not somebody receives it.
  WorkPtr send(Tensors& tensors, int receiver, int tag) override;
  WorkPtr recv(Tensors& tensors, int sender, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  struct Call;

  [[nodiscard]] WorkPtr start(Call call);
  [[nodiscard]] WorkPtr post(Tensors& tensors, int peer, int tag, c10d::OpType type);
  void close() noexcept;

  std::shared_ptr<ShmSegment> segment_;
  std::shared_ptr<CallGuard> guard_;
  std::shared_ptr<ShmLane> lane_;
  std::shared_ptr<ShmMailbox> mailbox_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::int64_t inline_bytes_;
  std::atomic<std::uint64_t> sequence_{0};
};

}  // namespace accelerate::detail
