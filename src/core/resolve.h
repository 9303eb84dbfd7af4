// src/core/resolve.h - `resolved` of accelerate/record.h that hands its warnings over.
#pragma once

#include <string>
#include <vector>

#include "accelerate/record.h"

namespace accelerate::detail {

/// What the user should hear, in order. `resolved` logs each once; defaults are built in silence.
using Warnings = std::vector<std::string>;

template <Record T>
[[nodiscard]] T resolve(const T& record, const Environment& environment, Warnings& warnings);

/// A switch that Python compares with the word "true": any truth word counts here, which is said
/// where Python would have read it as false.
[[nodiscard]] bool read_true_word(const Environment& environment, const std::string& variable,
                                  bool fallback, Warnings& warnings);

}  // namespace accelerate::detail
