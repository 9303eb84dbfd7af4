// accelerate/sharding.h - models whose weights, gradients and optimizer states are spread over
// processes.
//
// Which of them is said by a plugin (accelerate/kwargs.h) or a ParallelismConfig; `prepare` does
// the rest. Here is what programs use beside.
#pragma once

#include "accelerate/sharding/deepspeed.h"            // IWYU pragma: export
#include "accelerate/sharding/gathered_parameters.h"  // IWYU pragma: export
