// src/fp8/converted.h - conversions as `prepare` does them.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/kwargs/fp8_recipes.h"
#include "fp8/delayed_scaling.h"

namespace accelerate::detail::fp8 {

class LinearRule;

/// A linear layer of a model, and its rule if it is converted.
struct LinearLayer {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
  std::shared_ptr<LinearRule> rule;
};

/// The converted layers, before a model moves: moving takes the rules off.
[[nodiscard]] ACCELERATE_API std::vector<LinearLayer> converted_layers(
    const torch::nn::Module& model);
/// Gives the layers their rules back.
ACCELERATE_API void restore(const std::vector<LinearLayer>& layers);

/// `kwargs` are resolved. Layers that are converted already stay as they are.
ACCELERATE_API void convert_with_current_scales(torch::nn::Module& model,
                                                const AORecipeKwargs& kwargs);
/// The same with delayed scales, which are returned: every `Linear` whose feature counts are
/// multiples of 16. Null if there is none.
[[nodiscard]] ACCELERATE_API std::shared_ptr<DelayedScaling> convert_with_delayed_scales(
    torch::nn::Module& model, const TERecipeKwargs& kwargs);

}  // namespace accelerate::detail::fp8
