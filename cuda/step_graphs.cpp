#include "step_graphs.h"

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <exception>
#include <memory>
#include <utility>

namespace accelerate::detail::cuda {
namespace {

/// A recording that can be given up: LibTorch leaves a recording that failed half open.
class Recording final : public at::cuda::CUDAGraph {
 public:
  void give_up() noexcept {
    try {
      capture_end();
      return;
    } catch (const std::exception&) {  // what made the recording invalid is known already
      static_cast<void>(cudaGetLastError());
    }
    // Else freed memory would wait for the end of the recording, the pool for its last user, and
    // the generator of random numbers for the next replay.
    try {
      c10::cuda::CUDACachingAllocator::endAllocateToPool(capture_dev_, mempool_id_);
    } catch (const std::exception&) {  // it was ended before the failure
    }
    if (!capture_ended_) release();  // else the destructor does
    for (auto& [generator, increment] : captured_generator_states_) leave(*generator);
  }

 private:
  void release() noexcept {
    try {
      c10::cuda::CUDACachingAllocator::releasePool(capture_dev_, mempool_id_);
    } catch (const std::exception&) {  // the recording failed before it used the pool
    }
  }
  // LibTorch 2.15 keeps this per recording, and does it in `reset`.
  static void leave(auto& generator) {
    if constexpr (requires { generator.capturing_ = false; }) generator.capturing_ = false;
  }
};

using Pool = std::shared_ptr<const c10::MempoolId_t>;

class CudaStepGraph final : public state::StepGraph {
 public:
  explicit CudaStepGraph(Pool pool) : pool_(std::move(pool)) {}
  void replay() override { graph.replay(); }

 private:
  Pool pool_;

 public:
  Recording graph;
};

/// What is given to `to` from now on waits for what `from` was given.
void order(const c10::cuda::CUDAStream& from, const c10::cuda::CUDAStream& to) {
  at::cuda::CUDAEvent event;
  event.record(from);
  event.block(to);
}

class CudaStepGraphs final : public state::StepGraphs {
 public:
  explicit CudaStepGraphs(c10::Device device)
      : stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())) {}

  // Memory of this stream is freed to this stream, which waits for the program's one before it
  // uses it again.
  void warm_up(const std::function<void()>& body) override {
    const auto outer = c10::cuda::getCurrentCUDAStream(stream_.device_index());
    order(outer, stream_);
    {
      const c10::cuda::CUDAStreamGuard on(stream_);
      body();
    }
    order(stream_, outer);
  }

  std::unique_ptr<state::StepGraph> record(const std::function<void()>& body) override {
    const c10::cuda::CUDAStreamGuard on(stream_);
    c10::cuda::device_synchronize();
    c10::cuda::CUDACachingAllocator::emptyCache();
    // LibTorch takes no pool again whose last graph is gone, while tensors are left in it.
    auto pool = pool_.lock();
    if (!pool) pool = std::make_shared<const c10::MempoolId_t>(at::cuda::graph_pool_handle());
    pool_ = pool;
    auto result = std::make_unique<CudaStepGraph>(pool);
    // Other threads (loaders, writers of checkpoints) may go on with calls that wait.
    result->graph.capture_begin(*pool, cudaStreamCaptureModeThreadLocal);
    try {
      body();
    } catch (...) {
      result->graph.give_up();
      throw;
    }
    try {
      result->graph.capture_end();
    } catch (...) {
      result->graph.give_up();
      throw;
    }
    return result;
  }

 private:
  c10::cuda::CUDAStream stream_;
  /// Of the graphs that exist.
  std::weak_ptr<const c10::MempoolId_t> pool_;
};

}  // namespace

std::unique_ptr<state::StepGraphs> make_step_graphs(c10::Device device) {
  return device.is_cuda() ? std::make_unique<CudaStepGraphs>(device) : nullptr;
}

}  // namespace accelerate::detail::cuda
