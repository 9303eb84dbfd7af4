// accelerate/lr_scheduler.h - what all learning-rate schedulers have in common.
//
// Schedulers are those of torch.optim.lr_scheduler, with their names, recurrences and states. They
// set the learning rate of each parameter group of an optimizer of LibTorch. To write your own,
// derive, say in `get_lr` what comes next, and end your constructor with `initialize()`:
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

namespace detail {
struct GroupMemory;
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
  /// One number for each of `groups`. Throws `ArgumentError`, with `name`, for a list of another
  /// length and where nothing was set.
  [[nodiscard]] std::vector<double> expand(std::string_view name, std::size_t groups) const;

  bool operator==(const PerGroup&) const = default;

 private:
  std::vector<double> values_;
  bool is_list_ = false;
};

/// Sets the learning rates of an optimizer, step by step.
///
/// The optimizer must outlive the scheduler or be replaced by `rebind`. As in Python, the first
/// scheduler of an optimizer notes the initial learning rates, and later ones start from these too.
/// Parity: a learning rate that is set by hand in between counts as a new initial one.
class ACCELERATE_API LRScheduler {
 public:
  virtual ~LRScheduler();
  LRScheduler(const LRScheduler&) = delete;
  LRScheduler& operator=(const LRScheduler&) = delete;

  /// Sets the learning rates of the next epoch or batch. Call it after the optimizer's step. Where
  /// it throws, no learning rate has changed.
  virtual void step();

  /// The index of the current epoch: 0 after construction, one more with each step.
  [[nodiscard]] virtual std::int64_t last_epoch() const { return last_epoch_; }
  /// How many steps there were, the one of construction included.
  [[nodiscard]] virtual std::int64_t step_count() const { return step_count_; }
  /// After how many steps the schedule is over, where it must not go on: `OneCycleLR`.
  [[nodiscard]] virtual std::optional<std::int64_t> total_steps() const { return std::nullopt; }
  /// The learning rates that the last step set, one for each parameter group.
  [[nodiscard]] const std::vector<double>& get_last_lr() const { return last_lr_; }
  /// The learning rates that the schedule starts from.
  [[nodiscard]] const std::vector<double>& base_lrs() const { return base_lrs_; }

  /// A dict with the keys of Python's state_dict().
  [[nodiscard]] Value state_dict() const;
  /// Takes over a state of ours or of Python's. Keys that are not needed are passed over, functions
  /// stay those of the program, and the optimizer is not touched: load its state too.
  /// Throws `ArgumentError` for what does not fit, and has then changed nothing.
  void load_state_dict(const Value& state);

  [[nodiscard]] torch::optim::Optimizer& optimizer() const { return *optimizer_; }
  /// Goes on with `optimizer`: the old one at another address, or one with as many groups.
  /// Its learning rates stay as they are until the next step. The old one is not looked at.
  /// Throws `ArgumentError` where groups are missing.
  virtual void rebind(torch::optim::Optimizer& optimizer);

  /// For this library: counts a step that is not made (`adjust_scheduler`).
  void _count_step() { ++step_count_; }

 protected:
  explicit LRScheduler(torch::optim::Optimizer& optimizer);
  LRScheduler(LRScheduler&&) noexcept;
  LRScheduler& operator=(LRScheduler&&) noexcept;

  /// Notes the initial learning rates and performs the first step. The last thing a constructor
  /// does. A `last_epoch` other than -1 goes on after that epoch, and throws `ArgumentError` where
  /// no earlier scheduler noted initial learning rates.
  void initialize(std::int64_t last_epoch = -1);

  /// The learning rates of `last_epoch()`, usually made from those that the groups have now.
  [[nodiscard]] virtual std::vector<double> get_lr() = 0;
  /// The same from `base_lrs()` alone, where there is such a formula. `SequentialLR` begins with
  /// it.
  [[nodiscard]] virtual std::optional<std::vector<double>> get_closed_form_lr() const;
  /// Whether this is the step of construction.
  [[nodiscard]] bool is_initial() const { return is_initial_; }

  /// What the class adds to the state: write your keys and call that of the base.
  virtual void write_state(Value::Dict& state) const;
  /// May throw in the middle; `load_state_dict` then restores.
  virtual void read_state(const Value::Dict& state);

  [[nodiscard]] std::size_t group_count() const { return optimizer_->param_groups().size(); }
  /// The learning rates that the groups have now.
  [[nodiscard]] std::vector<double> group_lrs() const;
  /// Throws `StateError` unless there is one for each group.
  void set_group_lrs(const std::vector<double>& lrs);

 private:
  friend class ChainedScheduler;
  friend class CosineAnnealingWarmRestarts;
  friend class CyclicLR;
  friend class OneCycleLR;
  friend class ReduceLROnPlateau;
  friend class SequentialLR;

  /// Moves to `epoch`, by the closed form where there is one, or to the next one.
  void update_lr(std::optional<std::int64_t> epoch = std::nullopt);
  /// The step of construction, which SequentialLR repeats.
  void initial_step();
  /// Takes back the epoch of the initial step.
  virtual void undo_initial_step() { --last_epoch_; }
  /// What schedulers note about a group.
  [[nodiscard]] detail::GroupMemory& memory(std::size_t group);

  torch::optim::Optimizer* optimizer_;
  std::vector<std::shared_ptr<detail::GroupMemory>> memory_;
  std::vector<double> base_lrs_;
  std::vector<double> last_lr_;
  std::int64_t last_epoch_ = -1;
  std::int64_t step_count_ = 0;
  bool is_initial_ = false;
};

}  // namespace accelerate
