// accelerate/nn.h - for the forward of a model: faster drop-in replacements for modules of
// torch::nn, modules of language models, and activations that backward computes again.
//
//     accelerate::nn::Linear layer(768, 3072);          // instead of torch::nn::Linear
//     x = accelerate::activation_checkpoint(block, x);  // instead of block(x)
//
// Modules have PyTorch's parameters, names and numbers (docs/modules.md). On the CPU they are
// compositions of LibTorch's operators. On a GPU kernels that LibTorch has not take the place of
// several of those; they are compiled when they are first used, for float32, bfloat16 and float16.
// Other dtypes, second derivatives, and parameters that an engine keeps elsewhere (offload,
// sharding, tensor parallelism) use the operators.
#pragma once

#include "accelerate/nn/activation_checkpoint.h"
#include "accelerate/nn/attention.h"
#include "accelerate/nn/linear.h"
#include "accelerate/nn/lora_linear.h"
#include "accelerate/nn/loss.h"
#include "accelerate/nn/normalization.h"
#include "accelerate/nn/swiglu.h"
