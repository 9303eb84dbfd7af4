#include "accelerate/lr_schedulers.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "accelerate/errors.h"
#include "accelerate/lambda_schedulers.h"
#include "core/text.h"
#include "training/state_fields.h"

namespace accelerate {
namespace {

using detail::str;
using detail::take_field;
using std::numbers::pi;

// Numbers are computed in the order in which Python computes them: they shall agree to the last
// bit.

std::vector<double> scaled(std::vector<double> lrs, double factor) {
  for (auto& lr : lrs) lr *= factor;
  return lrs;
}

void require_factor(double factor, bool valid, std::string_view name, std::string_view range) {
  if (valid) return;  // NaN is not
  throw ArgumentError(str(name, " is ", factor, "; it must be ", range, "."));
}

/// The closed form divides by it; the recurrence does not.
void require_iterations(std::int64_t total_iters, std::string_view scheduler) {
  if (total_iters != 0) return;
  throw StateError(str(scheduler, " with total_iters = 0 cannot begin at a milestone. ",
                       "Give it at least one, or leave it out."));
}

}  // namespace

std::vector<LrLambda> LrLambdas::expand(std::size_t groups) const {
  if (functions_.empty() && !is_list_) {
    throw ArgumentError("lr_lambda is not set; give a function, or one for each parameter group.");
  }
  if (is_list_ && functions_.size() != groups) {
    throw ArgumentError(str("Expected ", groups, " lr_lambdas, but got ", functions_.size(), "."));
  }
  for (const auto& function : functions_) {
    if (!function) throw ArgumentError("lr_lambda should be a function, but is an empty one.");
  }
  if (is_list_) return functions_;
  return std::vector<LrLambda>(groups, functions_.front());
}

LambdaSchedulerBase::LambdaSchedulerBase(torch::optim::Optimizer& optimizer,
                                         const LrLambdas& lambdas)
    : LRScheduler(optimizer), lr_lambdas_(lambdas.expand(group_count())) {}

std::vector<double> LambdaSchedulerBase::factors() const {
  std::vector<double> factors;
  for (const auto& lambda : lr_lambdas_) factors.push_back(lambda(last_epoch()));
  return factors;
}

void LambdaSchedulerBase::write_state(Value::Dict& state) const {
  LRScheduler::write_state(state);
  state.set("lr_lambdas", Value::List(lr_lambdas_.size()));
}

LambdaLR::LambdaLR(torch::optim::Optimizer& optimizer, const LambdaLROptions& options)
    : LambdaSchedulerBase(optimizer, options.lr_lambda) {
  initialize(options.last_epoch);
}

std::vector<double> LambdaLR::get_lr() {
  auto lrs = factors();
  for (std::size_t i = 0; i < lrs.size(); ++i) lrs[i] *= base_lrs()[i];
  return lrs;
}

MultiplicativeLR::MultiplicativeLR(torch::optim::Optimizer& optimizer,
                                   const MultiplicativeLROptions& options)
    : LambdaSchedulerBase(optimizer, options.lr_lambda) {
  initialize(options.last_epoch);
}

std::vector<double> MultiplicativeLR::get_lr() {
  const auto now = group_lrs();
  if (is_initial()) return now;
  auto lrs = factors();
  for (std::size_t i = 0; i < lrs.size(); ++i) lrs[i] *= now[i];
  return lrs;
}

StepLR::StepLR(torch::optim::Optimizer& optimizer, const StepLROptions& options)
    : LRScheduler(optimizer), step_size_(options.step_size), gamma_(options.gamma) {
  if (step_size_ < 1) {
    throw ArgumentError(str("step_size of StepLR is ", step_size_, "; it must be at least 1."));
  }
  initialize(options.last_epoch);
}

std::vector<double> StepLR::get_lr() {
  const auto keeps = last_epoch() == 0 || last_epoch() % step_size_ != 0;
  return keeps ? group_lrs() : scaled(group_lrs(), gamma_);
}

std::optional<std::vector<double>> StepLR::get_closed_form_lr() const {
  return scaled(base_lrs(), std::pow(gamma_, static_cast<double>(last_epoch() / step_size_)));
}

void StepLR::write_state(Value::Dict& state) const {
  state.set("step_size", step_size_);
  state.set("gamma", gamma_);
  LRScheduler::write_state(state);
}

void StepLR::read_state(const Value::Dict& state) {
  take_field(state, "step_size", step_size_);
  take_field(state, "gamma", gamma_);
  if (step_size_ < 1) throw ArgumentError(str("The state has step_size = ", step_size_, "."));
  LRScheduler::read_state(state);
}

MultiStepLR::MultiStepLR(torch::optim::Optimizer& optimizer, const MultiStepLROptions& options)
    : LRScheduler(optimizer), gamma_(options.gamma) {
  for (const auto milestone : options.milestones) ++milestones_[milestone];
  initialize(options.last_epoch);
}

std::vector<double> MultiStepLR::get_lr() {
  const auto found = milestones_.find(last_epoch());
  if (found == milestones_.end()) return group_lrs();
  return scaled(group_lrs(), std::pow(gamma_, static_cast<double>(found->second)));
}

std::optional<std::vector<double>> MultiStepLR::get_closed_form_lr() const {
  std::int64_t passed = 0;
  for (const auto& [milestone, times] : milestones_) {
    if (milestone <= last_epoch()) passed += times;
  }
  return scaled(base_lrs(), std::pow(gamma_, static_cast<double>(passed)));
}

void MultiStepLR::write_state(Value::Dict& state) const {
  Value::Dict milestones;
  for (const auto& [milestone, times] : milestones_) milestones.set(milestone, times);
  state.set("milestones", std::move(milestones));
  state.set("gamma", gamma_);
  LRScheduler::write_state(state);
}

void MultiStepLR::read_state(const Value::Dict& state) {
  if (const auto* milestones = state.get("milestones")) {
    milestones_.clear();
    for (const auto& [key, times] : milestones->as_dict()) {
      milestones_[key.as_int()] = times.as_int();
    }
  }
  take_field(state, "gamma", gamma_);
  LRScheduler::read_state(state);
}

ConstantLR::ConstantLR(torch::optim::Optimizer& optimizer, const ConstantLROptions& options)
    : LRScheduler(optimizer), factor_(options.factor), total_iters_(options.total_iters) {
  require_factor(factor_, factor_ >= 0 && factor_ <= 1, "factor of ConstantLR", "between 0 and 1");
  initialize(options.last_epoch);
}

std::vector<double> ConstantLR::get_lr() {
  if (last_epoch() == 0) return scaled(group_lrs(), factor_);
  if (last_epoch() != total_iters_) return group_lrs();
  if (factor_ == 0) {
    throw StateError(str("ConstantLR cannot undo its factor 0 at total_iters = ", total_iters_,
                         ". Give it a factor above 0."));
  }
  return scaled(group_lrs(), 1.0 / factor_);
}

std::optional<std::vector<double>> ConstantLR::get_closed_form_lr() const {
  return scaled(base_lrs(), factor_ + (last_epoch() >= total_iters_ ? 1 : 0) * (1 - factor_));
}

void ConstantLR::write_state(Value::Dict& state) const {
  state.set("factor", factor_);
  state.set("total_iters", total_iters_);
  LRScheduler::write_state(state);
}

void ConstantLR::read_state(const Value::Dict& state) {
  take_field(state, "factor", factor_);
  take_field(state, "total_iters", total_iters_);
  LRScheduler::read_state(state);
}

LinearLR::LinearLR(torch::optim::Optimizer& optimizer, const LinearLROptions& options)
    : LRScheduler(optimizer),
      start_factor_(options.start_factor),
      end_factor_(options.end_factor),
      total_iters_(options.total_iters) {
  require_factor(start_factor_, start_factor_ > 0 && start_factor_ <= 1, "start_factor of LinearLR",
                 "greater than 0 and at most 1");
  require_factor(end_factor_, end_factor_ >= 0 && end_factor_ <= 1, "end_factor of LinearLR",
                 "between 0 and 1");
  initialize(options.last_epoch);
}

std::vector<double> LinearLR::get_lr() {
  if (last_epoch() == 0) return scaled(group_lrs(), start_factor_);
  if (is_initial() || last_epoch() > total_iters_) return group_lrs();
  const auto rise = end_factor_ - start_factor_;
  const auto before = static_cast<double>(total_iters_) * start_factor_ +
                      static_cast<double>(last_epoch() - 1) * rise;
  return scaled(group_lrs(), 1.0 + rise / before);
}

std::optional<std::vector<double>> LinearLR::get_closed_form_lr() const {
  require_iterations(total_iters_, "LinearLR");
  const auto passed = static_cast<double>(std::min(total_iters_, last_epoch()));
  return scaled(base_lrs(), start_factor_ + (end_factor_ - start_factor_) * passed /
                                                static_cast<double>(total_iters_));
}

void LinearLR::write_state(Value::Dict& state) const {
  state.set("start_factor", start_factor_);
  state.set("end_factor", end_factor_);
  state.set("total_iters", total_iters_);
  LRScheduler::write_state(state);
}

void LinearLR::read_state(const Value::Dict& state) {
  take_field(state, "start_factor", start_factor_);
  take_field(state, "end_factor", end_factor_);
  take_field(state, "total_iters", total_iters_);
  LRScheduler::read_state(state);
}

ExponentialLR::ExponentialLR(torch::optim::Optimizer& optimizer,
                             const ExponentialLROptions& options)
    : LRScheduler(optimizer), gamma_(options.gamma.value_or(0)) {
  if (!options.gamma) throw ArgumentError("gamma of ExponentialLR is not set; give the factor.");
  initialize(options.last_epoch);
}

std::vector<double> ExponentialLR::get_lr() {
  return is_initial() ? group_lrs() : scaled(group_lrs(), gamma_);
}

std::optional<std::vector<double>> ExponentialLR::get_closed_form_lr() const {
  return scaled(base_lrs(), std::pow(gamma_, static_cast<double>(last_epoch())));
}

void ExponentialLR::write_state(Value::Dict& state) const {
  state.set("gamma", gamma_);
  LRScheduler::write_state(state);
}

void ExponentialLR::read_state(const Value::Dict& state) {
  take_field(state, "gamma", gamma_);
  LRScheduler::read_state(state);
}

PolynomialLR::PolynomialLR(torch::optim::Optimizer& optimizer, const PolynomialLROptions& options)
    : LRScheduler(optimizer), total_iters_(options.total_iters), power_(options.power) {
  initialize(options.last_epoch);
}

std::vector<double> PolynomialLR::get_lr() {
  if (is_initial() || last_epoch() > total_iters_) return group_lrs();
  const auto total = static_cast<double>(total_iters_);
  const auto left = 1.0 - static_cast<double>(last_epoch()) / total;
  const auto left_before = 1.0 - static_cast<double>(last_epoch() - 1) / total;
  return scaled(group_lrs(), std::pow(left / left_before, power_));
}

std::optional<std::vector<double>> PolynomialLR::get_closed_form_lr() const {
  require_iterations(total_iters_, "PolynomialLR");
  const auto passed = static_cast<double>(std::min(total_iters_, last_epoch()));
  return scaled(base_lrs(), std::pow(1.0 - passed / static_cast<double>(total_iters_), power_));
}

void PolynomialLR::write_state(Value::Dict& state) const {
  state.set("total_iters", total_iters_);
  state.set("power", power_);
  LRScheduler::write_state(state);
}

void PolynomialLR::read_state(const Value::Dict& state) {
  take_field(state, "total_iters", total_iters_);
  take_field(state, "power", power_);
  LRScheduler::read_state(state);
}

CosineAnnealingLR::CosineAnnealingLR(torch::optim::Optimizer& optimizer,
                                     const CosineAnnealingLROptions& options)
    : LRScheduler(optimizer), t_max_(options.t_max), eta_min_(options.eta_min) {
  if (t_max_ < 1) {
    throw ArgumentError(str("t_max of CosineAnnealingLR is ", t_max_, "; it must be at least 1."));
  }
  initialize(options.last_epoch);
}

std::vector<double> CosineAnnealingLR::get_lr() {
  auto lrs = group_lrs();
  if (is_initial()) return lrs;
  if (step_count() == 1 && last_epoch() > 0) return *get_closed_form_lr();
  const auto t_max = static_cast<double>(t_max_);
  if ((last_epoch() - 1 - t_max_) % (2 * t_max_) == 0) {
    // At the lowest point the recurrence below would divide by zero.
    auto rising = base_lrs();
    for (std::size_t i = 0; i < rising.size(); ++i) {
      rising[i] = lrs[i] + (rising[i] - eta_min_) * (1 - std::cos(pi / t_max)) / 2;
    }
    return rising;
  }
  const auto ratio = (1 + std::cos(pi * static_cast<double>(last_epoch()) / t_max)) /
                     (1 + std::cos(pi * static_cast<double>(last_epoch() - 1) / t_max));
  for (auto& lr : lrs) lr = ratio * (lr - eta_min_) + eta_min_;
  return lrs;
}

std::optional<std::vector<double>> CosineAnnealingLR::get_closed_form_lr() const {
  const auto angle = pi * static_cast<double>(last_epoch()) / static_cast<double>(t_max_);
  auto lrs = base_lrs();
  for (auto& lr : lrs) lr = eta_min_ + (lr - eta_min_) * (1 + std::cos(angle)) / 2;
  return lrs;
}

void CosineAnnealingLR::write_state(Value::Dict& state) const {
  state.set("T_max", t_max_);
  state.set("eta_min", eta_min_);
  LRScheduler::write_state(state);
}

void CosineAnnealingLR::read_state(const Value::Dict& state) {
  take_field(state, "T_max", t_max_);
  take_field(state, "eta_min", eta_min_);
  if (t_max_ < 1) throw ArgumentError(str("The state has T_max = ", t_max_, "."));
  LRScheduler::read_state(state);
}

}  // namespace accelerate
