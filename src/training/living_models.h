// src/training/living_models.h - all models of the process whose gradients are averaged.
//
// Whether a loss reaches a model has nothing to do with the accelerator that runs backward: another
// one may, or one that was told to forget its models while the program keeps a handle.
#pragma once

#include <memory>
#include <vector>

#include "accelerate/prepared_model.h"

namespace accelerate::detail {

/// Keeps no model alive. `model` must have a `DataParallel`.
void add_living_model(const std::shared_ptr<ModelCore>& model);

/// Puts those that are still there into `models`, in the order of preparation, which is the same on
/// all processes. Allocates nothing where `models` has the room.
void living_models(std::vector<std::shared_ptr<ModelCore>>& models);

}  // namespace accelerate::detail
