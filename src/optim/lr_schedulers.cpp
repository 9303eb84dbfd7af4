#include "accelerate/scheduler/lr_schedulers.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <span>
#include <type_traits>

#include "accelerate/errors.h"
#include "accelerate/scheduler/deepspeed_schedulers.h"
#include "accelerate/scheduler/lambda_schedulers.h"
#include "core/text.h"
#include "optim/group_schedule.h"
#include "optim/optimizer_options.h"
#include "optim/scheduler_state.h"

namespace accelerate {
namespace {

using detail::str;
using std::numbers::pi;

/// One parameter group at one step.
struct GroupStep {
  std::int64_t epoch;
  std::int64_t step_count;
  bool is_initial;
  /// The current learning rate.
  double lr;
  std::size_t group;
  std::size_t group_count;
  std::span<const double> base_lrs;

  [[nodiscard]] double base_lr() const {
    if (group >= base_lrs.size()) detail::optim::refuse_group_count(base_lrs.size(), group_count);
    return base_lrs[group];
  }
};

double real(std::int64_t number) { return static_cast<double>(number); }

template <class T>
void require(bool valid, std::string_view option, const T& value, std::string_view range) {
  if (!valid) throw ArgumentError(str(option, " is ", value, "; it must be ", range, "."));
}

/// The closed form divides by it, the recurrence does not.
void require_iterations(std::int64_t total_iters, std::string_view scheduler) {
  if (total_iters != 0) return;
  throw StateError(str(scheduler, " with total_iters = 0 cannot begin at a milestone. ",
                       "Give it at least one, or leave it out."));
}

// For each scheduler: the entries of its state, the valid options, the next learning rate of a
// group, and the learning rate of an epoch in closed form. The order of operations is Python's, so
// that results agree to the last bit.

constexpr auto state_fields(std::type_identity<StepLROptions>) {
  return ACCELERATE_FIELDS(StepLROptions, step_size, gamma);
}
void check(const StepLROptions& o) {
  require(o.step_size >= 1, "step_size of StepLR", o.step_size, "at least 1");
}
double next_lr(const StepLROptions& o, const GroupStep& at) {
  return at.epoch == 0 || at.epoch % o.step_size != 0 ? at.lr : at.lr * o.gamma;
}
double closed_form(const StepLROptions& o, std::int64_t epoch, double base_lr) {
  return base_lr * std::pow(o.gamma, real(epoch / o.step_size));
}

void check(const MultiStepLROptions& /*o*/) {}
double next_lr(const MultiStepLROptions& o, const GroupStep& at) {
  return at.lr * std::pow(o.gamma, real(std::ranges::count(o.milestones, at.epoch)));
}
double closed_form(const MultiStepLROptions& o, std::int64_t epoch, double base_lr) {
  const auto passed = [&](std::int64_t milestone) { return milestone <= epoch; };
  return base_lr * std::pow(o.gamma, real(std::ranges::count_if(o.milestones, passed)));
}

constexpr auto state_fields(std::type_identity<ConstantLROptions>) {
  return ACCELERATE_FIELDS(ConstantLROptions, factor, total_iters);
}
void check(const ConstantLROptions& o) {
  require(o.factor >= 0 && o.factor <= 1, "factor of ConstantLR", o.factor, "between 0 and 1");
}
double next_lr(const ConstantLROptions& o, const GroupStep& at) {
  if (at.epoch == 0) return at.lr * o.factor;
  if (at.epoch != o.total_iters) return at.lr;
  if (o.factor == 0) {
    throw StateError(str("ConstantLR cannot undo its factor 0 at total_iters = ", o.total_iters,
                         ". Give it a factor above 0."));
  }
  return at.lr * (1.0 / o.factor);
}
double closed_form(const ConstantLROptions& o, std::int64_t epoch, double base_lr) {
  return base_lr * (o.factor + (epoch >= o.total_iters ? 1 : 0) * (1 - o.factor));
}

constexpr auto state_fields(std::type_identity<LinearLROptions>) {
  return ACCELERATE_FIELDS(LinearLROptions, start_factor, end_factor, total_iters);
}
void check(const LinearLROptions& o) {
  require(o.start_factor > 0 && o.start_factor <= 1, "start_factor of LinearLR", o.start_factor,
          "greater than 0 and at most 1");
  require(o.end_factor >= 0 && o.end_factor <= 1, "end_factor of LinearLR", o.end_factor,
          "between 0 and 1");
}
double next_lr(const LinearLROptions& o, const GroupStep& at) {
  if (at.epoch == 0) return at.lr * o.start_factor;
  if (at.is_initial || at.epoch > o.total_iters) return at.lr;
  const auto rise = o.end_factor - o.start_factor;
  return at.lr * (1.0 + rise / (real(o.total_iters) * o.start_factor + real(at.epoch - 1) * rise));
}
double closed_form(const LinearLROptions& o, std::int64_t epoch, double base_lr) {
  require_iterations(o.total_iters, "LinearLR");
  const auto passed = real(std::min(o.total_iters, epoch));
  return base_lr *
         (o.start_factor + (o.end_factor - o.start_factor) * passed / real(o.total_iters));
}

constexpr auto state_fields(std::type_identity<ExponentialLROptions>) {
  return ACCELERATE_FIELDS(ExponentialLROptions, gamma);
}
void check(const ExponentialLROptions& o) {
  if (!o.gamma) throw ArgumentError("gamma of ExponentialLR is not set; give the factor.");
}
double next_lr(const ExponentialLROptions& o, const GroupStep& at) {
  return at.is_initial ? at.lr : at.lr * *o.gamma;
}
double closed_form(const ExponentialLROptions& o, std::int64_t epoch, double base_lr) {
  return base_lr * std::pow(*o.gamma, real(epoch));
}

constexpr auto state_fields(std::type_identity<PolynomialLROptions>) {
  return ACCELERATE_FIELDS(PolynomialLROptions, total_iters, power);
}
void check(const PolynomialLROptions& /*o*/) {}
double next_lr(const PolynomialLROptions& o, const GroupStep& at) {
  if (at.is_initial || at.epoch > o.total_iters) return at.lr;
  const auto left = 1.0 - real(at.epoch) / real(o.total_iters);
  const auto left_before = 1.0 - real(at.epoch - 1) / real(o.total_iters);
  return at.lr * std::pow(left / left_before, o.power);
}
double closed_form(const PolynomialLROptions& o, std::int64_t epoch, double base_lr) {
  require_iterations(o.total_iters, "PolynomialLR");
  const auto passed = real(std::min(o.total_iters, epoch));
  return base_lr * std::pow(1.0 - passed / real(o.total_iters), o.power);
}

constexpr auto state_fields(std::type_identity<CosineAnnealingLROptions>) {
  return std::tuple{field("T_max", &CosineAnnealingLROptions::t_max),
                    field("eta_min", &CosineAnnealingLROptions::eta_min)};
}
void check(const CosineAnnealingLROptions& o) {
  require(o.t_max >= 1, "t_max of CosineAnnealingLR", o.t_max, "at least 1");
}
double closed_form(const CosineAnnealingLROptions& o, std::int64_t epoch, double base_lr) {
  return o.eta_min + (base_lr - o.eta_min) * (1 + std::cos(pi * real(epoch) / real(o.t_max))) / 2;
}
double next_lr(const CosineAnnealingLROptions& o, const GroupStep& at) {
  if (at.is_initial) return at.lr;
  if (at.step_count == 1 && at.epoch > 0) return closed_form(o, at.epoch, at.base_lr());
  const auto t_max = real(o.t_max);
  if ((at.epoch - 1 - o.t_max) % (2 * o.t_max) == 0) {
    // At the lowest point the recurrence below would divide by zero.
    return at.lr + (at.base_lr() - o.eta_min) * (1 - std::cos(pi / t_max)) / 2;
  }
  const auto ratio =
      (1 + std::cos(pi * real(at.epoch) / t_max)) / (1 + std::cos(pi * real(at.epoch - 1) / t_max));
  return ratio * (at.lr - o.eta_min) + o.eta_min;
}

// DeepSpeed's schedulers. Their iterations count from 0 after the first step.

template <class Options>
concept DeepSpeedSchedule = requires { value_fields(std::type_identity<Options>()); };

template <DeepSpeedSchedule Options>
constexpr auto state_fields(std::type_identity<Options>) {
  return std::tuple{};
}

/// From 0 to 1; nullopt after the warmup.
template <class Options>
std::optional<double> warmup(const Options& o, std::int64_t iteration) {
  const auto steps = std::max<std::int64_t>(2, o.warmup_num_steps);
  if (iteration >= steps) return std::nullopt;
  if (iteration < 0) return 0.0;
  return o.warmup_type == "log" ? std::log(real(iteration + 1)) / std::log(real(steps))
                                : real(iteration) / real(steps);
}
/// The part of the steps after the warmup that `passed` is; more than 1 at the end.
template <class Options>
double after_warmup(const Options& o, std::int64_t passed) {
  const auto steps = std::max<std::int64_t>(2, o.warmup_num_steps);
  return real(passed) / real(std::max<std::int64_t>(1, o.total_num_steps - steps));
}
template <class Options>
void check_warmup(const Options& o) {
  require(o.warmup_type == "log" || o.warmup_type == "linear", "warmup_type", o.warmup_type,
          "log or linear");
  require(o.warmup_num_steps >= 0, "warmup_num_steps", o.warmup_num_steps, "at least 0");
  if constexpr (requires { o.total_num_steps; }) {
    require(o.total_num_steps >= 1, "total_num_steps", o.total_num_steps, "at least 1");
  }
}

void check(const WarmupLROptions& o) { check_warmup(o); }
double closed_form(const WarmupLROptions& o, std::int64_t epoch, double /*base_lr*/) {
  return o.warmup_min_lr + warmup(o, epoch - 1).value_or(1) * (o.warmup_max_lr - o.warmup_min_lr);
}

void check(const WarmupDecayLROptions& o) { check_warmup(o); }
double closed_form(const WarmupDecayLROptions& o, std::int64_t epoch, double /*base_lr*/) {
  const auto left = std::max(0.0, after_warmup(o, o.total_num_steps - (epoch - 1)));
  return o.warmup_min_lr +
         warmup(o, epoch - 1).value_or(left) * (o.warmup_max_lr - o.warmup_min_lr);
}

void check(const WarmupCosineLROptions& o) { check_warmup(o); }
double closed_form(const WarmupCosineLROptions& o, std::int64_t epoch, double base_lr) {
  if (const auto rise = warmup(o, epoch - 1)) {
    return base_lr * (o.warmup_min_ratio + *rise * (1 - o.warmup_min_ratio));
  }
  const auto steps = std::max<std::int64_t>(2, o.warmup_num_steps);
  const auto passed = std::min(1.0, after_warmup(o, epoch - steps));
  return base_lr * (o.cos_min_ratio + (1 - o.cos_min_ratio) * (1 + std::cos(pi * passed)) / 2);
}

void check(const LRRangeTestOptions& o) {
  require(o.lr_range_test_step_size >= 1, "lr_range_test_step_size", o.lr_range_test_step_size,
          "at least 1");
}
double closed_form(const LRRangeTestOptions& o, std::int64_t epoch, double /*base_lr*/) {
  const auto interval = real(epoch) / real(o.lr_range_test_step_size);
  return o.lr_range_test_min_lr *
         (1 + o.lr_range_test_step_rate *
                  (o.lr_range_test_staircase ? std::floor(interval) : interval));
}

void check(const OneCycleOptions& o) {
  require(o.cycle_max_lr > 0, "cycle_max_lr", o.cycle_max_lr, "set, and above 0");
  require(o.cycle_first_step_size >= 1, "cycle_first_step_size", o.cycle_first_step_size,
          "at least 1");
}
/// How far the cycle has risen, from 0 to 1; nullopt in the decay, whose steps `decay` counts.
std::optional<double> cycle(const OneCycleOptions& o, std::int64_t epoch, double& decay) {
  const auto first = real(o.cycle_first_step_size);
  const auto total = first + real(o.cycle_second_step_size.value_or(o.cycle_first_step_size));
  if (real(epoch - 1) >= total) {
    decay = o.decay_step_size == 0 ? 0 : (real(epoch) - total) / real(o.decay_step_size);
    return std::nullopt;
  }
  const auto ratio = first / total;
  const auto passed = std::fmod(real(epoch) / total, 1.0);
  return passed <= ratio ? passed / ratio : (passed - 1) / (ratio - 1);
}
double closed_form(const OneCycleOptions& o, std::int64_t epoch, double /*base_lr*/) {
  double decay = 0;
  const auto height = cycle(o, epoch, decay);
  if (!height) return o.cycle_min_lr / (1 + o.decay_lr_rate * decay);
  return o.cycle_min_lr + (o.cycle_max_lr - o.cycle_min_lr) * *height;
}
/// The first of `betas`, against the learning rate.
double momentum(const OneCycleOptions& o, std::int64_t epoch) {
  double decay = 0;
  const auto height = cycle(o, epoch, decay);
  if (!height) return o.cycle_max_mom * (1 + o.decay_mom_rate * decay);
  return o.cycle_max_mom - (o.cycle_max_mom - o.cycle_min_mom) * *height;
}

template <DeepSpeedSchedule Options>
double next_lr(const Options& o, const GroupStep& at) {
  return closed_form(o, at.epoch, at.base_lr());
}

template <class Options>
concept HasLambdas = requires(Options options) { options.lr_lambda; };
template <HasLambdas Options>
constexpr auto state_fields(std::type_identity<Options>) {
  return std::tuple{};
}
template <HasLambdas Options>
void check(const Options& /*o*/) {}  // `expand` has checked them

/// The factor of the group in this epoch.
double lambda_factor(const LrLambdas& lr_lambda, const GroupStep& at) {
  const auto& functions = lr_lambda.functions();
  if (at.group >= functions.size())
    detail::optim::refuse_group_count(functions.size(), at.group_count);
  return functions[at.group](at.epoch);
}

double next_lr(const LambdaLROptions& o, const GroupStep& at) {
  return lambda_factor(o.lr_lambda, at) * at.base_lr();
}

double next_lr(const MultiplicativeLROptions& o, const GroupStep& at) {
  return at.is_initial ? at.lr : lambda_factor(o.lr_lambda, at) * at.lr;
}

template <class Options>
void write_options(const Options& options, Value::Dict& state) {
  detail::optim::write_fields(state, options, state_fields(std::type_identity<Options>()));
}
template <class Options>
void read_options(Options& options, const Value::Dict& state) {
  detail::optim::read_fields(state, options, state_fields(std::type_identity<Options>()));
}

/// The milestones as Python has them: how often each epoch is listed.
struct MilestoneCounts {
  std::map<std::int64_t, std::int64_t> milestones;
};
void write_options(const MultiStepLROptions& options, Value::Dict& state) {
  MilestoneCounts counts;
  for (const auto epoch : options.milestones) ++counts.milestones[epoch];
  detail::optim::write_fields(state, counts, ACCELERATE_FIELDS(MilestoneCounts, milestones));
  detail::optim::write_fields(state, options, ACCELERATE_FIELDS(MultiStepLROptions, gamma));
}
void read_options(MultiStepLROptions& options, const Value::Dict& state) {
  MilestoneCounts counts;
  for (const auto epoch : options.milestones) ++counts.milestones[epoch];
  detail::optim::read_fields(state, counts, ACCELERATE_FIELDS(MilestoneCounts, milestones));
  detail::optim::read_fields(state, options, ACCELERATE_FIELDS(MultiStepLROptions, gamma));
  options.milestones.clear();
  for (const auto& [epoch, times] : counts.milestones) {
    constexpr std::int64_t kMost = 1'000'000;
    require(times >= 0 && times <= kMost, "A count of milestones in the state", times,
            str("from 0 to ", kMost));
    options.milestones.insert(options.milestones.end(), static_cast<std::size_t>(times), epoch);
  }
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

template <class Options>
FormulaLR<Options>::FormulaLR(torch::optim::Optimizer& optimizer, Options options)
    : LRScheduler(optimizer), options_(std::move(options)) {
  if constexpr (HasLambdas<Options>) options_.lr_lambda = options_.lr_lambda.expand(group_count());
  check(options_);
  initialize(options_.last_epoch);
}

template <class Options>
std::vector<double> FormulaLR<Options>::get_lr() {
  auto lrs = group_lrs();
  for (std::size_t i = 0; i < lrs.size(); ++i) {
    lrs[i] = next_lr(options_, {.epoch = last_epoch(),
                                .step_count = step_count(),
                                .is_initial = is_initial(),
                                .lr = lrs[i],
                                .group = i,
                                .group_count = lrs.size(),
                                .base_lrs = base_lrs()});
  }
  if constexpr (std::same_as<Options, OneCycleOptions>) {
    using detail::optim::MomentumKind;
    const auto kind = detail::optim::momentum_kind(optimizer().defaults());
    if (options_.cycle_momentum && kind == MomentumKind::kBeta1) {
      for (auto& group : optimizer().param_groups()) {
        detail::optim::set_momentum(group.options(), momentum(options_, last_epoch()));
      }
    }
  }
  return lrs;
}

template <class Options>
std::optional<std::vector<double>> FormulaLR<Options>::get_closed_form_lr() const {
  if constexpr (HasLambdas<Options>) {
    return std::nullopt;
  } else {
    auto lrs = base_lrs();
    for (auto& lr : lrs) lr = closed_form(options_, last_epoch(), lr);
    return lrs;
  }
}

template <class Options>
void FormulaLR<Options>::write_state(Value::Dict& state) const {
  write_options(options_, state);
  LRScheduler::write_state(state);
  if constexpr (HasLambdas<Options>) {
    state.set("lr_lambdas", Value::List(options_.lr_lambda.functions().size()));
  }
}

template <class Options>
void FormulaLR<Options>::read_state(const Value::Dict& state) {
  auto options = options_;
  read_options(options, state);
  check(options);
  options_ = std::move(options);
  LRScheduler::read_state(state);
}

template class FormulaLR<StepLROptions>;
template class FormulaLR<MultiStepLROptions>;
template class FormulaLR<ConstantLROptions>;
template class FormulaLR<LinearLROptions>;
template class FormulaLR<ExponentialLROptions>;
template class FormulaLR<PolynomialLROptions>;
template class FormulaLR<CosineAnnealingLROptions>;
template class FormulaLR<WarmupLROptions>;
template class FormulaLR<WarmupDecayLROptions>;
template class FormulaLR<WarmupCosineLROptions>;
template class FormulaLR<LRRangeTestOptions>;
template class FormulaLR<OneCycleOptions>;
template class FormulaLR<LambdaLROptions>;
template class FormulaLR<MultiplicativeLROptions>;

}  // namespace accelerate
