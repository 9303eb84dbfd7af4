// tests/training/scheduler_cases.h - the schedulers of tests/reference/schedulers, by name.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "accelerate/scheduler.h"

namespace accelerate::test {

using BuildScheduler = std::function<std::unique_ptr<LRScheduler>(torch::optim::Optimizer&)>;

/// Builds the same as the reference script.
[[nodiscard]] const std::map<std::string, BuildScheduler>& scheduler_cases();

/// Two parameter groups with learning rates 0.1 and 0.003. "sgd", "rmsprop", "adam" or "adamw".
[[nodiscard]] std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name);

/// The momentum of a group, or its first beta.
[[nodiscard]] double momentum_of(const torch::optim::OptimizerParamGroup& group);

}  // namespace accelerate::test
