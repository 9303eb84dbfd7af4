// src/comm/shm_reduce.h - the arithmetic of reductions over ranks.
//
// Internal, without Torch. Ranks are taken in order, so the same input gives the same bits on every
// rank and in every run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace accelerate::detail::comm {

/// Complex numbers are pairs of their parts.
enum class Element : std::uint8_t {
  kBool,
  kInt8,
  kUInt8,
  kInt16,
  kUInt16,
  kInt32,
  kUInt32,
  kInt64,
  kUInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
};

enum class ShmReduction : std::uint8_t {
  kSum,
  kAverage,  ///< of integers: rounded towards zero
  kProduct,
  kMinimum,  ///< of floats: NaN when one is
  kMaximum,
  kAnd,
  kOr,
  kXor,
};

[[nodiscard]] std::size_t bytes_of(Element element) noexcept;

/// Bits of floats are not combined, and truth values have no average.
[[nodiscard]] bool can_reduce(Element element, ShmReduction reduction) noexcept;

/// `out[i]` becomes the reduction of `sources[rank][i]` over all ranks, for `count` elements, and
/// so does `also[i]` unless it is null. Each may be one of the sources.
///
/// Numbers of 16 bits are added up as float32 and rounded once; integers wrap; truth values are
/// added with "or" and multiplied with "and".
void reduce_elements(Element element, ShmReduction reduction,
                     std::span<const std::byte* const> sources, std::byte* out, std::byte* also,
                     std::size_t count) noexcept;

}  // namespace accelerate::detail::comm
