// src/formats/key_mapping.h - from the names in a file to the tensors that a mapping makes of them.
//
// The result says how each tensor is made, as data: who has the tensors carries it out.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "accelerate/checkpoint/key_mapping.h"

namespace accelerate::detail::formats {

struct TensorRecipe;
using RecipePointer = std::shared_ptr<const TensorRecipe>;

/// How one tensor is made of those in the file.
struct TensorRecipe {
  struct FromFile {
    std::string key;
  };
  struct Transpose {
    RecipePointer of;
    std::int64_t dim0;
    std::int64_t dim1;
  };
  struct Part {
    RecipePointer of;
    std::int64_t dim;
    std::size_t index;
    std::size_t count;
    std::vector<std::int64_t> sizes;  ///< of all parts; empty: they are equal
  };
  struct Join {
    std::vector<RecipePointer> of;
    std::int64_t dim;
  };
  std::variant<FromFile, Transpose, Part, Join> step;
  /// Steps in all, those of its inputs included: bounds the work of carrying it out.
  std::size_t steps = 1;
};

/// The recipe that ends with `step`.
[[nodiscard]] RecipePointer make_recipe(
    std::variant<TensorRecipe::FromFile, TensorRecipe::Transpose, TensorRecipe::Part,
                 TensorRecipe::Join> step);

struct MappedTensor {
  std::string name;
  RecipePointer recipe;
};

struct MappedTensors {
  std::vector<MappedTensor> tensors;  ///< in the order of the file
  KeyMappingReport report;
};

/// What rules of unknown origin may cost.
struct KeyMappingLimits {
  /// Of the matcher; these take about half a minute.
  std::uint64_t steps = 4'000'000'000;
  /// That all rules together add to the list of names.
  std::size_t bytes = std::size_t{128} << 20;
};

/// Throws `ConfigError` if two tensors get one name, a name gets empty or longer than 64 KiB, or
/// the rules make too many names, need too many steps for one tensor or take too long.
[[nodiscard]] MappedTensors map_keys(const KeyMapping& mapping,
                                     const std::vector<std::string>& names,
                                     const KeyMappingLimits& limits = {});

}  // namespace accelerate::detail::formats
