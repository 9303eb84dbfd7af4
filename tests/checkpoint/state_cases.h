// tests/checkpoint/state_cases.h - the optimizers of tests/reference/states, by name, and runs of
// optimizers and schedulers that go on from a saved state.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "accelerate/value.h"

namespace accelerate::test {

/// Over two groups: the first two parameters, and the others with a learning rate of 0.02.
using BuildOptimizer =
    std::function<std::shared_ptr<torch::optim::Optimizer>(std::vector<torch::Tensor> params)>;
[[nodiscard]] const std::map<std::string, BuildOptimizer>& optimizer_cases();

inline constexpr int kStepsBefore = 5;
inline constexpr int kStepsAfter = 5;
inline constexpr int kSchedulerSteps = 7;
inline constexpr int kLrs = 20;

/// What the reference script writes of an optimizer: `params` and `state` after `kStepsBefore`
/// steps, `next` after `kStepsAfter` more.
[[nodiscard]] Value optimizer_case(const BuildOptimizer& build);
/// The parameters after `kStepsAfter` steps from `params` and `state` of a case on.
[[nodiscard]] Value continued_optimizer(const BuildOptimizer& build, const Value& saved);

/// What the script writes of a scheduler: `optimizer` and `state` after `kSchedulerSteps` steps,
/// `lr` in the `kLrs` steps that follow.
[[nodiscard]] Value scheduler_case(const std::string& name);
/// The learning rates of `kLrs` steps from `optimizer` and `state` of a case on.
[[nodiscard]] Value continued_scheduler(const std::string& name, const Value& saved);
/// The names of the cases, without those that change learning rates by hand.
[[nodiscard]] std::vector<std::string> scheduler_names();

}  // namespace accelerate::test
