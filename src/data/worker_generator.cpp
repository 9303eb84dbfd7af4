#include "accelerate/data/worker_generator.h"

#include <ATen/CPUGeneratorImpl.h>

#include <deque>

#include "data/batch_seed.h"

namespace accelerate {
namespace detail::data {
namespace {

thread_local BatchSeedScope* innermost = nullptr;
// One per depth of nested scopes, the first for use outside of all: making one costs more than
// seeding it. A deque: references to them stay good.
thread_local std::deque<at::Generator> generators;

/// The finaliser of SplitMix64: every bit of the input moves half of the output.
std::uint64_t mix(std::uint64_t x) noexcept {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

at::Generator& generator_at(std::size_t depth) {
  while (generators.size() <= depth) {
    generators.push_back(at::detail::createCPUGenerator(
        generators.empty() ? at::detail::getDefaultCPUGenerator().current_seed() : 0));
  }
  return generators[depth];
}

}  // namespace

std::uint64_t batch_seed(std::uint64_t base_seed, std::int64_t epoch,
                         std::int64_t sequence) noexcept {
  return mix(mix(mix(base_seed) ^ static_cast<std::uint64_t>(epoch)) ^
             static_cast<std::uint64_t>(sequence));
}

BatchSeedScope::BatchSeedScope(std::uint64_t seed) noexcept
    : seed_(seed), outer_(innermost), depth_(outer_ == nullptr ? 1 : outer_->depth_ + 1) {
  innermost = this;
}

BatchSeedScope::~BatchSeedScope() { innermost = outer_; }

}  // namespace detail::data

at::Generator& worker_generator() {
  auto* scope = detail::data::innermost;
  if (scope == nullptr) return detail::data::generator_at(0);
  auto& generator = detail::data::generator_at(scope->depth_);
  if (!scope->seeded_) generator.set_current_seed(scope->seed_);
  scope->seeded_ = true;
  return generator;
}

}  // namespace accelerate
