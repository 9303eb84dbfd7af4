// accelerate/scheduler/cycle_schedulers.h - learning rates that rise and fall, some with the
// momentum.
//
//     OneCycleLR schedule(optimizer, {.max_lr = 0.1, .total_steps = 1000});
//     CyclicLR triangles(optimizer, {.base_lr = 0.001, .max_lr = {0.1, 0.2}, .step_size_up = 50});
//
// Part of accelerate/scheduler.h. The cycled momentum is `momentum` (SGD, RMSprop) or the first of
// `betas` (Adam, AdamW).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/enums.h"
#include "accelerate/scheduler/lr_scheduler.h"

namespace accelerate {

struct CosineAnnealingWarmRestartsOptions {
  /// Must be set: the number of epochs of the first cosine.
  std::int64_t t_0 = 0;
  /// Each cosine is this many times as long as the one before.
  std::int64_t t_mult = 1;
  double eta_min = 0.0;
  std::int64_t last_epoch = -1;
};

/// A cosine from the initial learning rate down to `eta_min`, repeated.
/// As in Python, `step_count()` stays 0.
class ACCELERATE_API CosineAnnealingWarmRestarts : public LRScheduler {
 public:
  CosineAnnealingWarmRestarts(torch::optim::Optimizer& optimizer,
                              const CosineAnnealingWarmRestartsOptions& options);

  void step() override;
  /// Goes to an epoch, which may be fractional: `step(epoch + batch / batches)`.
  void step(double epoch);

 protected:
  [[nodiscard]] std::vector<double> get_lr() override;
  void write_state(Value::Dict& state) const override;
  void read_state(const Value::Dict& state) override;

 private:
  static auto state_fields();
  void go_to(std::int64_t epoch);

  std::int64_t t_0_;
  std::int64_t t_i_;
  std::int64_t t_mult_;
  double eta_min_;
  double t_cur_;
};

/// The curve of a phase of `OneCycleLR`.
enum class AnnealStrategy : std::uint8_t { kCos, kLinear };

namespace detail::optim {
/// A phase of `OneCycleLR`. The texts name numbers of a group: "initial_lr", "max_momentum".
struct OneCyclePhase {
  double end_step = 0;
  std::string start_lr, end_lr, start_momentum, end_momentum;
};
}  // namespace detail::optim

struct OneCycleLROptions {
  /// Must be set.
  PerGroup max_lr = {};
  /// The number of steps; alternatively set `epochs` and `steps_per_epoch`.
  std::optional<std::int64_t> total_steps = std::nullopt;
  std::optional<std::int64_t> epochs = std::nullopt;
  std::optional<std::int64_t> steps_per_epoch = std::nullopt;
  /// The fraction of the steps in which the learning rate rises.
  double pct_start = 0.3;
  AnnealStrategy anneal_strategy = AnnealStrategy::kCos;
  bool cycle_momentum = true;
  PerGroup base_momentum = 0.85;
  PerGroup max_momentum = 0.95;
  /// The schedule starts with `max_lr / div_factor`,
  double div_factor = 25.0;
  /// and ends with that divided by `final_div_factor`.
  double final_div_factor = 1e4;
  /// Fall to the initial learning rate in as many steps as it rose, then to the final one.
  bool three_phase = false;
  std::int64_t last_epoch = -1;
};

/// Rises to `max_lr` once and falls far below the start.
class ACCELERATE_API OneCycleLR : public LRScheduler {
 public:
  /// Throws `ArgumentError` for invalid options, and with `cycle_momentum` for an optimizer without
  /// momentum.
  OneCycleLR(torch::optim::Optimizer& optimizer, const OneCycleLROptions& options);

  [[nodiscard]] std::optional<std::int64_t> total_steps() const override { return total_steps_; }

 protected:
  /// Throws `StateError` beyond `total_steps()`.
  [[nodiscard]] std::vector<double> get_lr() override;
  void write_state(Value::Dict& state) const override;
  void read_state(const Value::Dict& state) override;

 private:
  static auto state_fields();
  void make_phases(double pct_start, bool three_phase);
  void set_limits(const OneCycleLROptions& options);
  [[nodiscard]] double anneal(double start, double end, double pct) const;

  std::int64_t total_steps_ = 0;
  std::vector<detail::optim::OneCyclePhase> phases_;
  AnnealStrategy anneal_strategy_;
  bool cycle_momentum_;
};

/// Cycles of equal height, of half the height of the one before, or of height `gamma **
/// iterations`.
enum class CyclicMode : std::uint8_t { kTriangular, kTriangular2, kExpRange };
/// The argument of a scale function.
enum class CyclicScaleMode : std::uint8_t { kCycle, kIterations };

struct CyclicLROptions {
  /// Must be set; replaces the learning rates of the optimizer.
  PerGroup base_lr = {};
  /// Must be set.
  PerGroup max_lr = {};
  std::int64_t step_size_up = 2000;
  /// nullopt means `step_size_up`.
  std::optional<std::int64_t> step_size_down = std::nullopt;
  CyclicMode mode = CyclicMode::kTriangular;
  double gamma = 1.0;
  /// Replaces `mode`: the height, 1 being the full one, of a cycle (from 1) or a step (from 0).
  std::function<double(double)> scale_fn = {};
  /// Only for `scale_fn`.
  CyclicScaleMode scale_mode = CyclicScaleMode::kCycle;
  bool cycle_momentum = true;
  PerGroup base_momentum = 0.8;
  PerGroup max_momentum = 0.9;
  std::int64_t last_epoch = -1;
};

/// Rises and falls linearly between `base_lr` and `max_lr`.
class ACCELERATE_API CyclicLR : public LRScheduler {
 public:
  /// Throws `ArgumentError` for invalid options, and with `cycle_momentum` for an optimizer without
  /// momentum.
  CyclicLR(torch::optim::Optimizer& optimizer, const CyclicLROptions& options);

 protected:
  [[nodiscard]] std::vector<double> get_lr() override;
  void write_state(Value::Dict& state) const override;
  void read_state(const Value::Dict& state) override;

 private:
  static auto state_fields();
  static auto momentum_fields();
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

namespace detail::inline core {
// clang-format off
template <> inline constexpr EnumTable kEnumTable<AnnealStrategy>{"AnnealStrategy", {"cos", "linear"}};
template <> inline constexpr EnumTable kEnumTable<CyclicMode>{"CyclicMode",
    {"triangular", "triangular2", "exp_range"}};
template <> inline constexpr EnumTable kEnumTable<CyclicScaleMode>{"CyclicScaleMode",
    {"cycle", "iterations"}};
// clang-format on
}  // namespace detail::inline core

}  // namespace accelerate
