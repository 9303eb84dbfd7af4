// accelerate/accelerate.h - everything, for programs.
//
// The library's own files include single headers; this one brings all of LibTorch with it.
#pragma once

#include <torch/torch.h>

#include "accelerate/accelerator.h"
#include "accelerate/checks.h"
#include "accelerate/config.h"
#include "accelerate/constants.h"
#include "accelerate/deferred_metrics.h"
#include "accelerate/enums.h"
#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "accelerate/grad_scaler.h"
#include "accelerate/kwargs.h"
#include "accelerate/launchers.h"
#include "accelerate/local_sgd.h"
#include "accelerate/logging.h"
#include "accelerate/logging/rich.h"
#include "accelerate/memory.h"
#include "accelerate/modeling.h"
#include "accelerate/nn.h"
#include "accelerate/operations.h"
#include "accelerate/optim.h"
#include "accelerate/parallelism_config.h"
#include "accelerate/prepared_loader.h"
#include "accelerate/progress.h"
#include "accelerate/random.h"
#include "accelerate/safetensors.h"
#include "accelerate/scheduler.h"
#include "accelerate/state.h"
#include "accelerate/tree.h"
#include "accelerate/value.h"
#include "accelerate/version.h"
