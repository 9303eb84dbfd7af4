// src/optim/elementwise.h - which optimizers can step on parts of parameters.
#pragma once

#include <torch/optim/optimizer.h>

namespace accelerate::detail::optim {

/// Throws `UnsupportedError` for an optimizer whose step of an element needs other elements of its
/// matrix; warns once of one that is not known.
void check_elementwise(const torch::optim::Optimizer& optimizer);

}  // namespace accelerate::detail::optim
