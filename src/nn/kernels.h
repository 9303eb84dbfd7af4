// src/nn/kernels.h - the kernels, as texts of CUDA C++ without includes.
#pragma once

#include "nn/fused.h"

namespace accelerate::detail::nn::kernels {

/// In front of each text: dtypes, loads and stores of PACK elements, sums over a block.
extern const std::string_view kPrelude;

extern const KernelText kColumnSums;

// norm_kernels.cpp
extern const KernelText kNormForward;
extern const KernelText kNormBackward;

// elementwise_kernels.cpp
extern const KernelText kActivation;
extern const KernelText kActivationBackward;
extern const KernelText kSiluProduct;
extern const KernelText kSiluProductBackward;
extern const KernelText kRotate;

// loss_kernels.cpp
extern const KernelText kCrossEntropy;
extern const KernelText kMeanOfRows;
extern const KernelText kCrossEntropyBackward;

}  // namespace accelerate::detail::nn::kernels
