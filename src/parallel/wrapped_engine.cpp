#include "parallel/wrapped_engine.h"

#include <algorithm>

namespace accelerate::detail::parallel {

bool LocalEngine::reached_by(const ReachedLeaves& leaves) const {
  return std::ranges::any_of(parameters_,
                             [&](const at::Tensor& one) { return leaves.contains(one); });
}

bool LocalEngine::holds(const at::Tensor& parameter) const {
  return std::ranges::any_of(parameters_,
                             [&](const at::Tensor& one) { return one.is_same(parameter); });
}

}  // namespace accelerate::detail::parallel
