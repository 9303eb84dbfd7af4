#include "accelerate/scheduler/reduce_lr_on_plateau.h"

#include <algorithm>
#include <limits>
#include <tuple>

#include "accelerate/errors.h"
#include "core/text.h"
#include "optim/scheduler_state.h"

namespace accelerate {

using detail::str;

constexpr auto kInfinity = std::numeric_limits<double>::infinity();

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
      mode_worse_(options.mode == PlateauMode::kMin ? kInfinity : -kInfinity),
      best_(mode_worse_) {
  if (!(factor_ < 1)) {
    throw ArgumentError(str("factor of ReduceLROnPlateau should be < 1.0, but is ", factor_, "."));
  }
  if (!options.min_lr.is_list()) default_min_lr_ = options.min_lr.expand("min_lr", 1).front();
  last_epoch_ = 0;
  last_lr_ = group_lrs();
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

auto ReduceLROnPlateau::state_fields() {
  using Self = ReduceLROnPlateau;
  return std::tuple{field("factor", &Self::factor_),
                    field("default_min_lr", &Self::default_min_lr_),
                    field("min_lrs", &Self::min_lrs_),
                    field("patience", &Self::patience_),
                    field("cooldown", &Self::cooldown_),
                    field("eps", &Self::eps_),
                    field("last_epoch", &Self::last_epoch_),
                    field("_last_lr", &Self::last_lr_),
                    field("mode_worse", &Self::mode_worse_),
                    field("mode", &Self::mode_),
                    field("threshold", &Self::threshold_),
                    field("threshold_mode", &Self::threshold_mode_),
                    field("best", &Self::best_),
                    field("cooldown_counter", &Self::cooldown_counter_),
                    field("num_bad_epochs", &Self::num_bad_epochs_)};
}

void ReduceLROnPlateau::write_state(Value::Dict& state) const {
  detail::optim::write_fields(state, *this, state_fields());
}

void ReduceLROnPlateau::read_state(const Value::Dict& state) {
  LRScheduler::read_state(state);  // also checks the number of learning rates
  detail::optim::read_fields(state, *this, state_fields());
}

}  // namespace accelerate
