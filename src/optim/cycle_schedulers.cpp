#include "accelerate/scheduler/cycle_schedulers.h"

#include <cmath>
#include <numbers>
#include <tuple>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"
#include "optim/group_schedule.h"
#include "optim/optimizer_options.h"
#include "optim/scheduler_state.h"

namespace accelerate {
namespace detail::optim {

/// The entries of a phase in the state.
ACCELERATE_VALUE_FIELDS(OneCyclePhase, end_step, start_lr, end_lr, start_momentum, end_momentum);

}  // namespace detail::optim

namespace {

using detail::str;
using detail::optim::MomentumKind;
using detail::optim::set_momentum;
using std::numbers::pi;

// The order of operations is Python's, so that results agree to the last bit.

void require_momentum(const torch::optim::Optimizer& optimizer, std::string_view scheduler) {
  if (detail::optim::momentum_kind(optimizer.defaults()) != MomentumKind::kNone) return;
  throw ArgumentError(str("optimizer must support momentum or beta1 with `cycle_momentum` option ",
                          "enabled. Set .cycle_momentum = false in the options of ", scheduler,
                          ", or use SGD, RMSprop, Adam or AdamW."));
}

bool uses_beta1(const torch::optim::Optimizer& optimizer) {
  return detail::optim::momentum_kind(optimizer.defaults()) == MomentumKind::kBeta1;
}

void require_positive(std::int64_t number, std::string_view name) {
  if (number > 0) return;
  throw ArgumentError(str("Expected positive integer ", name, ", but got ", number, "."));
}

/// A number that schedulers keep with a group, by Python's name.
double kept(const detail::optim::GroupSchedule& schedule, std::string_view name) {
  std::optional<double> number;
  for_each_field(schedule, detail::optim::kGroupScheduleFields,
                 [&](const auto& field, const std::optional<double>& value) {
                   if (field.name == name) number = value;
                 });
  if (number) return *number;
  throw StateError(str("OneCycleLR needs '", name, "' of a parameter group, which was never set. ",
                       "Build the scheduler with all its groups and with cycle_momentum."));
}

/// An int if the number is whole, as in Python.
Value whole_or_real(double number) {
  if (number != std::floor(number)) return number;
  return static_cast<std::int64_t>(number);
}

}  // namespace

CosineAnnealingWarmRestarts::CosineAnnealingWarmRestarts(
    torch::optim::Optimizer& optimizer, const CosineAnnealingWarmRestartsOptions& options)
    : LRScheduler(optimizer),
      t_0_(options.t_0),
      t_i_(options.t_0),
      t_mult_(options.t_mult),
      eta_min_(options.eta_min),
      t_cur_(static_cast<double>(options.last_epoch)) {
  require_positive(t_0_, "t_0");
  require_positive(t_mult_, "t_mult");
  initialize(options.last_epoch);
}

void CosineAnnealingWarmRestarts::step() {
  if (last_epoch() < 0) return step(0.0);
  const auto length = static_cast<double>(t_i_);
  t_cur_ += 1;
  if (t_cur_ >= length) {
    t_cur_ = std::fmod(t_cur_, length);
    t_i_ *= t_mult_;
  }
  go_to(last_epoch() + 1);
}

void CosineAnnealingWarmRestarts::step(double epoch) {
  if (!(epoch >= 0) || std::isinf(epoch)) {
    throw ArgumentError(str("Expected non-negative epoch, but got ", epoch, "."));
  }
  const auto first = static_cast<double>(t_0_);
  if (epoch < first) {
    t_i_ = t_0_;
    t_cur_ = epoch;
  } else if (t_mult_ == 1) {
    t_cur_ = std::fmod(epoch, first);
  } else {
    // The lengths of the cosines are a geometric series.
    const auto ratio = static_cast<double>(t_mult_);
    const auto restarts = std::trunc(std::log(epoch / first * (ratio - 1) + 1) / std::log(ratio));
    const auto longer = std::pow(ratio, restarts);
    t_cur_ = epoch - first * (longer - 1) / (ratio - 1);
    t_i_ = t_0_ * static_cast<std::int64_t>(longer);
  }
  go_to(static_cast<std::int64_t>(std::floor(epoch)));
}

void CosineAnnealingWarmRestarts::go_to(std::int64_t epoch) {
  last_epoch_ = epoch;
  set_group_lrs(get_lr());
  last_lr_ = group_lrs();
}

std::vector<double> CosineAnnealingWarmRestarts::get_lr() {
  auto lrs = base_lrs();
  const auto angle = pi * t_cur_ / static_cast<double>(t_i_);
  for (auto& lr : lrs) lr = eta_min_ + (lr - eta_min_) * (1 + std::cos(angle)) / 2;
  return lrs;
}

auto CosineAnnealingWarmRestarts::state_fields() {
  using Self = CosineAnnealingWarmRestarts;
  return std::tuple{field("T_0", &Self::t_0_), field("T_i", &Self::t_i_),
                    field("T_mult", &Self::t_mult_), field("eta_min", &Self::eta_min_),
                    field("T_cur", &Self::t_cur_)};
}

void CosineAnnealingWarmRestarts::write_state(Value::Dict& state) const {
  detail::optim::write_fields(state, *this, state_fields());
  state.set("T_cur", whole_or_real(t_cur_));
  LRScheduler::write_state(state);
}

void CosineAnnealingWarmRestarts::read_state(const Value::Dict& state) {
  detail::optim::read_fields(state, *this, state_fields());
  require_positive(t_0_, "T_0");
  require_positive(t_i_, "T_i");
  require_positive(t_mult_, "T_mult");
  LRScheduler::read_state(state);
}

OneCycleLR::OneCycleLR(torch::optim::Optimizer& optimizer, const OneCycleLROptions& options)
    : LRScheduler(optimizer),
      anneal_strategy_(options.anneal_strategy),
      cycle_momentum_(options.cycle_momentum) {
  if (options.total_steps) {
    require_positive(*options.total_steps, "total_steps");
    total_steps_ = *options.total_steps;
  } else if (options.epochs && options.steps_per_epoch) {
    require_positive(*options.epochs, "epochs");
    require_positive(*options.steps_per_epoch, "steps_per_epoch");
    total_steps_ = *options.epochs * *options.steps_per_epoch;
  } else {
    throw ArgumentError(
        "You must define either total_steps OR (epochs AND steps_per_epoch) for OneCycleLR.");
  }
  if (!(options.pct_start >= 0 && options.pct_start <= 1)) {
    throw ArgumentError(
        str("Expected pct_start between 0 and 1, but got ", options.pct_start, "."));
  }
  make_phases(options.pct_start, options.three_phase);
  set_limits(options);
  initialize(options.last_epoch);
}

void OneCycleLR::make_phases(double pct_start, bool three_phase) {
  const auto total = static_cast<double>(total_steps_);
  const auto last = total - 1;
  phases_ = {{pct_start * total - 1, "initial_lr", "max_lr", "max_momentum", "base_momentum"}};
  if (three_phase) {
    phases_.push_back(
        {2 * pct_start * total - 2, "max_lr", "initial_lr", "base_momentum", "max_momentum"});
    phases_.push_back({last, "initial_lr", "min_lr", "max_momentum", "max_momentum"});
  } else {
    phases_.push_back({last, "max_lr", "min_lr", "base_momentum", "max_momentum"});
  }
}

void OneCycleLR::set_limits(const OneCycleLROptions& options) {
  const auto max_lrs = options.max_lr.expand("max_lr", group_count());
  std::vector<double> max_momentums;
  std::vector<double> base_momentums;
  if (cycle_momentum_) {
    require_momentum(optimizer(), "OneCycleLR");
    max_momentums = options.max_momentum.expand("max_momentum", group_count());
    base_momentums = options.base_momentum.expand("base_momentum", group_count());
  }
  if (options.last_epoch != -1) return;  // an earlier scheduler has set them
  for (std::size_t i = 0; i < group_count(); ++i) {
    auto& limits = schedule(i);
    limits.initial_lr = max_lrs[i] / options.div_factor;
    limits.max_lr = max_lrs[i];
    limits.min_lr = *limits.initial_lr / options.final_div_factor;
    if (!cycle_momentum_) continue;
    set_momentum(optimizer().param_groups()[i].options(), max_momentums[i]);
    limits.max_momentum = max_momentums[i];
    limits.base_momentum = base_momentums[i];
  }
}

double OneCycleLR::anneal(double start, double end, double pct) const {
  if (anneal_strategy_ == AnnealStrategy::kLinear) return (end - start) * pct + start;
  return end + (start - end) / 2.0 * (std::cos(pi * pct) + 1);
}

std::vector<double> OneCycleLR::get_lr() {
  if (last_epoch() > total_steps_) {
    throw StateError(str("Tried to step ", last_epoch(), " times. The specified number of total ",
                         "steps is ", total_steps_, "."));
  }
  const auto step = static_cast<double>(last_epoch());
  std::size_t at = 0;
  while (at + 1 < phases_.size() && step > phases_[at].end_step) ++at;
  const auto& phase = phases_[at];
  const auto start_step = at == 0 ? 0.0 : phases_[at - 1].end_step;
  if (phase.end_step == start_step) {
    throw ArgumentError(str("A phase of OneCycleLR has no length with total_steps = ", total_steps_,
                            ". Choose another pct_start, or more steps."));
  }
  const auto pct = (step - start_step) / (phase.end_step - start_step);

  std::vector<double> lrs;
  std::vector<double> momentums;
  for (std::size_t i = 0; i < group_count(); ++i) {
    const auto& limits = schedule(i);
    lrs.push_back(anneal(kept(limits, phase.start_lr), kept(limits, phase.end_lr), pct));
    if (!cycle_momentum_) continue;
    momentums.push_back(
        anneal(kept(limits, phase.start_momentum), kept(limits, phase.end_momentum), pct));
  }
  for (std::size_t i = 0; i < momentums.size(); ++i) {
    set_momentum(optimizer().param_groups()[i].options(), momentums[i]);
  }
  return lrs;
}

auto OneCycleLR::state_fields() {
  return std::tuple{field("total_steps", &OneCycleLR::total_steps_),
                    field("_schedule_phases", &OneCycleLR::phases_),
                    field("_anneal_func_type", &OneCycleLR::anneal_strategy_),
                    field("cycle_momentum", &OneCycleLR::cycle_momentum_)};
}

void OneCycleLR::write_state(Value::Dict& state) const {
  detail::optim::write_fields(state, *this, state_fields());
  if (cycle_momentum_) state.set("use_beta1", uses_beta1(optimizer()));
  LRScheduler::write_state(state);
}

void OneCycleLR::read_state(const Value::Dict& state) {
  detail::optim::read_fields(state, *this, state_fields());
  require_positive(total_steps_, "total_steps");
  if (phases_.empty()) throw ArgumentError("The state of OneCycleLR has no phases.");
  if (cycle_momentum_) require_momentum(optimizer(), "OneCycleLR");
  LRScheduler::read_state(state);
}

CyclicLR::CyclicLR(torch::optim::Optimizer& optimizer, const CyclicLROptions& options)
    : LRScheduler(optimizer),
      mode_(options.mode),
      gamma_(options.gamma),
      scale_fn_(options.scale_fn),
      scale_mode_(options.scale_mode),
      cycle_momentum_(options.cycle_momentum) {
  auto base_lrs = options.base_lr.expand("base_lr", group_count());
  max_lrs_ = options.max_lr.expand("max_lr", group_count());
  require_positive(options.step_size_up, "step_size_up");
  const auto step_size_down = options.step_size_down.value_or(options.step_size_up);
  if (step_size_down < 0) {
    throw ArgumentError(
        str("step_size_down of CyclicLR is ", step_size_down, "; it must be 0 or more."));
  }
  total_size_ = static_cast<double>(options.step_size_up) + static_cast<double>(step_size_down);
  step_ratio_ = static_cast<double>(options.step_size_up) / total_size_;
  choose_scale_mode();
  if (cycle_momentum_) {
    require_momentum(optimizer, "CyclicLR");
    base_momentums_ = options.base_momentum.expand("base_momentum", group_count());
    max_momentums_ = options.max_momentum.expand("max_momentum", group_count());
  }
  if (options.last_epoch == -1) {
    set_group_lrs(base_lrs);
    for (std::size_t i = 0; cycle_momentum_ && i < group_count(); ++i) {
      set_momentum(optimizer.param_groups()[i].options(), max_momentums_[i]);
      schedule(i).max_momentum = max_momentums_[i];
      schedule(i).base_momentum = base_momentums_[i];
    }
  }
  initialize(options.last_epoch);
  // After the first step: Python computes that one from the initial learning rates.
  base_lrs_ = std::move(base_lrs);
}

void CyclicLR::choose_scale_mode() {
  if (scale_fn_) return;
  scale_mode_ =
      mode_ == CyclicMode::kExpRange ? CyclicScaleMode::kIterations : CyclicScaleMode::kCycle;
}

double CyclicLR::scale(double x) const {
  if (scale_fn_) return scale_fn_(x);
  switch (mode_) {
    case CyclicMode::kTriangular2:
      return 1 / std::pow(2.0, x - 1);
    case CyclicMode::kExpRange:
      return std::pow(gamma_, x);
    case CyclicMode::kTriangular:
      break;
  }
  return 1.0;
}

std::vector<double> CyclicLR::get_lr() {
  const auto epoch = static_cast<double>(last_epoch());
  const auto cycle = std::floor(1 + epoch / total_size_);
  const auto x = 1.0 + epoch / total_size_ - cycle;
  const auto height = x <= step_ratio_ ? x / step_ratio_ : (x - 1) / (step_ratio_ - 1);
  const auto factor = scale(scale_mode_ == CyclicScaleMode::kCycle ? cycle : epoch);

  auto lrs = base_lrs();
  for (std::size_t i = 0; i < lrs.size(); ++i) lrs[i] += (max_lrs_[i] - lrs[i]) * height * factor;
  if (cycle_momentum_ && lrs.size() == group_count()) {
    for (std::size_t i = 0; i < lrs.size(); ++i) {
      const auto span = (max_momentums_[i] - base_momentums_[i]) * height;
      set_momentum(optimizer().param_groups()[i].options(), max_momentums_[i] - span * factor);
    }
  }
  return lrs;
}

auto CyclicLR::state_fields() {
  return std::tuple{field("max_lrs", &CyclicLR::max_lrs_),
                    field("total_size", &CyclicLR::total_size_),
                    field("step_ratio", &CyclicLR::step_ratio_),
                    field("mode", &CyclicLR::mode_),
                    field("gamma", &CyclicLR::gamma_),
                    field("scale_mode", &CyclicLR::scale_mode_),
                    field("cycle_momentum", &CyclicLR::cycle_momentum_)};
}

auto CyclicLR::momentum_fields() {
  return std::tuple{field("base_momentums", &CyclicLR::base_momentums_),
                    field("max_momentums", &CyclicLR::max_momentums_)};
}

void CyclicLR::write_state(Value::Dict& state) const {
  detail::optim::write_fields(state, *this, state_fields());
  if (cycle_momentum_) {
    state.set("use_beta1", uses_beta1(optimizer()));
    detail::optim::write_fields(state, *this, momentum_fields());
  }
  LRScheduler::write_state(state);
  state.set("_scale_fn_custom", nullptr);
}

void CyclicLR::read_state(const Value::Dict& state) {
  detail::optim::read_fields(state, *this, state_fields());
  detail::optim::read_fields(state, *this, momentum_fields());
  if (cycle_momentum_) require_momentum(optimizer(), "CyclicLR");
  choose_scale_mode();
  LRScheduler::read_state(state);
  const auto groups = base_lrs_.size();
  if (max_lrs_.size() != groups ||
      (cycle_momentum_ && (base_momentums_.size() != groups || max_momentums_.size() != groups))) {
    throw ArgumentError(str("The state of CyclicLR does not have one max_lr and one momentum for ",
                            "each of ", groups, " parameter groups."));
  }
}

}  // namespace accelerate
