// accelerate/scheduler_chains.h - several schedulers, one after another or all at once.
//
//     SequentialLR schedule(optimizer, {
//         .schedulers = {LinearLR(optimizer, {.start_factor = 0.1, .total_iters = 10}),
//                        CosineAnnealingLR(optimizer, {.t_max = 90})},
//         .milestones = {10},
//     });
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/lr_scheduler.h"

namespace accelerate {

namespace detail {

template <class T>
concept SchedulerToOwn = !std::is_lvalue_reference_v<T> && std::derived_from<T, LRScheduler>;
template <class T>
concept SchedulerToHold = SchedulerToOwn<T> || std::convertible_to<T, std::shared_ptr<LRScheduler>>;

/// An item of a list in braces.
class HeldScheduler {
 public:
  template <SchedulerToHold T>
  HeldScheduler(T&& scheduler) {  // NOLINT(google-explicit-constructor)
    if constexpr (SchedulerToOwn<T>) {
      pointer_ = std::make_shared<T>(std::move(scheduler));
    } else {
      pointer_ = std::forward<T>(scheduler);
    }
  }
  [[nodiscard]] const std::shared_ptr<LRScheduler>& pointer() const { return pointer_; }

 private:
  std::shared_ptr<LRScheduler> pointer_;
};

}  // namespace detail

/// Schedulers in order: moved in, or shared by pointer. In braces they are made from left to right.
class ACCELERATE_API SchedulerList {
 public:
  using Pointers = std::vector<std::shared_ptr<LRScheduler>>;

  // NOLINTBEGIN(google-explicit-constructor): `.schedulers = {LinearLR(...), StepLR(...)}`
  SchedulerList() = default;
  SchedulerList(Pointers schedulers) : schedulers_(std::move(schedulers)) {}
  SchedulerList(std::initializer_list<detail::HeldScheduler> schedulers) {
    for (const auto& scheduler : schedulers) schedulers_.push_back(scheduler.pointer());
  }
  // NOLINTEND(google-explicit-constructor)

  [[nodiscard]] const Pointers& schedulers() const& { return schedulers_; }
  [[nodiscard]] Pointers schedulers() && { return std::move(schedulers_); }

 private:
  Pointers schedulers_;
};

struct SequentialLROptions {
  SchedulerList schedulers = {};
  /// At which step each of the others takes over; one less than schedulers, rising.
  std::vector<std::int64_t> milestones = {};
  std::int64_t last_epoch = -1;
};

/// One scheduler after another, each with epochs of its own.
///
/// The learning rates go back to the initial ones, and the first scheduler begins anew.
class ACCELERATE_API SequentialLR : public LRScheduler {
 public:
  /// Throws `ArgumentError` for no scheduler, one of another optimizer, a `ReduceLROnPlateau`, and
  /// milestones that do not fit.
  SequentialLR(torch::optim::Optimizer& optimizer, SequentialLROptions options);

  /// Throws `UnsupportedError` where a milestone begins with schedulers that hold others.
  void step() override;
  [[nodiscard]] std::int64_t step_count() const override { return last_epoch() + 1; }
  void rebind(torch::optim::Optimizer& optimizer) override;

  [[nodiscard]] const SchedulerList::Pointers& schedulers() const { return schedulers_; }
  [[nodiscard]] const std::vector<std::int64_t>& milestones() const { return milestones_; }

 protected:
  [[nodiscard]] std::vector<double> get_lr() override;
  void write_state(Value::Dict& state) const override;
  void read_state(const Value::Dict& state) override;

 private:
  void undo_initial_step() override;

  SchedulerList::Pointers schedulers_;
  std::vector<std::int64_t> milestones_;
};

/// All schedulers at each step, in order.
class ACCELERATE_API ChainedScheduler : public LRScheduler {
 public:
  /// Throws `ArgumentError` for no scheduler, for several optimizers and for a `ReduceLROnPlateau`.
  explicit ChainedScheduler(SchedulerList schedulers);
  /// The same, and the optimizer must be this one.
  ChainedScheduler(SchedulerList schedulers, torch::optim::Optimizer& optimizer);

  /// Where one of them throws, those before it have made their step.
  void step() override;
  /// Those of the first scheduler.
  [[nodiscard]] std::int64_t last_epoch() const override;
  [[nodiscard]] std::int64_t step_count() const override;
  void rebind(torch::optim::Optimizer& optimizer) override;

  [[nodiscard]] const SchedulerList::Pointers& schedulers() const { return schedulers_; }

 protected:
  [[nodiscard]] std::vector<double> get_lr() override;
  void write_state(Value::Dict& state) const override;
  void read_state(const Value::Dict& state) override;

 private:
  void undo_initial_step() override;

  SchedulerList::Pointers schedulers_;
};

}  // namespace accelerate
