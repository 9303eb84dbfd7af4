// src/optim/optimizer_options.h - options of a parameter group by name, ours and LibTorch's.
//
// For the optimizers of accelerate/optim.h and optim/torch_optimizers.h. Options of any other
// optimizer have no names and no momentum.
#pragma once

#include <torch/optim/optimizer.h>

#include <string_view>

#include "accelerate/value.h"

namespace accelerate::detail::optim {

/// The options that the group has, under Python's names.
[[nodiscard]] Value::Dict options_by_name(const torch::optim::OptimizerOptions& options);

/// Changes the options that `values` names. Throws `ArgumentError` for an invalid value, and for
/// ours also for an unknown name; nothing has changed then.
void update_options(torch::optim::OptimizerOptions& options, const Value::Dict& values);

/// The entries of such a group in Python's state dict, in its order. Options that these do not have
/// are constants.
[[nodiscard]] Value::Dict python_options(const torch::optim::OptimizerOptions& options);
/// Whether `value` is such a constant under `key`.
[[nodiscard]] bool is_python_constant(const torch::optim::OptimizerOptions& options,
                                      std::string_view key, const Value& value);

/// What a cyclic schedule changes against the learning rate: `momentum`, or the first of `betas`.
enum class MomentumKind { kNone, kMomentum, kBeta1 };
[[nodiscard]] MomentumKind momentum_kind(const torch::optim::OptimizerOptions& options);
/// Does nothing for LibTorch's options without momentum; ours throw `ArgumentError`.
void set_momentum(torch::optim::OptimizerOptions& options, double momentum);

}  // namespace accelerate::detail::optim
