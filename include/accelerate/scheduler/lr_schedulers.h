// accelerate/scheduler/lr_schedulers.h - schedulers that follow one formula.
//
//     auto schedule = CosineAnnealingLR(optimizer, {.t_max = 100});
//
// Part of accelerate/scheduler.h. Options have Python's names, order and defaults. `last_epoch` is
// explained at `LRScheduler::initialize`.
#pragma once

#include <concepts>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/scheduler/lr_scheduler.h"

namespace accelerate {

// The classes made from these structs are exported; with GCC that needs visible template arguments.
#pragma GCC visibility push(default)

struct StepLROptions {
  /// Must be set.
  std::int64_t step_size = 0;
  double gamma = 0.1;
  std::int64_t last_epoch = -1;
};

struct MultiStepLROptions {
  /// In any order; an epoch that is listed twice counts twice.
  std::vector<std::int64_t> milestones = {};
  double gamma = 0.1;
  std::int64_t last_epoch = -1;
};

struct ConstantLROptions {
  /// From 0 to 1.
  double factor = 1.0 / 3;
  std::int64_t total_iters = 5;
  std::int64_t last_epoch = -1;
};

struct LinearLROptions {
  /// Above 0, up to 1.
  double start_factor = 1.0 / 3;
  /// From 0 to 1.
  double end_factor = 1.0;
  std::int64_t total_iters = 5;
  std::int64_t last_epoch = -1;
};

struct ExponentialLROptions {
  /// Must be set.
  std::optional<double> gamma = std::nullopt;
  std::int64_t last_epoch = -1;
};

struct PolynomialLROptions {
  std::int64_t total_iters = 5;
  double power = 1.0;
  std::int64_t last_epoch = -1;
};

struct CosineAnnealingLROptions {
  /// Must be set: the number of epochs from the highest to the lowest learning rate.
  std::int64_t t_max = 0;
  double eta_min = 0.0;
  std::int64_t last_epoch = -1;
};

#pragma GCC visibility pop

/// A scheduler with a formula for each of its options types. The options are its state.
template <class Options>
class ACCELERATE_API FormulaLR : public LRScheduler {
 public:
  /// Throws `ArgumentError` for options that are missing or out of range.
  FormulaLR(torch::optim::Optimizer& optimizer, Options options);
  /// With Python's defaults, for the schedulers that have no required option.
  explicit FormulaLR(torch::optim::Optimizer& optimizer)
    requires(std::same_as<Options, ConstantLROptions> || std::same_as<Options, LinearLROptions> ||
             std::same_as<Options, PolynomialLROptions>)
      : FormulaLR(optimizer, Options{}) {}
  /// `LambdaLR(optimizer, function)` and `MultiplicativeLR(optimizer, function)`.
  template <class F>
    requires std::convertible_to<F, decltype(Options::lr_lambda)>
  FormulaLR(torch::optim::Optimizer& optimizer, F lr_lambda, std::int64_t last_epoch = -1)
      : FormulaLR(optimizer, Options{std::move(lr_lambda), last_epoch}) {}

 protected:
  [[nodiscard]] std::vector<double> get_lr() override;
  [[nodiscard]] std::optional<std::vector<double>> get_closed_form_lr() const override;
  void write_state(Value::Dict& state) const override;
  void read_state(const Value::Dict& state) override;

 private:
  Options options_;
};

/// Multiplies by `gamma` every `step_size` epochs.
using StepLR = FormulaLR<StepLROptions>;
/// Multiplies by `gamma` at each milestone.
using MultiStepLR = FormulaLR<MultiStepLROptions>;
/// Multiplies the initial learning rate by `factor` until epoch `total_iters`.
using ConstantLR = FormulaLR<ConstantLROptions>;
/// Multiplies by a factor that changes linearly from `start_factor` to `end_factor`.
using LinearLR = FormulaLR<LinearLROptions>;
/// Multiplies by `gamma` every epoch.
using ExponentialLR = FormulaLR<ExponentialLROptions>;
/// Decreases to 0 in `total_iters` epochs, as (1 - epoch / total_iters) ** power.
using PolynomialLR = FormulaLR<PolynomialLROptions>;
/// A cosine between the initial learning rate and `eta_min`.
using CosineAnnealingLR = FormulaLR<CosineAnnealingLROptions>;

extern template class FormulaLR<StepLROptions>;
extern template class FormulaLR<MultiStepLROptions>;
extern template class FormulaLR<ConstantLROptions>;
extern template class FormulaLR<LinearLROptions>;
extern template class FormulaLR<ExponentialLROptions>;
extern template class FormulaLR<PolynomialLROptions>;
extern template class FormulaLR<CosineAnnealingLROptions>;

}  // namespace accelerate
