// accelerate/data/worker_generator.h - random numbers for datasets and collate functions.
//
//     at::Tensor get(std::size_t i) { return images[i] + 0.1 * at::randn({3, 32, 32},
//     worker_generator()); }
//
// LibTorch's default generator belongs to the whole process: which thread draws when is chance. The
// one from here is seeded for each batch from the base seed of the pass, the epoch and the
// number of the batch, so that the numbers do not depend on how many workers there are.
#pragma once

#include <ATen/core/Generator.h>

#include "accelerate/api.h"

namespace accelerate {

/// The CPU generator of the batch that this thread is loading, also with 0 workers. Outside of a
/// loader: one of this thread, seeded as the default generator was.
[[nodiscard]] ACCELERATE_API at::Generator& worker_generator();

}  // namespace accelerate
