// tests/support/random_faults.h - what the tests of faults at random share: plans that are made
// from a seed and the number of a run, and processes that end as a program does whose main catches
// nothing.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>

namespace accelerate::test {

/// A program ends with it when its ranks disagree or one of them is gone.
inline constexpr int kRanksDisagree = 70;
inline constexpr const char* kSeed = "ACCELERATE_TEST_SEED";
inline constexpr const char* kRuns = "ACCELERATE_TEST_RUNS";

using Random = std::mt19937_64;

inline std::uint64_t number_from(const char* variable, std::uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::stoull(text) : otherwise;
}

/// From `low` to `high`, the same with every library.
inline int pick(Random& random, int low, int high) {
  return low + static_cast<int>(random() % static_cast<std::uint64_t>(high - low + 1));
}

inline Random random_of(std::uint64_t seed, std::uint64_t number) {
  std::seed_seq both{seed, number};
  return Random(both);
}

/// As in a program whose main catches nothing; the harness would. A function that is not inlined:
/// with cleanups of its own in it, the compiler would end the process before the exception is
/// known.
[[gnu::noinline]] inline void uncaught(const std::function<void()>& main) noexcept { main(); }

}  // namespace accelerate::test
