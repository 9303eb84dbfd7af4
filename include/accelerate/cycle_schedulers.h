// accelerate/cycle_schedulers.h - learning rates that go up and down, some with the momentum.
//
//     OneCycleLR schedule(optimizer, {.max_lr = 0.1, .total_steps = 1000});
//     CyclicLR triangles(optimizer, {.base_lr = 0.001, .max_lr = {0.1, 0.2}, .step_size_up = 50});
//
// Where the momentum is cycled, it is that of the optimizer (SGD, RMSprop) or its first beta (Adam,
// AdamW).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/enums.h"
#include "accelerate/lr_scheduler.h"

namespace accelerate {

struct CosineAnnealingWarmRestartsOptions {
  /// Must be set: the epochs of the first cosine.
  std::int64_t t_0 = 0;
  /// How much longer each cosine is than the one before.
  std::int64_t t_mult = 1;
  double eta_min = 0.0;
  std::int64_t last_epoch = -1;
};

/// A cosine from the initial learning rate down to `eta_min`, again and again.
/// As in Python, `step_count()` stays 0.
class ACCELERATE_API CosineAnnealingWarmRestarts : public LRScheduler {
 public:
  CosineAnnealingWarmRestarts(torch::optim::Optimizer& optimizer,
                              const CosineAnnealingWarmRestartsOptions& options);

  void step() override;
  /// Goes to an epoch, which may lie between two: `step(epoch + batch / batches)`.
  void step(double epoch);

 protected:
  [[nodiscard]] std::vector<double> get_lr() override;
  void write_state(Value::Dict& state) const override;
  void read_state(const Value::Dict& state) override;

 private:
  void go_to(std::int64_t epoch);

  std::int64_t t_0_;
  std::int64_t t_i_;
  std::int64_t t_mult_;
  double eta_min_;
  double t_cur_;
};

/// How a part of `OneCycleLR` goes from its start to its end.
enum class AnnealStrategy : std::uint8_t { kCos, kLinear };

struct OneCycleLROptions {
  /// Must be set.
  PerGroup max_lr = {};
  /// The number of steps; or `epochs` and `steps_per_epoch`.
  std::optional<std::int64_t> total_steps = std::nullopt;
  std::optional<std::int64_t> epochs = std::nullopt;
  std::optional<std::int64_t> steps_per_epoch = std::nullopt;
  /// The part of the steps in which the learning rate rises.
  double pct_start = 0.3;
  AnnealStrategy anneal_strategy = AnnealStrategy::kCos;
  bool cycle_momentum = true;
  PerGroup base_momentum = 0.85;
  PerGroup max_momentum = 0.95;
  /// The schedule starts with `max_lr / div_factor`,
  double div_factor = 25.0;
  /// and ends with that divided by `final_div_factor`.
  double final_div_factor = 1e4;
  /// Down again as long as up, and then to the end.
  bool three_phase = false;
  std::int64_t last_epoch = -1;
};

/// Up to `max_lr` and down far below the start, once.
class ACCELERATE_API OneCycleLR : public LRScheduler {
 public:
  /// Throws `ArgumentError` also for an optimizer without momentum where it shall be cycled.
  OneCycleLR(torch::optim::Optimizer& optimizer, const OneCycleLROptions& options);

  [[nodiscard]] std::optional<std::int64_t> total_steps() const override { return total_steps_; }

 protected:
  /// Throws `StateError` beyond `total_steps()`.
  [[nodiscard]] std::vector<double> get_lr() override;
  void write_state(Value::Dict& state) const override;
  void read_state(const Value::Dict& state) override;

 private:
  /// Names of what is noted about a group: 'initial_lr', 'max_momentum'.
  struct Phase {
    double end_step = 0;
    std::string start_lr, end_lr, start_momentum, end_momentum;
  };

  void make_phases(double pct_start, bool three_phase);
  void set_limits(const OneCycleLROptions& options);
  [[nodiscard]] double anneal(double start, double end, double pct) const;

  std::int64_t total_steps_ = 0;
  std::vector<Phase> phases_;
  AnnealStrategy anneal_strategy_;
  bool cycle_momentum_;
};

/// Cycles of equal height, of half the height each time, or of height `gamma ** iterations`.
enum class CyclicMode : std::uint8_t { kTriangular, kTriangular2, kExpRange };
/// What a scale function is asked with.
enum class CyclicScaleMode : std::uint8_t { kCycle, kIterations };

struct CyclicLROptions {
  /// Must be set; they become the learning rates.
  PerGroup base_lr = {};
  /// Must be set.
  PerGroup max_lr = {};
  std::int64_t step_size_up = 2000;
  /// As many steps as up where not set.
  std::optional<std::int64_t> step_size_down = std::nullopt;
  CyclicMode mode = CyclicMode::kTriangular;
  double gamma = 1.0;
  /// Takes the place of `mode`: the height of a cycle (from 1) or step (from 0), 1 being all of it.
  std::function<double(double)> scale_fn = {};
  /// Only for `scale_fn`.
  CyclicScaleMode scale_mode = CyclicScaleMode::kCycle;
  bool cycle_momentum = true;
  PerGroup base_momentum = 0.8;
  PerGroup max_momentum = 0.9;
  std::int64_t last_epoch = -1;
};

/// Up and down between `base_lr` and `max_lr`, in straight lines.
class ACCELERATE_API CyclicLR : public LRScheduler {
 public:
  /// Throws `ArgumentError` also for an optimizer without momentum where it shall be cycled.
  CyclicLR(torch::optim::Optimizer& optimizer, const CyclicLROptions& options);

 protected:
  [[nodiscard]] std::vector<double> get_lr() override;
  void write_state(Value::Dict& state) const override;
  void read_state(const Value::Dict& state) override;

 private:
  void choose_scale_mode();
  [[nodiscard]] double scale(double x) const;

  std::vector<double> max_lrs_;
  double total_size_;
  double step_ratio_;
  CyclicMode mode_;
  double gamma_;
  std::function<double(double)> scale_fn_;
  CyclicScaleMode scale_mode_;
  bool cycle_momentum_;
  std::vector<double> base_momentums_;
  std::vector<double> max_momentums_;
};

namespace detail {
// clang-format off
template <> inline constexpr EnumTable kEnumTable<AnnealStrategy>{"AnnealStrategy", {"cos", "linear"}};
template <> inline constexpr EnumTable kEnumTable<CyclicMode>{"CyclicMode",
    {"triangular", "triangular2", "exp_range"}};
template <> inline constexpr EnumTable kEnumTable<CyclicScaleMode>{"CyclicScaleMode",
    {"cycle", "iterations"}};
// clang-format on
}  // namespace detail

}  // namespace accelerate
