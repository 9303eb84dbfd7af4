// accelerate/random.h - seeds, random states, and how processes come to share one.
//
//     accelerate::set_seed(42);                           // the same numbers as in Python
//     accelerate::set_seed(42, {.device_specific = true}); // seed 42 + rank
//
// Functions marked "Collective" must be called by every process.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <random>
#include <source_location>
#include <span>
#include <string>

#include "accelerate/api.h"
#include "accelerate/enums.h"
#include "accelerate/fwd.h"

namespace accelerate {

struct SeedOptions {
  /// Add the rank of the process, so that every process draws other numbers.
  bool device_specific = false;
  /// Let Torch use deterministic algorithms only; an operator without one throws.
  bool deterministic = false;
};

/// Seeds Torch on the CPU and on every accelerator, `host_rng` and `numpy_rng`.
///
/// Draws of Torch on the CPU equal Python's after the same seed. With `deterministic` on a GPU,
/// CUBLAS_WORKSPACE_CONFIG is set to :4096:8 unless it is set already; where that comes too late
/// for this process there is a warning.
ACCELERATE_API void set_seed(std::uint64_t seed, const SeedOptions& options = {});

/// The engine this library draws from where Python would use its `random` module. Seeded by
/// `set_seed`, it gives the 32-bit words of Python's `random.getrandbits(32)`. Not for concurrent
/// use.
[[nodiscard]] ACCELERATE_API std::mt19937& host_rng();

/// The engine in place of numpy's global generator. This library never draws from it; `set_seed`
/// seeds it as `numpy.random.seed`, and checkpoints carry its state between Python and C++.
[[nodiscard]] ACCELERATE_API std::mt19937& numpy_rng();

/// The state of a generator as Torch writes it: uint8, on the CPU.
///
/// `kTorch` is the default CPU generator, `kCuda` that of the current device, `kGenerator` the one
/// that is passed. Throws `ArgumentError` when `kGenerator` has none, `UnsupportedError` naming the
/// hardware that is not there.
[[nodiscard]] ACCELERATE_API at::Tensor get_rng_state(
    RNGType type, const std::optional<at::Generator>& generator = std::nullopt);

/// Puts back what `get_rng_state` returned. Throws likewise.
ACCELERATE_API void set_rng_state(RNGType type, const at::Tensor& state,
                                  const std::optional<at::Generator>& generator = std::nullopt);

/// Collective. Every process continues with the random state of process 0.
ACCELERATE_API void synchronize_rng_state(
    RNGType type, const std::optional<at::Generator>& generator = std::nullopt,
    std::source_location where = std::source_location::current());

/// Collective. The same for several types, in one exchange. Types may be given by name
/// ("torch", "cuda", "generator", ...); a name that is none throws an error that lists them.
///
///     synchronize_rng_states({RNGType::kTorch, RNGType::kGenerator}, generator);
ACCELERATE_API void synchronize_rng_states(
    std::span<const RNGType> types, const std::optional<at::Generator>& generator = std::nullopt,
    std::source_location where = std::source_location::current());
ACCELERATE_API void synchronize_rng_states(
    std::span<const std::string> types,
    const std::optional<at::Generator>& generator = std::nullopt,
    std::source_location where = std::source_location::current());
ACCELERATE_API void synchronize_rng_states(
    std::initializer_list<RNGType> types,
    const std::optional<at::Generator>& generator = std::nullopt,
    std::source_location where = std::source_location::current());
ACCELERATE_API void synchronize_rng_states(
    std::initializer_list<const char*> types,
    const std::optional<at::Generator>& generator = std::nullopt,
    std::source_location where = std::source_location::current());

}  // namespace accelerate
