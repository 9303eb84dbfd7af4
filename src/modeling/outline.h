// src/modeling/outline.h - a model as the planner of core sees it.
#pragma once

#include <torch/nn/module.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/modeling/planning.h"
#include "core/device_planner.h"

namespace accelerate::detail::modeling {

struct OutlineOptions {
  std::optional<DtypeLike> dtype = std::nullopt;
  std::map<std::string, DtypeLike> special_dtypes = {};
  std::vector<std::string> no_split_module_classes = {};
};

struct ModuleOutline {
  ModelOutline outline;
  /// The modules among the parts; null for tensors.
  std::vector<const torch::nn::Module*> modules;
};
[[nodiscard]] ModuleOutline outline_of(const torch::nn::Module& model,
                                       const OutlineOptions& options);

/// The class of the module is one of these names: "my::BlockImpl", "BlockImpl" or "Block".
[[nodiscard]] bool has_class(const torch::nn::Module& module,
                             const std::vector<std::string>& names);

/// What `hf_device_map` gives for the model from now on; nullopt: nothing, if it is of this owner.
ACCELERATE_API void set_device_map(const std::shared_ptr<const torch::nn::Module>& model,
                                   const std::optional<DeviceMap>& device_map,
                                   const void* owner = nullptr);

}  // namespace accelerate::detail::modeling
