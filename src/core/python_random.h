// src/core/python_random.h - the engine of Python's `random` module.
#pragma once

#include <cstdint>
#include <random>

namespace accelerate::detail::inline core {

/// A Mersenne twister in the state of Python's after `random.seed(seed)`. Python spreads the seed
/// over the state by another rule than std::mt19937, and takes seeds of more than 32 bits.
[[nodiscard]] std::mt19937 python_random_engine(std::uint64_t seed);

}  // namespace accelerate::detail::inline core
