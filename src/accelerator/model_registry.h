// src/accelerator/model_registry.h - all models of the process that have an engine.
//
// Whether a loss reaches a model does not depend on the accelerator that runs backward: another
// accelerator may have prepared it, or one that was told to forget its models while the program
// keeps a handle.
#pragma once

#include <memory>
#include <vector>

#include "accelerate/prepared_model.h"

namespace accelerate::detail::accelerator {

/// Does not keep the model alive. `model` must have an engine.
void add_to_model_registry(const std::shared_ptr<ModelCore>& model);

/// Replaces `models` by those that still exist, in the order of preparation, which is the same on
/// all processes. Allocates nothing if `models` has the capacity.
void list_model_registry(std::vector<std::shared_ptr<ModelCore>>& models);

/// The engines of these models.
[[nodiscard]] std::vector<std::shared_ptr<parallel::Engine>> list_engines();

}  // namespace accelerate::detail::accelerator
