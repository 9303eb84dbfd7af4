// src/accelerator/stepped_models.h - the names of what an optimizer steps, for its files.
//
// A sharded run saves the state of an optimizer by the names of parameters. Those of the first of
// its models are names of the module; those of a second one begin with "model_1."; a parameter of
// no model has its position in the groups: "group_0.2".
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/sharded_files.h"

namespace accelerate::detail::accelerator {

/// Of one model: the name that it has for each parameter in the groups of an optimizer, in their
/// order; "" for a parameter of others.
using NamesInModel = std::vector<std::string>;

/// The names of all parameters of the optimizer.
[[nodiscard]] std::vector<std::string> stepped_names(const torch::optim::Optimizer& optimizer,
                                                     std::span<const NamesInModel> models);

/// Those of `models` whose parameters the optimizer steps, as one: `names_in` names all parameters.
/// Null if there are none.
[[nodiscard]] std::shared_ptr<checkpoint::ShardedModel> stepped_models(
    const torch::optim::Optimizer& optimizer,
    const std::vector<std::shared_ptr<checkpoint::ShardedModel>>& models);

}  // namespace accelerate::detail::accelerator
