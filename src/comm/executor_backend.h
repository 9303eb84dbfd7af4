// src/comm/executor_backend.h - a backend of c10d that queues its collectives in an executor.
//
// Internal. The common part of the backends for shared memory and for several hosts: how a call is
// described to the guard, queued and returned as a work.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "comm/call_executor.h"
#include "comm/call_facts.h"

namespace accelerate::detail::comm {

/// A collective as a caller of c10d has asked for it. Reads from `options` what each of the option
/// structs of c10d has: the reduction, the root, whether to wait, the timeout.
struct BackendCall {
  template <class Options>
  BackendCall(c10d::OpType type, const char* kind, const Options& options,
              std::vector<at::Tensor> results = {})
      : type(type),
        facts{.kind = kind},
        results(std::move(results)),
        asynchronous(options.asyncOp),
        timeout(options.timeout) {
    if constexpr (requires { options.reduceOp; }) facts.reduction = options.reduceOp.op_;
    if constexpr (requires { options.rootRank; }) facts.root = static_cast<int>(options.rootRank);
  }

  c10d::OpType type;
  CallFactsBuilder facts;
  std::vector<at::Tensor> results;
  bool asynchronous;
  std::chrono::milliseconds timeout;
};

class ExecutorBackend : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_.store(timeout); }
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return sequence_.load(); }
  void abort() override { close(); }
  void shutdown() override { close(); }

 protected:
  ExecutorBackend(int rank, int size, std::chrono::milliseconds timeout,
                  std::shared_ptr<CallGuard> guard);

  /// Ends all works with an error, here and on the ranks that need this one for them.
  virtual void close() noexcept = 0;

  /// The timeout of the call, or that of the group if the call has none.
  [[nodiscard]] std::chrono::milliseconds timeout_of(std::chrono::milliseconds of_call) const;
  /// Announces and queues `call`, which `executed` carries out.
  [[nodiscard]] WorkPtr submit(BackendCall call, const ExecutorCallPtr& executed,
                               Schedule schedule);

  std::shared_ptr<CallExecutor> executor_;

 private:
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<std::uint64_t> sequence_{0};
};

}  // namespace accelerate::detail::comm
