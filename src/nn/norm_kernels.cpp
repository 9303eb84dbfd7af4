// Layer norm, and RMS norm (RMS 1): a block per row, whose elements stay in registers.
#include "nn/kernels.h"

namespace accelerate::detail::nn::kernels {

const KernelText kNormForward = {
    "norm_forward",
    R"cuda(
typedef Number<IN>::type In;
typedef Number<RESIDUAL>::type Residual;
typedef Number<SUM>::type Sum;
typedef Number<OUT>::type Out;
typedef Number<WEIGHT>::type Weight;

extern "C" __global__ void __launch_bounds__(THREADS) norm_forward(
    const In* x, const Residual* residual, Sum* sum, const Weight* weight, const Weight* bias,
    Out* y, float* means, float* scales, int width, float eps) {
  const long long start = (long long)blockIdx.x * width;
  float values[STEPS][PACK];
  float total = 0;
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const int column = (i * THREADS + threadIdx.x) * PACK;
    if (column >= width) continue;
    load(x + start + column, values[i]);
    if (residual) {
      float more[PACK];
      load(residual + start + column, more);
#pragma unroll
      for (int p = 0; p < PACK; ++p) values[i][p] = rounded<Sum>(values[i][p] + more[p]);
      store(sum + start + column, values[i]);
    }
#pragma unroll
    for (int p = 0; p < PACK; ++p) total += RMS ? values[i][p] * values[i][p] : values[i][p];
  }
  float mean = 0;
  float square = block_sum(total) / width;
  if (!RMS) {
    mean = square;
    total = 0;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      if ((i * THREADS + threadIdx.x) * PACK >= width) continue;
#pragma unroll
      for (int p = 0; p < PACK; ++p) total += (values[i][p] - mean) * (values[i][p] - mean);
    }
    square = block_sum(total) / width;
  }
  const float scale = rsqrtf(square + eps);
  if (threadIdx.x == 0) {
    if (!RMS) means[blockIdx.x] = mean;
    scales[blockIdx.x] = scale;
  }
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const int column = (i * THREADS + threadIdx.x) * PACK;
    if (column >= width) continue;
    float factors[PACK], offsets[PACK];
    if (weight) load(weight + column, factors);
    if (bias) load(bias + column, offsets);
#pragma unroll
    for (int p = 0; p < PACK; ++p) {
      float value = (values[i][p] - mean) * scale;
      if (weight) value *= factors[p];
      if (bias) value += offsets[p];
      values[i][p] = value;
    }
    store(y + start + column, values[i]);
  }
}
)cuda",
    {"PACK", "IN", "RESIDUAL", "SUM", "OUT", "WEIGHT", "RMS", "THREADS", "STEPS"}};

// A block takes every gridDim.x-th row and adds up the gradients of the parameters over them.
const KernelText kNormBackward = {
    "norm_backward",
    R"cuda(
typedef Number<OTHER>::type Other;
typedef Number<SUM>::type Sum;
typedef Number<OUT>::type Out;
typedef Number<WEIGHT>::type Weight;

extern "C" __global__ void __launch_bounds__(THREADS) norm_backward(
    const Out* gradient, const Sum* sum_gradient, const Sum* sum, const float* means,
    const float* scales, const Weight* weight, Sum* result, Other* other_result,
    float* weight_sums, float* bias_sums, long long rows, int width) {
  float of_weight[STEPS][PACK], of_bias[STEPS][PACK];
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
#pragma unroll
    for (int p = 0; p < PACK; ++p) of_weight[i][p] = of_bias[i][p] = 0;
  }
  for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
    const long long start = row * width;
    const float mean = RMS ? 0.0f : means[row];
    const float scale = scales[row];
    float values[STEPS][PACK], slopes[STEPS][PACK];  // normed values and their gradients
    float total = 0, product = 0;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const int column = (i * THREADS + threadIdx.x) * PACK;
      if (column >= width) continue;
      float factors[PACK];
      load(sum + start + column, values[i]);
      load(gradient + start + column, slopes[i]);
      if (weight) load(weight + column, factors);
#pragma unroll
      for (int p = 0; p < PACK; ++p) {
        values[i][p] = (values[i][p] - mean) * scale;
        of_weight[i][p] += slopes[i][p] * values[i][p];
        of_bias[i][p] += slopes[i][p];
        if (weight) slopes[i][p] *= factors[p];
        total += slopes[i][p];
        product += slopes[i][p] * values[i][p];
      }
    }
    total = RMS ? 0.0f : block_sum(total) / width;
    product = block_sum(product) / width;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const int column = (i * THREADS + threadIdx.x) * PACK;
      if (column >= width) continue;
      float more[PACK];
      if (sum_gradient) load(sum_gradient + start + column, more);
#pragma unroll
      for (int p = 0; p < PACK; ++p) {
        values[i][p] = (slopes[i][p] - total - values[i][p] * product) * scale;
        if (sum_gradient) values[i][p] += more[p];
      }
      store(result + start + column, values[i]);
      if (other_result) store(other_result + start + column, values[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const int column = (i * THREADS + threadIdx.x) * PACK;
    if (column >= width) continue;
    const long long to = (long long)blockIdx.x * width + column;
    if (weight_sums) store(weight_sums + to, of_weight[i]);
    if (bias_sums) store(bias_sums + to, of_bias[i]);
  }
}
)cuda",
    {"PACK", "OTHER", "SUM", "OUT", "WEIGHT", "RMS", "THREADS", "STEPS"}};

}  // namespace accelerate::detail::nn::kernels
