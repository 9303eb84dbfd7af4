// src/core/copy_past_cache.h - copies of more than the caches hold.
#pragma once

#include <cstddef>

namespace accelerate::detail::inline core {

/// Whether the last cache of this machine cannot hold so much.
[[nodiscard]] bool exceeds_cache(std::size_t bytes) noexcept;

/// As `std::memcpy`, but `to` is written past the caches, so that what it held before is not read
/// first and the source stays where it is fast. Good for results that the caches will not keep.
void copy_past_cache(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;

}  // namespace accelerate::detail::inline core
