#include "core/python_random.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

namespace accelerate::detail::inline core {
namespace {

constexpr std::size_t kWords = std::mt19937::state_size;
using State = std::array<std::uint32_t, kWords>;

/// Sets the initial state of an engine.
class GivenState {
 public:
  using result_type = std::uint32_t;
  explicit GivenState(const State& state) : state_(state) {}
  template <class Iterator>
  void generate(Iterator begin, Iterator end) const {
    std::copy_n(state_.begin(), std::min<std::size_t>(state_.size(), std::distance(begin, end)),
                begin);
  }

 private:
  const State& state_;
};

std::uint32_t mixed(std::uint32_t word) { return word ^ (word >> 30); }

/// `init_by_array` of Matsumoto and Nishimura's mt19937ar, which Python seeds with.
State state_of_key(const std::vector<std::uint32_t>& key) {
  State state{};
  state[0] = 19650218;
  for (std::size_t i = 1; i < kWords; ++i) {
    state[i] = 1812433253U * mixed(state[i - 1]) + static_cast<std::uint32_t>(i);
  }
  std::size_t i = 1;
  const auto advance = [&] {
    if (++i < kWords) return;
    state[0] = state[kWords - 1];
    i = 1;
  };
  for (std::size_t k = 0; k < std::max(kWords, key.size()); ++k) {
    const std::size_t j = k % key.size();
    state[i] =
        (state[i] ^ (mixed(state[i - 1]) * 1664525U)) + key[j] + static_cast<std::uint32_t>(j);
    advance();
  }
  for (std::size_t k = 1; k < kWords; ++k) {
    state[i] = (state[i] ^ (mixed(state[i - 1]) * 1566083941U)) - static_cast<std::uint32_t>(i);
    advance();
  }
  state[0] = 0x80000000U;
  return state;
}

}  // namespace

std::mt19937 python_random_engine(std::uint64_t seed) {
  std::vector<std::uint32_t> key = {static_cast<std::uint32_t>(seed)};
  if (seed >> 32 != 0) key.push_back(static_cast<std::uint32_t>(seed >> 32));
  const auto state = state_of_key(key);
  GivenState sequence(state);
  return std::mt19937(sequence);
}

}  // namespace accelerate::detail::inline core
