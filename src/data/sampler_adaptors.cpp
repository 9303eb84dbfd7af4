#include "accelerate/detail/data/sampler_adaptors.h"

#include "accelerate/errors.h"
#include "accelerate/random.h"

namespace accelerate::detail::data {

void throw_overtaken() {
  throw StateError(
      "Another pass over this sampler has begun. The sampler holds its position itself, so only "
      "the "
      "newest pass can go on: give each data loader that is iterated at the same time a sampler of "
      "its own.");
}

void throw_no_sampler() {
  throw ArgumentError("The sampler is a null pointer. Pass one, or leave the argument out.");
}

at::Tensor default_generator_state() { return get_rng_state(RNGType::kTorch); }

DefaultGeneratorAt::DefaultGeneratorAt(const at::Tensor& state)
    : before_(default_generator_state()) {
  set_rng_state(RNGType::kTorch, state);
}

DefaultGeneratorAt::~DefaultGeneratorAt() { set_rng_state(RNGType::kTorch, before_); }

}  // namespace accelerate::detail::data
