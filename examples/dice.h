// Random numbers that depend on a seed and an index alone, and on no library's generator.
#pragma once

#include <cstdint>

namespace examples {

/// The numbers of sample `index` of the data that `seed` stands for (SplitMix64).
class Dice {
 public:
  Dice(std::uint64_t seed, std::uint64_t index) : state_(mix(mix(seed) + index)) {}

  std::uint64_t next() { return mix(state_ += 0x9e3779b97f4a7c15U); }
  /// From 0 to n - 1.
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>((next() >> 32) * static_cast<std::uint64_t>(n) >> 32);
  }
  double uniform(double low, double high) {
    return low + (high - low) * (static_cast<double>(next() >> 11) * 0x1p-53);
  }

 private:
  static constexpr std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
    return x ^ (x >> 31);
  }

  std::uint64_t state_;
};

}  // namespace examples
