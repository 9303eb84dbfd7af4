#include "nccl_group.h"

#include <ATen/cuda/CUDAGraphsUtils.cuh>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "comm/guarded_backend.h"

namespace accelerate::detail::cuda {
namespace {

using Nccl = c10d::ProcessGroupNCCL;

/// "" when the collective is complete.
std::string problem_of(const c10::ivalue::Future& result) {
  if (result.hasError()) return result.tryRetrieveErrorMessage();
  switch (static_cast<c10d::WorkResult>(result.constValue().toInt())) {
    case c10d::WorkResult::SUCCESS:
      return "";
    case c10d::WorkResult::TIMEOUT:
      return "NCCL has waited for the full timeout";
    default:
      return "NCCL reports an error, printed above";
  }
}

/// NCCL with a guard. A collective runs on the device, so nothing fails here: c10d's watchdog
/// reports when one is complete, and if one never can be, the guard ends the process.
class GuardedNccl : public comm::GuardedBackend<Nccl> {
 public:
  GuardedNccl(const c10::intrusive_ptr<c10d::Store>& store,
              const state::ProcessGroupOptions& options, const c10::intrusive_ptr<Options>& nccl,
              std::shared_ptr<comm::DeviceCallGuard> guard)
      : GuardedBackend(store, options.rank, options.world_size, nccl), guard_(std::move(guard)) {}

  /// Also reports how long each collective took on the device.
  void enableCollectivesTiming() override {
    if (timed_.exchange(true)) return;
    GuardedBackend::enableCollectivesTiming();
    registerOnCompletionHook([guard = guard_](const std::shared_ptr<c10d::WorkInfo>& ended) {
      guard->add_time(std::chrono::duration_cast<std::chrono::nanoseconds>(ended->activeDuration));
    });
  }
  void startCoalescing() override {
    // NCCL implements some collectives by several, which are part of one call.
    if (inside_ == this) return GuardedBackend::startCoalescing();
    {
      const std::scoped_lock lock(mutex_);
      several_ = comm::CallFactsBuilder{.kind = "several at once"};
    }
    GuardedBackend::startCoalescing();
  }
  WorkPtr endCoalescing() override {
    std::optional<comm::CallFactsBuilder> several;
    {
      const std::scoped_lock lock(mutex_);
      several.swap(several_);
    }
    const auto call = several ? several->facts() : comm::CallFacts{.kind = "several at once"};
    return start_guarded(call, [&] { return GuardedBackend::endCoalescing(); });
  }

 private:
  WorkPtr start_guarded(const comm::CallFacts& call, c10::function_ref<WorkPtr()> start) override {
    // NCCL implements some collectives by others, which are part of this call.
    if (inside_ == this) return start();
    const std::scoped_lock lock(mutex_);
    if (several_) {  // one call, announced at its end
      several_->add(call);
      return start();
    }
    auto facts = call;
    facts.on_device = true;
    const auto ticket = guard_->enter(facts);
    // The first call connects the ranks, and waits for them here.
    guard_->end_process_on_failure(ticket);
    WorkPtr work;
    inside_ = this;
    try {
      work = start();
      inside_ = nullptr;
    } catch (...) {
      inside_ = nullptr;
      guard_->leave(ticket);
      throw;
    }
    // A recorded call of a graph is not under way, and the watchdog never reports it. A call on the
    // stream of the program (asyncOp off) returns no work.
    const bool recorded =
        at::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
    if (!work || recorded) {
      guard_->leave(ticket);
      return work;
    }
    work->getFutureResult()->addCallback(
        [guard = guard_, ticket](c10::ivalue::Future& result) {
          if (const auto problem = problem_of(result); !problem.empty()) {
            return guard->transport_failed(ticket, problem);
          }
          guard->leave(ticket);
        },
        /*uses_future=*/false);
    return work;
  }

  static thread_local const GuardedNccl* inside_;

  std::shared_ptr<comm::DeviceCallGuard> guard_;
  std::atomic<bool> timed_{false};
  std::mutex mutex_;
  std::optional<comm::CallFactsBuilder> several_;  // the calls since startCoalescing
};

thread_local const GuardedNccl* GuardedNccl::inside_ = nullptr;

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_nccl_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                  const state::ProcessGroupOptions& options,
                                                  std::shared_ptr<comm::DeviceCallGuard> guard) {
  auto nccl = Nccl::Options::create();
  nccl->timeout = options.timeout;
  auto group = c10::make_intrusive<GuardedNccl>(store, options, nccl, guard);
  // Bound to its device, so that barriers need not guess which GPU is meant.
  group->setBoundDeviceId(options.device);
  // After a failure NCCL's destructor would wait for work that never completes: leak the object.
  guard->when_failed(
      [weak = c10::weak_intrusive_ptr<GuardedNccl>(group)] { (void)weak.lock().release(); });
  // A kernel that waits for a rank keeps the device, and CUDA waits for it when the process ends.
  guard->before_throw([weak = c10::weak_intrusive_ptr<GuardedNccl>(group)] {
    if (const auto failed = weak.lock()) failed->abort();
  });
  return group;
}

}  // namespace accelerate::detail::cuda
