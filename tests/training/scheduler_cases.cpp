#include "training/scheduler_cases.h"

#include <torch/torch.h>

#include <cmath>

namespace accelerate::test {
namespace {

using Optimizer = torch::optim::Optimizer;

template <class Scheduler, class Options>
BuildScheduler made(Options options) {
  return
      [options](Optimizer& optimizer) { return std::make_unique<Scheduler>(optimizer, options); };
}

/// From something that returns a scheduler.
template <class F>
BuildScheduler moved(F f) {
  return [f](Optimizer& optimizer) -> std::unique_ptr<LRScheduler> {
    auto scheduler = f(optimizer);
    return std::make_unique<decltype(scheduler)>(std::move(scheduler));
  };
}

BuildScheduler sequential(std::function<SchedulerList(Optimizer&)> schedulers,
                          std::vector<std::int64_t> milestones) {
  return [=](Optimizer& optimizer) {
    return std::make_unique<SequentialLR>(
        optimizer,
        SequentialLROptions{.schedulers = schedulers(optimizer), .milestones = milestones});
  };
}

double power_of_95(std::int64_t epoch) { return std::pow(0.95, static_cast<double>(epoch)); }

using Cases = std::map<std::string, BuildScheduler>;

Cases formula_cases() {
  const auto always_95 = [](std::int64_t) { return 0.95; };
  const auto falling = [](std::int64_t epoch) { return 1 - 0.001 * static_cast<double>(epoch); };
  const auto inverse = [](std::int64_t epoch) { return 1.0 / static_cast<double>(1 + epoch); };
  return {
      {"lambda", moved([](Optimizer& o) { return LambdaLR(o, power_of_95); })},
      {"lambda_list", made<LambdaLR>(LambdaLROptions{.lr_lambda = {power_of_95, inverse}})},
      {"lambda_by_hand", made<LambdaLR>(LambdaLROptions{.lr_lambda = power_of_95})},
      {"multiplicative", moved([=](Optimizer& o) { return MultiplicativeLR(o, always_95); })},
      {"multiplicative_by_hand",
       made<MultiplicativeLR>(MultiplicativeLROptions{.lr_lambda = {always_95, falling}})},
      {"step", made<StepLR>(StepLROptions{.step_size = 30})},
      {"step_gamma", made<StepLR>(StepLROptions{.step_size = 7, .gamma = 0.9})},
      {"step_by_hand", made<StepLR>(StepLROptions{.step_size = 9, .gamma = 0.7})},
      {"multi_step", made<MultiStepLR>(MultiStepLROptions{.milestones = {3, 30, 80}})},
      {"multi_step_twice",
       made<MultiStepLR>(MultiStepLROptions{.milestones = {50, 5, 5, 20}, .gamma = 0.3})},
      {"constant", moved([](Optimizer& o) { return ConstantLR(o); })},
      {"constant_long", made<ConstantLR>(ConstantLROptions{.factor = 0.7, .total_iters = 40})},
      {"constant_by_hand", made<ConstantLR>(ConstantLROptions{.factor = 0.7, .total_iters = 40})},
      {"linear", moved([](Optimizer& o) { return LinearLR(o); })},
      {"linear_long",
       made<LinearLR>(LinearLROptions{.start_factor = 0.9, .end_factor = 0.1, .total_iters = 150})},
      {"linear_none", made<LinearLR>(LinearLROptions{.total_iters = 0})},
      {"linear_by_hand", made<LinearLR>(LinearLROptions{.start_factor = 0.1, .total_iters = 100})},
      {"exponential", made<ExponentialLR>(ExponentialLROptions{.gamma = 0.97})},
      {"exponential_by_hand", made<ExponentialLR>(ExponentialLROptions{.gamma = 0.97})},
      {"polynomial", moved([](Optimizer& o) { return PolynomialLR(o); })},
      {"polynomial_power",
       made<PolynomialLR>(PolynomialLROptions{.total_iters = 150, .power = 0.9})},
      {"polynomial_by_hand",
       made<PolynomialLR>(PolynomialLROptions{.total_iters = 150, .power = 2.0})},
      {"cosine", made<CosineAnnealingLR>(CosineAnnealingLROptions{.t_max = 100})},
      {"cosine_eta_min",
       made<CosineAnnealingLR>(CosineAnnealingLROptions{.t_max = 37, .eta_min = 0.001})},
      {"cosine_one", made<CosineAnnealingLR>(CosineAnnealingLROptions{.t_max = 1})},
      {"cosine_by_hand",
       made<CosineAnnealingLR>(CosineAnnealingLROptions{.t_max = 45, .eta_min = 0.0001})},
      {"constant_schedule", moved([](Optimizer& o) { return get_constant_schedule(o); })},
      {"constant_with_warmup",
       moved([](Optimizer& o) { return get_constant_schedule_with_warmup(o, 30); })},
      {"linear_with_warmup",
       moved([](Optimizer& o) { return get_linear_schedule_with_warmup(o, 20, 150); })},
      {"linear_without_warmup",
       moved([](Optimizer& o) { return get_linear_schedule_with_warmup(o, 0, 200); })},
      {"cosine_with_warmup",
       moved([](Optimizer& o) { return get_cosine_schedule_with_warmup(o, 20, 180); })},
      {"cosine_cycles",
       moved([](Optimizer& o) { return get_cosine_schedule_with_warmup(o, 10, 190, 1.5); })},
  };
}

Cases cycle_cases() {
  using Restarts = CosineAnnealingWarmRestarts;
  using RestartOptions = CosineAnnealingWarmRestartsOptions;
  return {
      {"warm_restarts", made<Restarts>(RestartOptions{.t_0 = 20})},
      {"warm_restarts_longer",
       made<Restarts>(RestartOptions{.t_0 = 5, .t_mult = 2, .eta_min = 0.001})},
      {"one_cycle", made<OneCycleLR>(OneCycleLROptions{.max_lr = 0.2, .total_steps = 200})},
      {"one_cycle_adamw", made<OneCycleLR>(OneCycleLROptions{
                              .max_lr = {0.2, 0.01}, .epochs = 10, .steps_per_epoch = 20})},
      {"one_cycle_three_phase", made<OneCycleLR>(OneCycleLROptions{.max_lr = 0.1,
                                                                   .total_steps = 203,
                                                                   .pct_start = 0.25,
                                                                   .div_factor = 10.0,
                                                                   .final_div_factor = 100.0,
                                                                   .three_phase = true})},
      {"one_cycle_linear_adam",
       made<OneCycleLR>(OneCycleLROptions{.max_lr = 0.1,
                                          .total_steps = 211,
                                          .anneal_strategy = AnnealStrategy::kLinear,
                                          .base_momentum = {0.8, 0.7},
                                          .max_momentum = 0.97})},
      {"one_cycle_plain",
       made<OneCycleLR>(OneCycleLROptions{
           .max_lr = 0.1, .total_steps = 200, .pct_start = 0.0, .cycle_momentum = false})},
      {"cyclic",
       made<CyclicLR>(CyclicLROptions{.base_lr = 0.01, .max_lr = 0.1, .step_size_up = 13})},
      {"cyclic_adam", made<CyclicLR>(CyclicLROptions{.base_lr = {0.01, 0.001},
                                                     .max_lr = {0.1, 0.05},
                                                     .step_size_up = 20,
                                                     .step_size_down = 33,
                                                     .mode = CyclicMode::kTriangular2})},
      {"cyclic_rmsprop", made<CyclicLR>(CyclicLROptions{.base_lr = 0.01,
                                                        .max_lr = 0.1,
                                                        .step_size_up = 17,
                                                        .mode = CyclicMode::kExpRange,
                                                        .gamma = 0.99,
                                                        .base_momentum = 0.6,
                                                        .max_momentum = 0.95})},
      {"cyclic_scale", made<CyclicLR>(CyclicLROptions{
                           .base_lr = 0.01,
                           .max_lr = 0.1,
                           .step_size_up = 11,
                           .scale_fn = [](double x) { return 1 / std::pow(5, x * 0.0001); },
                           .scale_mode = CyclicScaleMode::kIterations})},
      {"cyclic_scale_cycle",
       made<CyclicLR>(CyclicLROptions{.base_lr = 0.01,
                                      .max_lr = 0.1,
                                      .step_size_up = 11,
                                      .scale_fn = [](double x) { return 1 / x; },
                                      .cycle_momentum = false})},
  };
}

Cases chain_cases() {
  return {
      {"sequential", sequential(
                         [](Optimizer& o) {
                           return SchedulerList{
                               LinearLR(o, {.start_factor = 0.1, .total_iters = 20}),
                               CosineAnnealingLR(o, {.t_max = 180})};
                         },
                         {20})},
      {"sequential_three", sequential(
                               [](Optimizer& o) {
                                 return SchedulerList{
                                     ConstantLR(o, {.factor = 0.1, .total_iters = 10}),
                                     std::make_shared<ExponentialLR>(
                                         o, ExponentialLROptions{.gamma = 0.9}),
                                     StepLR(o, {.step_size = 5, .gamma = 0.5})};
                               },
                               {5, 40})},
      {"sequential_early",
       sequential(
           [](Optimizer& o) {
             return SchedulerList{MultiStepLR(o, {.milestones = {2}}),
                                  PolynomialLR(o, {.total_iters = 50, .power = 2.0}), LinearLR(o)};
           },
           {3, 6})},
      {"sequential_restarts",
       sequential(
           [](Optimizer& o) {
             const auto power_of_99 = [](std::int64_t e) { return std::pow(0.99, e); };
             return SchedulerList{LinearLR(o, {.start_factor = 0.2, .total_iters = 4}),
                                  CosineAnnealingWarmRestarts(o, {.t_0 = 10, .t_mult = 2}),
                                  LambdaLR(o, power_of_99)};
           },
           {4, 90})},
      {"sequential_cycles", sequential(
                                [](Optimizer& o) {
                                  return SchedulerList{
                                      OneCycleLR(o, {.max_lr = 0.2, .total_steps = 60}),
                                      CyclicLR(
                                          o, {.base_lr = 0.01, .max_lr = 0.1, .step_size_up = 13})};
                                },
                                {50})},
      {"sequential_by_hand", sequential(
                                 [](Optimizer& o) {
                                   return SchedulerList{
                                       LinearLR(o, {.start_factor = 0.1, .total_iters = 30}),
                                       StepLR(o, {.step_size = 30, .gamma = 0.5})};
                                 },
                                 {40})},
      {"sequential_nested",
       sequential(
           [](Optimizer& o) {
             return SchedulerList{
                 ChainedScheduler({ConstantLR(o, {.factor = 0.1, .total_iters = 10}),
                                   ExponentialLR(o, {.gamma = 0.9})}),
                 StepLR(o, {.step_size = 5, .gamma = 0.5})};
           },
           {25})},
      {"chained", moved([](Optimizer& o) {
         return ChainedScheduler({ConstantLR(o, {.factor = 0.1, .total_iters = 20}),
                                  ExponentialLR(o, {.gamma = 0.95})});
       })},
      {"chained_three", moved([](Optimizer& o) {
         return ChainedScheduler(
             {LinearLR(o, {.start_factor = 0.5, .total_iters = 11}),
              StepLR(o, {.step_size = 25, .gamma = 0.3}), CosineAnnealingLR(o, {.t_max = 300})},
             o);
       })},
      {"chained_sequential", moved([](Optimizer& o) {
         return ChainedScheduler(
             {SequentialLR(o, {.schedulers = {LinearLR(o, {.start_factor = 0.1, .total_iters = 20}),
                                              ExponentialLR(o, {.gamma = 0.99})},
                               .milestones = {20}}),
              MultiStepLR(o, {.milestones = {60, 90}})});
       })},
  };
}

Cases plateau_cases() {
  return {
      {"plateau", moved([](Optimizer& o) { return ReduceLROnPlateau(o); })},
      {"plateau_max", made<ReduceLROnPlateau>(
                          ReduceLROnPlateauOptions{.mode = PlateauMode::kMax,
                                                   .factor = 0.5,
                                                   .patience = 3,
                                                   .threshold = 0.01,
                                                   .threshold_mode = PlateauThresholdMode::kAbs,
                                                   .cooldown = 2,
                                                   .min_lr = {0.001, 0.0005}})},
      {"plateau_rel", made<ReduceLROnPlateau>(ReduceLROnPlateauOptions{.mode = PlateauMode::kMax,
                                                                       .factor = 0.8,
                                                                       .patience = 0,
                                                                       .threshold = 0.05,
                                                                       .min_lr = 1e-3})},
      {"plateau_abs", made<ReduceLROnPlateau>(
                          ReduceLROnPlateauOptions{.factor = 0.5,
                                                   .patience = 1,
                                                   .threshold = 0.2,
                                                   .threshold_mode = PlateauThresholdMode::kAbs,
                                                   .cooldown = 5,
                                                   .eps = 1e-3})},
      {"plateau_by_hand",
       made<ReduceLROnPlateau>(ReduceLROnPlateauOptions{.factor = 0.5, .patience = 2})},
  };
}

template <class Optimizer_, class Options>
std::unique_ptr<Optimizer> two_groups(Options options) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const auto lr : {0.1, 0.003}) {
    options.lr(lr);
    groups.emplace_back(std::vector<torch::Tensor>{torch::zeros({1}, torch::requires_grad())},
                        std::make_unique<Options>(options));
  }
  return std::make_unique<Optimizer_>(groups, options);
}

}  // namespace

