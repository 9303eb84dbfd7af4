// accelerate/scheduler/accelerated_scheduler.h - a scheduler prepared by `Accelerator::prepare`.
//
// Part of accelerate/scheduler.h.
#pragma once

#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/optimizer.h"
#include "accelerate/scheduler/lr_scheduler.h"
#include "accelerate/scheduler/reduce_lr_on_plateau.h"
#include "accelerate/value.h"

namespace accelerate {

namespace detail::optim {

struct SchedulerCore;

/// A scheduler of ours or of LibTorch behind one interface.
struct SchedulerParts {
  /// Owns the scheduler that the others refer to.
  std::shared_ptr<void> keeper = nullptr;
  /// Null for a scheduler of LibTorch, which does not expose its state.
  LRScheduler* ours = nullptr;
  std::function<void()> step = {};
  /// Set only for a scheduler that steps with a metric.
  std::function<void(double)> step_with_metric = {};
};

}  // namespace detail::optim

/// Python's `AcceleratedScheduler`: steps when the optimizer has stepped. Each process sees only a
/// part of the batches, so one call makes as many steps as there are processes, and a schedule ends
/// after the same number of samples as with one process. One call is one step with `split_batches`
/// and with `AcceleratorOptions::step_scheduler_per_process = false`. Copies are handles to the
/// same scheduler.
class ACCELERATE_API AcceleratedScheduler {
 public:
  /// An empty handle. Its functions throw `StateError`.
  AcceleratedScheduler() = default;
  /// For this library.
  explicit AcceleratedScheduler(std::shared_ptr<detail::optim::SchedulerCore> core);

  /// Does nothing while gradients are accumulated and after a skipped optimizer step. With
  /// `step_scheduler_with_optimizer = false` it always makes one step.
  void step();
  /// `step` for a scheduler that needs a metric; makes one step for any number of processes. Throws
  /// `ArgumentError` for other schedulers. All processes must pass the same metric.
  void step(double metric);
  void step(const at::Tensor& metric);

  // These throw `UnsupportedError` for a scheduler of LibTorch, which does not expose its state.
  [[nodiscard]] const std::vector<double>& get_last_lr() const;
  [[nodiscard]] Value state_dict() const;
  void load_state_dict(const Value& state);
  /// The scheduler that was prepared.
  [[nodiscard]] LRScheduler& scheduler() const;

  explicit operator bool() const noexcept { return core_ != nullptr; }
  void reset() noexcept { core_.reset(); }
  /// For this library.
  [[nodiscard]] const std::shared_ptr<detail::optim::SchedulerCore>& _core() const { return core_; }

 private:
  [[nodiscard]] detail::optim::SchedulerCore& core() const;

  std::shared_ptr<detail::optim::SchedulerCore> core_;
};

namespace detail::optim {

template <class T>
concept LibTorchScheduler = std::derived_from<T, torch::optim::LRScheduler> ||
                            std::derived_from<T, torch::optim::ReduceLROnPlateauScheduler>;
template <class T>
concept AnyScheduler = std::derived_from<T, LRScheduler> || LibTorchScheduler<T>;

template <AnyScheduler S>
SchedulerParts scheduler_parts(std::shared_ptr<S> scheduler) {
  SchedulerParts parts;
  if (!scheduler) return parts;
  S* const it = scheduler.get();
  parts.keeper = std::move(scheduler);
  if constexpr (std::derived_from<S, LRScheduler>) parts.ours = it;
  if constexpr (requires { it->step(0.0); }) {
    parts.step_with_metric = [it](double metric) { it->step(metric); };
  } else if constexpr (std::same_as<S, LRScheduler>) {
    if (auto* plateau = dynamic_cast<ReduceLROnPlateau*>(it)) {
      parts.step_with_metric = [plateau](double metric) { plateau->step(metric); };
    }
  }
  if constexpr (requires { it->step(); }) parts.step = [it] { it->step(); };
  return parts;
}

}  // namespace detail::optim
}  // namespace accelerate
