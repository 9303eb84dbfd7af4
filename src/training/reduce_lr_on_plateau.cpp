#include "accelerate/reduce_lr_on_plateau.h"

#include <algorithm>
#include <limits>

#include "accelerate/errors.h"
#include "core/text.h"
#include "training/state_fields.h"

namespace accelerate {

using detail::str;
using detail::take_field;

ReduceLROnPlateau::ReduceLROnPlateau(torch::optim::Optimizer& optimizer,
                                     const ReduceLROnPlateauOptions& options)
    : LRScheduler(optimizer),
      factor_(options.factor),
      min_lrs_(options.min_lr.expand("min_lr", group_count())),
      patience_(options.patience),
      cooldown_(options.cooldown),
      eps_(options.eps),
      mode_(options.mode),
      threshold_(options.threshold),
      threshold_mode_(options.threshold_mode),
      best_(worst()) {
  if (!(factor_ < 1)) {
    throw ArgumentError(str("factor of ReduceLROnPlateau should be < 1.0, but is ", factor_, "."));
  }
  if (!options.min_lr.is_list()) default_min_lr_ = options.min_lr.expand("min_lr", 1).front();
  last_epoch_ = 0;
  last_lr_ = group_lrs();
}

double ReduceLROnPlateau::worst() const {
  constexpr auto kInfinity = std::numeric_limits<double>::infinity();
  return mode_ == PlateauMode::kMin ? kInfinity : -kInfinity;
}

bool ReduceLROnPlateau::is_better(double metric) const {
  const auto relative = threshold_mode_ == PlateauThresholdMode::kRel;
  if (mode_ == PlateauMode::kMin) {
    return metric < (relative ? best_ * (1.0 - threshold_) : best_ - threshold_);
  }
  return metric > (relative ? best_ * (threshold_ + 1.0) : best_ + threshold_);
}

void ReduceLROnPlateau::step(double metric) {
  ++last_epoch_;
  if (is_better(metric)) {
    best_ = metric;
    num_bad_epochs_ = 0;
  } else {
    ++num_bad_epochs_;
  }
  if (in_cooldown()) {
    --cooldown_counter_;
    num_bad_epochs_ = 0;
  }
  if (num_bad_epochs_ > patience_) {
    reduce_lr();
    cooldown_counter_ = cooldown_;
    num_bad_epochs_ = 0;
  }
  last_lr_ = group_lrs();
}

void ReduceLROnPlateau::step(const at::Tensor& metric) {
  if (!metric.defined() || metric.numel() != 1) {
    throw ArgumentError(
        str("The metric of ReduceLROnPlateau must be one number, but the tensor has ",
            metric.defined() ? metric.numel() : 0, "."));
  }
  step(metric.item().toDouble());
}

void ReduceLROnPlateau::step() {
  throw StateError("ReduceLROnPlateau has no step without a metric; call step(metric).");
}

void ReduceLROnPlateau::reduce_lr() {
  if (group_count() != min_lrs_.size()) {
    if (!default_min_lr_) {
      throw StateError(str("The optimizer has ", group_count(), " parameter groups, but ",
                           "ReduceLROnPlateau was built with ", min_lrs_.size(),
                           " values of min_lr. Build a new one after adding a group."));
    }
    min_lrs_.assign(group_count(), *default_min_lr_);
  }
  auto lrs = group_lrs();
  for (std::size_t i = 0; i < lrs.size(); ++i) {
    const auto reduced = std::max(lrs[i] * factor_, min_lrs_[i]);
    if (lrs[i] - reduced > eps_) lrs[i] = reduced;
  }
  set_group_lrs(lrs);
}

std::vector<double> ReduceLROnPlateau::get_lr() { return group_lrs(); }

void ReduceLROnPlateau::write_state(Value::Dict& state) const {
  state.set("factor", factor_);
  state.set("default_min_lr", default_min_lr_);
  state.set("min_lrs", min_lrs_);
  state.set("patience", patience_);
  state.set("cooldown", cooldown_);
  state.set("eps", eps_);
  state.set("last_epoch", last_epoch_);
  state.set("_last_lr", last_lr_);
  state.set("mode_worse", worst());
  state.set("mode", to_string(mode_));
  state.set("threshold", threshold_);
  state.set("threshold_mode", to_string(threshold_mode_));
  state.set("best", best_);
  state.set("cooldown_counter", cooldown_counter_);
  state.set("num_bad_epochs", num_bad_epochs_);
}

void ReduceLROnPlateau::read_state(const Value::Dict& state) {
  take_field(state, "factor", factor_);
  take_field(state, "default_min_lr", default_min_lr_);
  take_field(state, "min_lrs", min_lrs_);
  take_field(state, "patience", patience_);
  take_field(state, "cooldown", cooldown_);
  take_field(state, "eps", eps_);
  take_field(state, "mode", mode_);
  take_field(state, "threshold", threshold_);
  take_field(state, "threshold_mode", threshold_mode_);
  take_field(state, "best", best_);
  take_field(state, "cooldown_counter", cooldown_counter_);
  take_field(state, "num_bad_epochs", num_bad_epochs_);
  LRScheduler::read_state(state);
}

}  // namespace accelerate
