#include "accelerate/scheduler/accelerated_scheduler.h"

#include <algorithm>
#include <utility>

#include "accelerate/detail/core/refuse_empty.h"
#include "accelerate/errors.h"
#include "optim/scheduler_core.h"
#include "state/step_recording.h"

namespace accelerate {

namespace detail::optim {
namespace {

thread_local int prepared_steps = 0;

}  // namespace

PreparedStep::PreparedStep() noexcept { ++prepared_steps; }
PreparedStep::~PreparedStep() { --prepared_steps; }
bool PreparedStep::runs() noexcept { return prepared_steps > 0; }

}  // namespace detail::optim

using detail::optim::SchedulerCore;

namespace {

/// Whether the scheduler steps with this batch: if all its optimizers do.
bool is_due(const SchedulerCore& core) {
  if (!core.step_with_optimizer) return true;
  if (!core.gradient_state.sync_gradients()) return false;
  return std::ranges::none_of(core.optimizers,
                              [](const auto& one) { return one->step_was_skipped; });
}

}  // namespace

AcceleratedScheduler::AcceleratedScheduler(std::shared_ptr<SchedulerCore> core)
    : core_(std::move(core)) {}

SchedulerCore& AcceleratedScheduler::core() const {
  if (!core_) detail::refuse_empty("scheduler");
  return *core_;
}

void AcceleratedScheduler::step() {
  auto& own = core();
  if (auto* const recording = detail::state::StepRecording::current()) {
    return recording->after_replay([shared = core_] { AcceleratedScheduler(shared).step(); });
  }
  if (own.stepped_in_backward) return;
  if (const auto first = std::exchange(own.before_first_step, {})) first();
  const detail::optim::PreparedStep prepared;
  if (own.parts.step_with_metric) {
    throw ArgumentError("step: this scheduler needs a metric. Call step(metric).");
  }
  LRScheduler* const ours = own.parts.ours;
  if (!is_due(own)) {
    const bool counts = own.gradient_state.adjust_scheduler();
    if (counts && ours != nullptr && !own.gradient_state.sync_gradients()) ours->_count_step();
    return;
  }
  const int steps = own.step_with_optimizer ? own.steps_per_call : 1;
  for (int i = 0; i < steps; ++i) {
    if (own.step_with_optimizer && own.ends_quietly && ours != nullptr) {
      // Not step_count(): `adjust_scheduler` counts there what no step was made for.
      const auto total = ours->total_steps();
      if (total && ours->last_epoch() >= *total) return;
    }
    own.parts.step();
  }
}

void AcceleratedScheduler::step(double metric) {
  auto& own = core();
  if (detail::state::StepRecording::current() != nullptr) {
    throw UnsupportedError("step(metric) of a scheduler reads a number on the host");
  }
  if (!own.parts.step_with_metric) {
    throw ArgumentError("step(metric): this scheduler takes no metric. Call step().");
  }
  if (is_due(own)) own.parts.step_with_metric(metric);
}

void AcceleratedScheduler::step(const at::Tensor& metric) { step(metric.item<double>()); }

LRScheduler& AcceleratedScheduler::scheduler() const {
  if (auto* ours = core().parts.ours) return *ours;
  throw UnsupportedError(
      "A scheduler of LibTorch does not expose its state. Use the one of the same name in "
      "accelerate/scheduler.h.");
}

const std::vector<double>& AcceleratedScheduler::get_last_lr() const {
  return scheduler().get_last_lr();
}
Value AcceleratedScheduler::state_dict() const { return scheduler().state_dict(); }
void AcceleratedScheduler::load_state_dict(const Value& state) {
  scheduler().load_state_dict(state);
}

}  // namespace accelerate
