// accelerate/scheduler/scheduler_chains.h - several schedulers, one after another or all at each
// step.
//
// Part of accelerate/scheduler.h.
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
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/scheduler/lr_scheduler.h"

namespace accelerate {

namespace detail::optim {

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
      pointer_ = std::make_shared<T>(std::forward<T>(scheduler));
    } else {
      pointer_ = std::forward<T>(scheduler);
    }
  }
  [[nodiscard]] const std::shared_ptr<LRScheduler>& pointer() const { return pointer_; }

 private:
  std::shared_ptr<LRScheduler> pointer_;
};

}  // namespace detail::optim

/// Schedulers in order: moved in, or shared by pointer. A list in braces is evaluated from left to
/// right.
class ACCELERATE_API SchedulerList {
 public:
  using Pointers = std::vector<std::shared_ptr<LRScheduler>>;

  // NOLINTBEGIN(google-explicit-constructor): `.schedulers = {LinearLR(...), StepLR(...)}`
  SchedulerList() = default;
  SchedulerList(Pointers schedulers) : schedulers_(std::move(schedulers)) {}
  SchedulerList(std::initializer_list<detail::optim::HeldScheduler> schedulers) {
    for (const auto& scheduler : schedulers) schedulers_.push_back(scheduler.pointer());
  }
  // NOLINTEND(google-explicit-constructor)

  [[nodiscard]] const Pointers& schedulers() const& { return schedulers_; }
  [[nodiscard]] Pointers schedulers() && { return std::move(schedulers_); }

 private:
  Pointers schedulers_;
};

/// Base of the schedulers that hold others.
class ACCELERATE_API SchedulerChain : public LRScheduler {
 public:
  void rebind(torch::optim::Optimizer& optimizer) override;
  [[nodiscard]] const SchedulerList::Pointers& schedulers() const { return schedulers_; }

 protected:
  /// `name` is the class, for errors; its characters must outlive the scheduler. Throws
  /// `ArgumentError` for no scheduler, one of another optimizer and a `ReduceLROnPlateau`.
  SchedulerChain(std::string_view name, torch::optim::Optimizer& optimizer,
                 SchedulerList::Pointers schedulers);

  /// Throws `UnsupportedError`: as in PyTorch, a chain cannot begin at a milestone.
  [[nodiscard]] std::vector<double> get_lr() override;
  /// The schedulers' states, and the step count if a `SequentialLR` began with this chain.
  void write_state(Value::Dict& state) const override;
  void read_state(const Value::Dict& state) override;

 private:
  friend class SequentialLR;
  void undo_initial_step() override;

  std::string_view name_;
  SchedulerList::Pointers schedulers_;
};

struct SequentialLROptions {
  SchedulerList schedulers = {};
  /// The step at which each scheduler but the first takes over, in rising order.
  std::vector<std::int64_t> milestones = {};
  std::int64_t last_epoch = -1;
};

/// One scheduler after another, each with epochs of its own.
///
/// The constructor restores the initial learning rates and repeats the first step of the first
/// scheduler.
class ACCELERATE_API SequentialLR : public SchedulerChain {
 public:
  /// Throws `ArgumentError` like `SchedulerChain`, and for milestones that do not fit.
  SequentialLR(torch::optim::Optimizer& optimizer, SequentialLROptions options);

  /// Throws `UnsupportedError` if a chain of schedulers would begin at a milestone.
  void step() override;
  [[nodiscard]] std::int64_t step_count() const override { return last_epoch() + 1; }

  [[nodiscard]] const std::vector<std::int64_t>& milestones() const { return milestones_; }

 protected:
  void write_state(Value::Dict& state) const override;
  void read_state(const Value::Dict& state) override;

 private:
  std::vector<std::int64_t> milestones_;
};

/// All schedulers at each step, in order.
class ACCELERATE_API ChainedScheduler : public SchedulerChain {
 public:
  /// Throws `ArgumentError` like `SchedulerChain`. The optimizer is that of the first scheduler.
  explicit ChainedScheduler(SchedulerList schedulers);
  ChainedScheduler(SchedulerList schedulers, torch::optim::Optimizer& optimizer);

  /// If one of them throws, those before it have made their step.
  void step() override;
  /// Those of the first scheduler.
  [[nodiscard]] std::int64_t last_epoch() const override;
  [[nodiscard]] std::int64_t step_count() const override;

 protected:
  void write_state(Value::Dict& state) const override;
  void read_state(const Value::Dict& state) override;
};

}  // namespace accelerate
