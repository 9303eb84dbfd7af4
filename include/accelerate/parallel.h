// accelerate/parallel.h - models that are cut over processes, each of which computes a part.
//
//     x = nn::copy_to_region(x, group);  // differentiable collectives
//
// docs/parallelism.md says which way of cutting suits which model.
#pragma once

#include "accelerate/parallel/context_parallel.h"
#include "accelerate/parallel/regions.h"
#include "accelerate/parallel/sequence_parallel.h"
