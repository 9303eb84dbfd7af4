// accelerate/scheduler/lr_scheduler.h - the base class of all learning-rate schedulers.
//
// Part of accelerate/scheduler.h. The schedulers are those of torch.optim.lr_scheduler, with their
// names, recurrences and states. They set the learning rate of each parameter group of an
// optimizer. To write your own, derive from `LRScheduler`, return the next learning rates from
// `get_lr`, and end your constructor with `initialize()`:
//
//     class Halving : public LRScheduler {
//      public:
//       explicit Halving(torch::optim::Optimizer& optimizer) : LRScheduler(optimizer) {
//         initialize();
//       }
//
//      protected:
//       std::vector<double> get_lr() override {
//         auto lrs = group_lrs();
//         if (!is_initial()) for (auto& lr : lrs) lr /= 2;
//         return lrs;
//       }
//     };
#pragma once

#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/value.h"

namespace accelerate {

namespace detail::optim {
struct GroupSchedule;
}

/// An option that is one number for all parameter groups, or a list with one for each.
class ACCELERATE_API PerGroup {
 public:
  // NOLINTBEGIN(google-explicit-constructor): `.max_lr = 0.1` and `.max_lr = {0.1, 0.2}`
  PerGroup() = default;
  PerGroup(double number) : values_{number} {}
  PerGroup(std::initializer_list<double> list) : values_(list), is_list_(true) {}
  PerGroup(std::vector<double> list) : values_(std::move(list)), is_list_(true) {}
  // NOLINTEND(google-explicit-constructor)

  [[nodiscard]] bool is_set() const noexcept { return is_list_ || !values_.empty(); }
  [[nodiscard]] bool is_list() const noexcept { return is_list_; }
  /// One number for each of `groups`. Throws `ArgumentError` that contains `name` for a list of
  /// another length and if nothing was set.
  [[nodiscard]] std::vector<double> expand(std::string_view name, std::size_t groups) const;

  bool operator==(const PerGroup&) const = default;

 private:
  std::vector<double> values_;
  bool is_list_ = false;
};

/// Sets the learning rates of an optimizer, step by step.
///
/// The optimizer must outlive the scheduler or be replaced by `rebind`. As in Python, the first
/// scheduler of an optimizer keeps the initial learning rates, and later ones start from these too.
/// Parity: an optimizer of torch::optim loses them with its last scheduler.
class ACCELERATE_API LRScheduler {
 public:
  virtual ~LRScheduler();
  LRScheduler(const LRScheduler&) = delete;
  LRScheduler& operator=(const LRScheduler&) = delete;

  /// Sets the learning rates of the next epoch or batch. Call it after the optimizer's step. If it
  /// throws, no learning rate has changed.
  virtual void step();

  /// The index of the current epoch: 0 after construction, one more with each step.
  [[nodiscard]] virtual std::int64_t last_epoch() const { return last_epoch_; }
  /// The number of steps, including the one of the constructor.
  [[nodiscard]] virtual std::int64_t step_count() const { return step_count_; }
  /// The number of steps after which `step` throws (`OneCycleLR`); nullopt if there is no limit.
  [[nodiscard]] virtual std::optional<std::int64_t> total_steps() const { return std::nullopt; }
  /// The learning rates that the last step set, one for each parameter group.
  [[nodiscard]] const std::vector<double>& get_last_lr() const { return last_lr_; }
  /// The learning rates that the schedule starts from.
  [[nodiscard]] const std::vector<double>& base_lrs() const { return base_lrs_; }

  /// A dict with the keys of Python's state_dict().
  [[nodiscard]] Value state_dict() const;
  /// Loads a state of ours or of Python's. Ignores unknown keys, keeps the program's functions and
  /// does not change the optimizer: load its state too.
  /// Throws `ArgumentError` for a state that does not fit; nothing has changed then.
  void load_state_dict(const Value& state);

  [[nodiscard]] torch::optim::Optimizer& optimizer() const { return *optimizer_; }
  /// Continues with `optimizer`: the old one at another address, or one with as many groups. Does
  /// not access the old one and keeps the learning rates until the next step.
  /// Throws `ArgumentError` if `optimizer` has fewer groups.
  virtual void rebind(torch::optim::Optimizer& optimizer);

  /// For this library: counts a step without performing it (`adjust_scheduler`).
  void _count_step() { ++step_count_; }

 protected:
  explicit LRScheduler(torch::optim::Optimizer& optimizer);
  LRScheduler(LRScheduler&&) noexcept;
  LRScheduler& operator=(LRScheduler&&) noexcept;

  /// Keeps the initial learning rates and performs the first step; the last call of a constructor.
  /// A `last_epoch` other than -1 continues after that epoch, and throws `ArgumentError` if no
  /// earlier scheduler has kept initial learning rates.
  void initialize(std::int64_t last_epoch = -1);

  /// The learning rates of `last_epoch()`, usually computed from the current ones.
  [[nodiscard]] virtual std::vector<double> get_lr() = 0;
  /// The learning rates of `last_epoch()` computed from `base_lrs()` only; nullopt if there is no
  /// such formula. `SequentialLR` uses it when a scheduler begins at a milestone.
  [[nodiscard]] virtual std::optional<std::vector<double>> get_closed_form_lr() const;
  /// Whether the current step is the one of the constructor.
  [[nodiscard]] bool is_initial() const { return is_initial_; }

  /// Writes the state: set the keys of your class and call the function of the base.
  virtual void write_state(Value::Dict& state) const;
  /// Reads the state. May throw at any point; `load_state_dict` restores the old state then.
  virtual void read_state(const Value::Dict& state);

  [[nodiscard]] std::size_t group_count() const { return optimizer_->param_groups().size(); }
  /// The current learning rates of the groups.
  [[nodiscard]] std::vector<double> group_lrs() const;
  /// Throws `StateError` unless there is one for each group.
  void set_group_lrs(const std::vector<double>& lrs);

 private:
  friend class SchedulerChain;
  friend class ChainedScheduler;
  friend class CosineAnnealingWarmRestarts;
  friend class CyclicLR;
  friend class OneCycleLR;
  friend class ReduceLROnPlateau;
  friend class SequentialLR;

  /// Goes to `epoch`, by the closed form if there is one; nullopt means the next epoch.
  void update_lr(std::optional<std::int64_t> epoch = std::nullopt);
  /// The step of the constructor, which `SequentialLR` repeats.
  void initial_step();
  /// Reverts the epoch of the initial step.
  virtual void undo_initial_step() { --last_epoch_; }
  /// The numbers that schedulers keep with a group.
  [[nodiscard]] detail::optim::GroupSchedule& schedule(std::size_t group);

  torch::optim::Optimizer* optimizer_;
  std::vector<std::shared_ptr<detail::optim::GroupSchedule>> schedules_;
  std::vector<double> base_lrs_;
  std::vector<double> last_lr_;
  std::int64_t last_epoch_ = -1;
  std::int64_t step_count_ = 0;
  bool is_initial_ = false;
};

}  // namespace accelerate
