// accelerate/quantization.h - models with weights in 8 and 4 bits, as bitsandbytes has them.
//
//     auto net = accelerate::init_empty_weights([&] { return Net(config); });
//     auto model = accelerate::load_and_quantize_model(
//         net, {.load_in_4bit = true, .bnb_4bit_quant_type = "nf4"}, {.weights_location =
//         "folder"});
//     auto y = model(x);
#pragma once

#include "accelerate/kwargs/plugins.h"
#include "accelerate/quantization/functional.h"
#include "accelerate/quantization/load.h"
