// src/sharding/unit_policy.h - which modules of a model are gathered and reduced together.
//
// All functions return dotted names, children before parents. The root, which is always a unit, is
// not among them.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "accelerate/api.h"

namespace accelerate::detail::sharding {

using UnitNames = std::vector<std::string>;

/// Modules of these classes: "Block" names my::BlockImpl. Throws `ConfigError` for a class that no
/// module has.
[[nodiscard]] ACCELERATE_API UnitNames units_by_class(const torch::nn::Module& model,
                                                      const std::vector<std::string>& classes);

/// Modules for which `chosen` returns true.
[[nodiscard]] ACCELERATE_API UnitNames units_by_predicate(
    const torch::nn::Module& model, const std::function<bool(const torch::nn::Module&)>& chosen);

/// Torch's rule for version 1: a module with at least `least` elements that no unit below it has.
/// Lists and dictionaries of modules are no units, and an attention module is not divided.
[[nodiscard]] ACCELERATE_API UnitNames units_by_remaining_size(const torch::nn::Module& model,
                                                               std::int64_t least,
                                                               const UnitNames& ignored = {});

/// Accelerate's rule for version 2: a module with more than `most` elements, those of units below
/// it counted too.
[[nodiscard]] ACCELERATE_API UnitNames units_by_total_size(const torch::nn::Module& model,
                                                           std::int64_t most);

/// DeepSpeed's buckets: the largest modules with at most `bucket` elements, and those between them
/// and the root that hold parameters themselves. `leaves` and what is below them are not divided.
[[nodiscard]] ACCELERATE_API UnitNames units_by_bucket(const torch::nn::Module& model,
                                                       std::int64_t bucket,
                                                       const UnitNames& leaves = {});

/// The modules that are given, or whose whole names match the expression; not those inside of
/// another one. Throws `ConfigError` for a module that the model does not have, and if the model
/// itself is meant.
[[nodiscard]] ACCELERATE_API UnitNames ignored_modules(
    const torch::nn::Module& model,
    const std::variant<std::string, std::vector<std::shared_ptr<torch::nn::Module>>>& ignored);

/// The units that are not in an ignored module.
[[nodiscard]] ACCELERATE_API UnitNames outside_of(const UnitNames& ignored, UnitNames units);

/// The number of elements of all parameters; a shared one counts once.
[[nodiscard]] ACCELERATE_API std::int64_t parameter_elements(const torch::nn::Module& module);
/// The most elements that one of the units has; those of the model if there are no units.
[[nodiscard]] std::int64_t largest_elements(const torch::nn::Module& model, const UnitNames& units);

}  // namespace accelerate::detail::sharding
