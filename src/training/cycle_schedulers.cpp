#include "accelerate/cycle_schedulers.h"

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <numbers>
#include <tuple>
#include <utility>

#include "accelerate/errors.h"
#include "accelerate/optim.h"
#include "core/text.h"
#include "training/group_memory.h"
#include "training/state_fields.h"

namespace accelerate {
namespace {

using detail::str;
using detail::take_field;
using std::numbers::pi;
using torch::optim::OptimizerOptions;

// Numbers are computed in the order in which Python computes them: they shall agree to the last
// bit.

enum class Momentum { kNone, kMomentum, kBeta1 };

Momentum momentum_of(const OptimizerOptions& options) {
  if (const auto* ours = dynamic_cast<const ParamGroupOptions*>(&options)) {
    if (!ours->momentum()) return Momentum::kNone;
    return ours->to_dict().contains("betas") ? Momentum::kBeta1 : Momentum::kMomentum;
  }
  if (dynamic_cast<const torch::optim::SGDOptions*>(&options)) return Momentum::kMomentum;
  if (dynamic_cast<const torch::optim::RMSpropOptions*>(&options)) return Momentum::kMomentum;
  if (dynamic_cast<const torch::optim::AdamOptions*>(&options)) return Momentum::kBeta1;
  if (dynamic_cast<const torch::optim::AdamWOptions*>(&options)) return Momentum::kBeta1;
  return Momentum::kNone;
}

template <class Options>
bool set_beta1(OptimizerOptions& options, double beta1) {
  auto* adam = dynamic_cast<Options*>(&options);
  if (adam) std::get<0>(adam->betas()) = beta1;
  return adam;
}

template <class Options>
bool set_plain_momentum(OptimizerOptions& options, double momentum) {
  auto* with_momentum = dynamic_cast<Options*>(&options);
  if (with_momentum) with_momentum->momentum(momentum);
  return with_momentum;
}

/// Sets what `momentum_of` found.
void set_momentum(OptimizerOptions& options, double momentum) {
  if (auto* ours = dynamic_cast<ParamGroupOptions*>(&options)) return ours->set_momentum(momentum);
  set_plain_momentum<torch::optim::SGDOptions>(options, momentum) ||
      set_plain_momentum<torch::optim::RMSpropOptions>(options, momentum) ||
      set_beta1<torch::optim::AdamOptions>(options, momentum) ||
      set_beta1<torch::optim::AdamWOptions>(options, momentum);
}

void require_momentum(const torch::optim::Optimizer& optimizer, std::string_view scheduler) {
  if (momentum_of(optimizer.defaults()) != Momentum::kNone) return;
  throw ArgumentError(str("optimizer must support momentum or beta1 with `cycle_momentum` option ",
                          "enabled. Set .cycle_momentum = false in the options of ", scheduler,
                          ", or take SGD, RMSprop, Adam or AdamW."));
}

bool uses_beta1(const torch::optim::Optimizer& optimizer) {
  return momentum_of(optimizer.defaults()) == Momentum::kBeta1;
}

void require_positive(std::int64_t number, std::string_view name) {
  if (number > 0) return;
  throw ArgumentError(str("Expected positive integer ", name, ", but got ", number, "."));
}

/// A number that schedulers noted, by the name that Python gives it.
double noted(const detail::GroupMemory& memory, const std::string& name) {
  const std::pair<std::string_view, const std::optional<double>&> all[] = {
      {"initial_lr", memory.initial_lr},
      {"max_lr", memory.max_lr},
      {"min_lr", memory.min_lr},
      {"max_momentum", memory.max_momentum},
      {"base_momentum", memory.base_momentum}};
  for (const auto& [known, number] : all) {
    if (known == name && number) return *number;
  }
  throw StateError(str("OneCycleLR needs '", name, "' of a parameter group, which was never set. ",
                       "Build the scheduler with all its groups and with cycle_momentum."));
}

/// An int where it is a whole number, as Python has it.
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
    // The lengths of all cosines before are a geometric series.
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

void CosineAnnealingWarmRestarts::write_state(Value::Dict& state) const {
  state.set("T_0", t_0_);
  state.set("T_i", t_i_);
  state.set("T_mult", t_mult_);
  state.set("eta_min", eta_min_);
  state.set("T_cur", whole_or_real(t_cur_));
  LRScheduler::write_state(state);
}

void CosineAnnealingWarmRestarts::read_state(const Value::Dict& state) {
  take_field(state, "T_0", t_0_);
  take_field(state, "T_i", t_i_);
  take_field(state, "T_mult", t_mult_);
  take_field(state, "eta_min", eta_min_);
  take_field(state, "T_cur", t_cur_);
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
  if (options.last_epoch != -1) return;  // an earlier scheduler noted them
  for (std::size_t i = 0; i < group_count(); ++i) {
    auto& limits = memory(i);
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
    const auto& limits = memory(i);
    lrs.push_back(anneal(noted(limits, phase.start_lr), noted(limits, phase.end_lr), pct));
    if (!cycle_momentum_) continue;
    momentums.push_back(
        anneal(noted(limits, phase.start_momentum), noted(limits, phase.end_momentum), pct));
  }
  for (std::size_t i = 0; i < momentums.size(); ++i) {
    set_momentum(optimizer().param_groups()[i].options(), momentums[i]);
  }
  return lrs;
}

void OneCycleLR::write_state(Value::Dict& state) const {
  state.set("total_steps", total_steps_);
  Value::List phases;
  for (const auto& phase : phases_) {
    phases.emplace_back(Value::Dict{{"end_step", phase.end_step},
                                    {"start_lr", phase.start_lr},
                                    {"end_lr", phase.end_lr},
                                    {"start_momentum", phase.start_momentum},
                                    {"end_momentum", phase.end_momentum}});
  }
  state.set("_schedule_phases", std::move(phases));
  state.set("_anneal_func_type", to_string(anneal_strategy_));
  state.set("cycle_momentum", cycle_momentum_);
  if (cycle_momentum_) state.set("use_beta1", uses_beta1(optimizer()));
  LRScheduler::write_state(state);
}

void OneCycleLR::read_state(const Value::Dict& state) {
  take_field(state, "total_steps", total_steps_);
  require_positive(total_steps_, "total_steps");
  if (const auto* phases = state.get("_schedule_phases")) {
    std::vector<Phase> read;
    for (const auto& value : phases->items()) {
      auto& phase = read.emplace_back();
      take_field(value.as_dict(), "end_step", phase.end_step);
      take_field(value.as_dict(), "start_lr", phase.start_lr);
      take_field(value.as_dict(), "end_lr", phase.end_lr);
      take_field(value.as_dict(), "start_momentum", phase.start_momentum);
      take_field(value.as_dict(), "end_momentum", phase.end_momentum);
    }
    if (read.empty()) throw ArgumentError("The state of OneCycleLR has no phases.");
    phases_ = std::move(read);
  }
  take_field(state, "_anneal_func_type", anneal_strategy_);
  take_field(state, "cycle_momentum", cycle_momentum_);
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
      memory(i).max_momentum = max_momentums_[i];
      memory(i).base_momentum = base_momentums_[i];
    }
  }
  initialize(options.last_epoch);
  // Not before: Python computes the first learning rates from the initial ones.
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

void CyclicLR::write_state(Value::Dict& state) const {
  state.set("max_lrs", max_lrs_);
  state.set("total_size", total_size_);
  state.set("step_ratio", step_ratio_);
  state.set("mode", to_string(mode_));
  state.set("gamma", gamma_);
  state.set("scale_mode", to_string(scale_mode_));
  state.set("cycle_momentum", cycle_momentum_);
  if (cycle_momentum_) {
    state.set("use_beta1", uses_beta1(optimizer()));
    state.set("base_momentums", base_momentums_);
    state.set("max_momentums", max_momentums_);
  }
  LRScheduler::write_state(state);
  state.set("_scale_fn_custom", nullptr);
}

void CyclicLR::read_state(const Value::Dict& state) {
  take_field(state, "max_lrs", max_lrs_);
  take_field(state, "total_size", total_size_);
  take_field(state, "step_ratio", step_ratio_);
  take_field(state, "mode", mode_);
  take_field(state, "gamma", gamma_);
  take_field(state, "scale_mode", scale_mode_);
  take_field(state, "cycle_momentum", cycle_momentum_);
  take_field(state, "base_momentums", base_momentums_);
  take_field(state, "max_momentums", max_momentums_);
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
