// tests/fuzz/fuzz.h - what the fuzz targets share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "accelerate/value.h"

namespace accelerate::fuzz {

inline std::string_view text(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// Stops the fuzzer with a report when a promise does not hold.
inline void check(bool holds, const char* promise) {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %s\n", promise);
  std::abort();
}

/// Equal, where NaN equals itself.
inline bool same(const Value& a, const Value& b) { return a.repr() == b.repr(); }

}  // namespace accelerate::fuzz
