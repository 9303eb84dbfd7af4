// accelerate/big_modeling.h - models that are larger than the memory of the device they run on.
//
//     auto net = accelerate::init_empty_weights([&] { return Net(config); });
//     auto model = accelerate::load_checkpoint_and_dispatch(net, "checkpoint",
//                                                           {.device_map = "auto"});
#pragma once

#include "accelerate/big_modeling/dispatch.h"
#include "accelerate/big_modeling/dispatched.h"
#include "accelerate/big_modeling/empty_weights.h"
#include "accelerate/big_modeling/hooks.h"
#include "accelerate/big_modeling/layerwise_casting.h"
#include "accelerate/big_modeling/lazy_options.h"
#include "accelerate/big_modeling/offloaded_tensors.h"
