// Cross entropy: a block per row of logits, which are read once each way.
#include "nn/kernels.h"

namespace accelerate::detail::nn::kernels {
namespace {

// Rows of any width begin anywhere: single elements up to the first aligned one, packs, and the
// rest.
constexpr std::string_view kRows = R"cuda(
typedef Number<IN>::type In;

__device__ inline int head_of(const In* row, int width) {
  const int head = (16 - (unsigned long long)row % 16) % 16 / sizeof(In);
  return head < width ? head : width;
}
)cuda";

}  // namespace

const KernelText kCrossEntropy = {"cross_entropy",
                                  R"cuda(
// The sum of exp(x - highest) and the plain sum of what was seen. The lowest finite number instead
// of -inf: no difference of them is NaN, while NaN among the logits is kept.
struct Sums { float highest, sum, plain; };
#define NOTHING Sums{-3.4028235e38f, 0, 0}

template <int count> __device__ inline void add(Sums& sums, const float (&values)[count]) {
  float top = sums.highest;
#pragma unroll
  for (int p = 0; p < count; ++p) top = fmaxf(top, values[p]);
  sums.sum *= expf(sums.highest - top);
#pragma unroll
  for (int p = 0; p < count; ++p) {
    sums.sum += expf(values[p] - top);
    sums.plain += values[p];
  }
  sums.highest = top;
}
__device__ inline void add(Sums& sums, float value) {
  const float values[1] = {value};
  add(sums, values);
}
__device__ inline void merge(Sums& sums, float highest, float sum, float plain) {
  const float top = fmaxf(highest, sums.highest);
  sums.sum = sums.sum * expf(sums.highest - top) + sum * expf(highest - top);
  sums.highest = top;
  sums.plain += plain;
}
__device__ inline void merge_warp(Sums& sums) {
  for (int d = 16; d > 0; d /= 2) {
    const float highest = __shfl_xor_sync(0xffffffffu, sums.highest, d);
    const float sum = __shfl_xor_sync(0xffffffffu, sums.sum, d);
    const float plain = __shfl_xor_sync(0xffffffffu, sums.plain, d);
    merge(sums, highest, sum, plain);
  }
}

extern "C" __global__ void cross_entropy(const In* logits, const long long* target, float* losses,
                                         float* logs, int width, long long ignored,
                                         float smoothing) {
  const In* row = logits + (long long)blockIdx.x * width;
  const long long label = target[blockIdx.x];
  if (label != ignored && (label < 0 || label >= width)) __trap();
  Sums sums = NOTHING;
  const int head = head_of(row, width), packs = (width - head) / PACK;
  if (threadIdx.x < head) add(sums, to_float(row[threadIdx.x]));
  for (int i = threadIdx.x; i < packs; i += blockDim.x) {
    float values[PACK];
    load(row + head + i * PACK, values);
#pragma unroll
    for (int p = 0; p < PACK; ++p) add(sums, values[p]);
  }
  const int rest = head + packs * PACK + threadIdx.x;
  if (rest < width) add(sums, to_float(row[rest]));
  merge_warp(sums);
  __shared__ Sums parts[32];
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sums;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sums = threadIdx.x < blockDim.x / 32 ? parts[threadIdx.x] : NOTHING;
  merge_warp(sums);
  if (threadIdx.x != 0) return;
  const float log = sums.highest + logf(sums.sum);
  logs[blockIdx.x] = log;
  losses[blockIdx.x] =
      label == ignored ? 0.0f
                       : (1 - smoothing) * (log - to_float(row[label])) +
                             (smoothing == 0 ? 0.0f : smoothing * (log - sums.plain / width));
}
)cuda",
                                  {"PACK", "IN"},
                                  kRows};

// One block. `result` is the sum, or the mean over rows that are not ignored, `divisor` that of the
// gradient of a row.
const KernelText kMeanOfRows = {"mean_of_rows",
                                R"cuda(
extern "C" __global__ void mean_of_rows(const float* losses, const long long* target, float* result,
                                        float* divisor, long long rows, long long ignored,
                                        int mean) {
  float sum = 0, count = 0;
  for (long long row = threadIdx.x; row < rows; row += blockDim.x) {
    sum += losses[row];
    count += target[row] != ignored;
  }
  sum = block_sum(sum);
  count = block_sum(count);
  if (threadIdx.x != 0) return;
  *result = mean ? sum / count : sum;
  *divisor = mean ? count : 1.0f;
}
)cuda",
                                {"PACK"}};

// `result` may be `logits`. `each` 1: a gradient per row.
const KernelText kCrossEntropyBackward = {"cross_entropy_backward",
                                          R"cuda(
typedef Number<GRADIENT>::type Gradient;

extern "C" __global__ void cross_entropy_backward(
    const In* logits, In* result, const long long* target, const float* logs,
    const Gradient* gradient, const float* divisor, int each, int width, long long ignored,
    float smoothing) {
  const long long start = (long long)blockIdx.x * width;
  const In* row = logits + start;
  In* to = result + start;
  const long long label = target[blockIdx.x];
  float factor = to_float(gradient[each ? blockIdx.x : 0]);
  if (divisor) factor /= *divisor;
  const bool none = label == ignored;
  const float log = logs[blockIdx.x], lower = smoothing / width;
  const auto slope = [&](float x, int column) {
    if (none) return 0.0f;
    return (expf(x - log) - lower - (column == label ? 1 - smoothing : 0.0f)) * factor;
  };
  // The head of both is the same: `result` begins at an address with the alignment of `logits`.
  const int head = head_of(row, width), packs = (width - head) / PACK;
  if (threadIdx.x < head) set(to[threadIdx.x], slope(to_float(row[threadIdx.x]), threadIdx.x));
  for (int i = threadIdx.x; i < packs; i += blockDim.x) {
    const int column = head + i * PACK;
    float values[PACK];
    load(row + column, values);
#pragma unroll
    for (int p = 0; p < PACK; ++p) values[p] = slope(values[p], column + p);
    store(to + column, values);
  }
  const int rest = head + packs * PACK + threadIdx.x;
  if (rest < width) set(to[rest], slope(to_float(row[rest]), rest));
}
)cuda",
                                          {"PACK", "IN", "GRADIENT"},
                                          kRows};

}  // namespace accelerate::detail::nn::kernels
