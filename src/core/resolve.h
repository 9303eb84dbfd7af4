// src/core/resolve.h - `resolved` of accelerate/kwargs/options.h that returns its warnings.
#pragma once

#include <string>
#include <vector>

#include "accelerate/kwargs/options.h"

namespace accelerate::detail::inline core {

/// Warnings for the user, in order. `resolved` logs each once.
using Warnings = std::vector<std::string>;

template <OptionsStruct T>
[[nodiscard]] T resolve(const T& given, const Environment& environment, Warnings& warnings);

/// A switch that Python compares with the word "true". Any truth word counts here; warns where
/// Python would have read it as false.
[[nodiscard]] bool read_true_word(const Environment& environment, const std::string& variable,
                                  Warnings& warnings);

}  // namespace accelerate::detail::inline core
