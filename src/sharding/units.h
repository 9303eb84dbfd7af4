// src/sharding/units.h - which parameters are gathered and reduced together.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "accelerate/api.h"
#include "sharding/spec.h"

namespace accelerate::detail::sharding {

/// A parameter of a module.
struct PlannedParameter {
  /// The first is what messages call it; the others are tied to it.
  std::vector<std::string> names = {};
  /// Usually one tensor. Several where different tensors have the same elements.
  std::vector<at::Tensor> leaves = {};

  [[nodiscard]] const at::Tensor& tensor() const { return leaves.front(); }
};

struct PlannedUnit {
  /// Of its module; "" for the root.
  std::string name;
  std::vector<PlannedParameter> parameters = {};
};

struct UnitPlan {
  /// The root first, then as the module lists them. Units without parameters are left out.
  std::vector<PlannedUnit> units = {};
  /// Not sharded: of ignored modules, and without elements.
  std::vector<PlannedParameter> whole = {};
};

/// A parameter belongs to the deepest unit that it is in, one with several names to the deepest
/// unit that all of them are in. Throws `ArgumentError` for a name that is no module, and for a
/// buffer that shares memory with a parameter.
[[nodiscard]] ACCELERATE_API UnitPlan plan_units(const torch::nn::Module& module,
                                                 const ShardSpec& spec);

}  // namespace accelerate::detail::sharding
