// Activations, products with them, and rotary positions.
#include "nn/kernels.h"

namespace accelerate::detail::nn::kernels {
namespace {

// ACTIVATION is the number of nn::Activation.
constexpr std::string_view kActivations = R"cuda(
__device__ inline float activate(float x) {
#if ACTIVATION == 1
  return x < 0 ? 0 : x;
#elif ACTIVATION == 2
  return 0.5f * x * (1 + erff(x * 0.70710678f));
#elif ACTIVATION == 3
  return 0.5f * x * (1 + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
#else
  return x / (1 + expf(-x));
#endif
}
__device__ inline float slope(float x) {
#if ACTIVATION == 1
  return x > 0 ? 1 : 0;
#elif ACTIVATION == 2
  return 0.5f * (1 + erff(x * 0.70710678f)) + x * 0.39894228f * expf(-0.5f * x * x);
#elif ACTIVATION == 3
  const float t = tanhf(0.79788456f * (x + 0.044715f * x * x * x));
  return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * 0.79788456f * (1 + 3 * 0.044715f * x * x);
#else
  const float s = 1 / (1 + expf(-x));
  return s * (1 + x * (1 - s));
#endif
}
)cuda";

}  // namespace

// Threads of a block are neighbours in a row; each takes every gridDim.y-th row.
const KernelText kActivation = {"activation",
                                R"cuda(
typedef Number<IN>::type In;

extern "C" __global__ void activation(const In* x, In* y, long long rows, int width) {
  const int column = (blockIdx.x * blockDim.x + threadIdx.x) * PACK;
  if (column >= width) return;
  for (long long row = blockIdx.y; row < rows; row += gridDim.y) {
    float values[PACK];
    load(x + row * width + column, values);
#pragma unroll
    for (int p = 0; p < PACK; ++p) values[p] = activate(values[p]);
    store(y + row * width + column, values);
  }
}
)cuda",
                                {"PACK", "IN", "ACTIVATION"},
                                kActivations};

const KernelText kActivationBackward = {"activation_backward",
                                        R"cuda(
typedef Number<IN>::type In;

extern "C" __global__ void activation_backward(const In* gradient, const In* x, In* result,
                                                float* bias_sums, long long rows, int width) {
  const int column = (blockIdx.x * blockDim.x + threadIdx.x) * PACK;
  if (column >= width) return;
  float sums[PACK] = {};
  for (long long row = blockIdx.y; row < rows; row += gridDim.y) {
    float values[PACK], slopes[PACK];
    load(x + row * width + column, values);
    load(gradient + row * width + column, slopes);
#pragma unroll
    for (int p = 0; p < PACK; ++p) {
      slopes[p] *= slope(values[p]);
      sums[p] += slopes[p];
    }
    store(result + row * width + column, slopes);
  }
  if (bias_sums) store(bias_sums + (long long)blockIdx.y * width + column, sums);
}
)cuda",
                                        {"PACK", "IN", "ACTIVATION"},
                                        kActivations};

const KernelText kSiluProduct = {"silu_product",
                                 R"cuda(
typedef Number<IN>::type In;

extern "C" __global__ void silu_product(const In* gate, const In* up, In* y, long long packs) {
  const long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= packs) return;
  float gates[PACK], ups[PACK];
  load(gate + at * PACK, gates);
  load(up + at * PACK, ups);
#pragma unroll
  for (int p = 0; p < PACK; ++p) gates[p] = gates[p] / (1 + expf(-gates[p])) * ups[p];
  store(y + at * PACK, gates);
}
)cuda",
                                 {"PACK", "IN"}};

const KernelText kSiluProductBackward = {"silu_product_backward",
                                         R"cuda(
typedef Number<IN>::type In;

extern "C" __global__ void silu_product_backward(const In* gradient, const In* gate, const In* up,
                                                 In* of_gate, In* of_up, long long packs) {
  const long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= packs) return;
  float gradients[PACK], gates[PACK], ups[PACK];
  load(gradient + at * PACK, gradients);
  load(gate + at * PACK, gates);
  load(up + at * PACK, ups);
#pragma unroll
  for (int p = 0; p < PACK; ++p) {
    const float x = gates[p], s = 1 / (1 + expf(-x));
    gates[p] = gradients[p] * ups[p] * s * (1 + x * (1 - s));
    ups[p] = gradients[p] * x * s;
  }
  store(of_gate + at * PACK, gates);
  store(of_up + at * PACK, ups);
}
)cuda",
                                         {"PACK", "IN"}};

// A thread rotates one pair: elements i and i + half of a head. `sign` -1 is the gradient.
const KernelText kRotate = {"rotate",
                            R"cuda(
typedef Number<IN>::type In;

extern "C" __global__ void rotate(
    const In* x, In* y, const float* cosines, const float* sines, const long long* positions,
    long long pairs, int heads, int length, int half, int max_positions,
    long long x_batch, long long x_head, long long x_token,
    long long y_batch, long long y_head, long long y_token,
    long long position_batch, long long position_token, float sign) {
  const long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= pairs) return;
  const int i = at % half;
  const int head = at / half % heads;
  const int token = at / ((long long)half * heads) % length;
  const long long batch = at / ((long long)half * heads * length);
  const long long position =
      positions ? positions[batch * position_batch + token * position_token] : token;
  if (position < 0 || position >= max_positions) __trap();
  const float c = cosines[position * half + i], s = sign * sines[position * half + i];
  const In* from = x + batch * x_batch + head * x_head + token * x_token;
  In* to = y + batch * y_batch + head * y_head + token * y_token;
  const float a = to_float(from[i]), b = to_float(from[i + half]);
  set(to[i], a * c - b * s);
  set(to[i + half], b * c + a * s);
}
)cuda",
                            {"PACK", "IN"}};

}  // namespace accelerate::detail::nn::kernels
