// Not run on a GPU yet: compiled only. tests/cuda/capture_test.cpp is what to run first.
#include "step_graphs.h"

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <exception>

namespace accelerate::detail::cuda {
namespace {

class CudaStepGraph final : public state::StepGraph {
 public:
  void replay() override { graph.replay(); }

  at::cuda::CUDAGraph graph;
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
      : stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())),
        pool_(at::cuda::graph_pool_handle()) {}

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
    auto result = std::make_unique<CudaStepGraph>();
    // Other threads (loaders, writers of checkpoints) may go on with calls that wait.
    result->graph.capture_begin(pool_, cudaStreamCaptureModeThreadLocal);
    try {
      body();
    } catch (...) {
      try {
        result->graph.capture_end();
      } catch (const std::exception&) {  // the first error counts; this one says that it is invalid
        static_cast<void>(cudaGetLastError());
      }
      throw;
    }
    result->graph.capture_end();
    return result;
  }

 private:
  c10::cuda::CUDAStream stream_;
  c10::MempoolId_t pool_;
};

}  // namespace

std::unique_ptr<state::StepGraphs> make_step_graphs(c10::Device device) {
  return device.is_cuda() ? std::make_unique<CudaStepGraphs>(device) : nullptr;
}

}  // namespace accelerate::detail::cuda
