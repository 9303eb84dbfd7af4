#include "accelerate/detail/data/sampler_adaptors.h"

#include "accelerate/random.h"

namespace accelerate::detail::data {

at::Tensor DefaultGeneratorAt::state_now() { return get_rng_state(RNGType::kTorch); }

DefaultGeneratorAt::DefaultGeneratorAt(const at::Tensor& state) : before_(state_now()) {
  set_rng_state(RNGType::kTorch, state);
}

DefaultGeneratorAt::~DefaultGeneratorAt() { set_rng_state(RNGType::kTorch, before_); }

}  // namespace accelerate::detail::data