const std::map<std::string, BuildScheduler>& scheduler_cases() {
  static const auto all = [] {
    auto cases = formula_cases();
    for (auto&& part : {cycle_cases(), chain_cases(), plateau_cases()}) {
      cases.insert(part.begin(), part.end());
    }
    return cases;
  }();
  return all;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name) {
  if (name == "adam") return two_groups<torch::optim::Adam>(torch::optim::AdamOptions());
  if (name == "adamw") return two_groups<torch::optim::AdamW>(torch::optim::AdamWOptions());
  if (name == "rmsprop") {
    return two_groups<torch::optim::RMSprop>(torch::optim::RMSpropOptions().momentum(0.5));
  }
  return two_groups<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9));
}

double momentum_of(const torch::optim::OptimizerParamGroup& group) {
  const auto* options = &group.options();
  if (const auto* adam = dynamic_cast<const torch::optim::AdamOptions*>(options)) {
    return std::get<0>(adam->betas());
  }
  if (const auto* adamw = dynamic_cast<const torch::optim::AdamWOptions*>(options)) {
    return std::get<0>(adamw->betas());
  }
  if (const auto* rmsprop = dynamic_cast<const torch::optim::RMSpropOptions*>(options)) {
    return rmsprop->momentum();
  }
  return dynamic_cast<const torch::optim::SGDOptions&>(*options).momentum();
}

}  // namespace accelerate::test
