// Kernels of rows in 8 bits.
#include "quantization/gpu_sources.h"

namespace accelerate::detail::quantization {

const std::string_view kGpuFinish = R"cuda(
__device__ __forceinline__ float value_8bit(signed char code, float scale) {
  const float value = __fmul_rn(__fmul_rn((float)code, scale), (float)(1.0 / 127.0));
  return to_float(rounded<Value>(value));
}

// How sums of products of codes become outputs.
struct Finish {
  const float* row_scales;
  const float* scales;     // of the weight
  const Half* bias;        // added before the rounding to float16, or nullptr
  const Value* late_bias;  // added after it, or nullptr
};

__device__ __forceinline__ Value finished(const Finish& by, int sum, int row, int output,
                                          bool has_extra, float extra) {
  const float scale = __fmul_rn(__fmul_rn(by.row_scales[row], by.scales[output]),
                                (float)(1.0 / 16129.0));
  float value = __fmul_rn((float)sum, scale);
  if (by.bias != nullptr) value = __fadd_rn(value, to_float(by.bias[output]));
  Value result = rounded<Value>(to_float(rounded<Half>(value)));
  if (by.late_bias != nullptr) {
    result = rounded<Value>(__fadd_rn(to_float(result), to_float(by.late_bias[output])));
  }
  return has_extra ? rounded<Value>(to_float(result) + extra) : result;
}
)cuda";

const std::string_view kGpuRows = R"cuda(
// As float32, rounded to float16 first.
template <class T> __device__ __forceinline__ float half_value(T value) {
  return to_float(rounded<Half>(to_float(value)));
}

constexpr int kBatch = 4;         // values of a thread that are loaded at once
constexpr int kMostChecked = 16;  // rows: kMostGpuRows

// use(column, value) for the columns of a row, by a whole thread block.
template <class F> __device__ __forceinline__ void for_each(const Value* row, int columns, F use) {
  for (int first = threadIdx.x; first < columns; first += kBatch * blockDim.x) {
    Value values[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) values[u] = row[min(first + u * (int)blockDim.x, columns - 1)];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int column = first + u * blockDim.x;
      if (column < columns) use(column, half_value(values[u]));
    }
  }
}

// The numbers of the columns that are flagged, in order; called by a whole thread block.
__device__ void list_flagged(const unsigned char* flags, int columns, int* list, int* count) {
  __shared__ int counts[32];
  const int size = (columns + blockDim.x - 1) / blockDim.x;
  const int begin = min(columns, (int)threadIdx.x * size);
  const int end = min(columns, begin + size);
  int own = 0;
  for (int c = begin; c < end; ++c) own += flags[c];
  int sum = own;  // of the threads up to this one
  for (int apart = 1; apart < 32; apart *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, sum, apart);
    if (threadIdx.x % 32 >= apart) sum += other;
  }
  if (threadIdx.x % 32 == 31) counts[threadIdx.x / 32] = sum;
  __syncthreads();
  for (int warp = 0; warp < threadIdx.x / 32; ++warp) sum += counts[warp];
  int next = sum - own;
  for (int c = begin; c < end; ++c) {
    if (flags[c]) list[next++] = c;
  }
  if (threadIdx.x == blockDim.x - 1) *count = sum;
}

// A thread block makes one row of codes. With a threshold above 0, values of at least that
// magnitude are outliers: they become 0 and do not count for the scale. `checked` is the number of
// rows if they are at most kMostChecked: then columns with an outlier in any of them become 0,
// flags [columns] says which they are, and they are listed. 0: flags, zero before, says where this
// row has outliers; list_columns and clear_columns follow. status: {columns listed, 1 if a row is
// not finite}.
extern "C" __global__ void __launch_bounds__(1024)
quantize_rows(const Value* values, int columns, float threshold, int checked, signed char* codes,
              float* scales, unsigned char* flags, int* list, int* status) {
  __shared__ unsigned largest[32];
  const Value* const row = values + (long long)blockIdx.x * columns;
  const bool has_outliers = threshold > 0;
  const auto is_outlier = [&](float value) { return has_outliers && fabsf(value) >= threshold; };
  // In any of the checked rows. All are loaded at once: nothing ends the search early.
  const auto is_in_any = [&](int c) {
    bool result = false;
    if (has_outliers && checked > 1) {
#pragma unroll
      for (int r = 0; r < kMostChecked; ++r) {
        if (r < checked) result |= is_outlier(half_value(values[(long long)r * columns + c]));
      }
    }
    return result;
  };
  unsigned most = 0;
  for_each(row, columns, [&](int c, float value) {
    const bool own = is_outlier(value);
    if (!own) most = max(most, __float_as_uint(value) & 0x7FFFFFFFu);
    if (has_outliers && checked > 0 && blockIdx.x == 0) {
      flags[c] = is_in_any(c) || own ? 1 : 0;
    } else if (own && checked == 0) {
      flags[c] = 1;
    }
  });
  for (int apart = 16; apart > 0; apart /= 2) {
    most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, apart));
  }
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = most;
  __syncthreads();
  for (int warp = 0; warp < blockDim.x / 32; ++warp) most = max(most, largest[warp]);
  const float scale = __uint_as_float(most);
  const bool is_finite = most < 0x7F800000u;
  if (threadIdx.x == 0) {
    scales[blockIdx.x] = scale;
    if (!is_finite) status[1] = 1;
  }
  const float factor = most == 0 || !is_finite ? 0.0f : __fdiv_rn(127.0f, scale);
  for_each(row, columns, [&](int c, float value) {
    const bool is_zero = is_in_any(c) || is_outlier(value);
    const int code = is_zero ? 0 : __float2int_rn(__fmul_rn(value, factor));
    codes[(long long)blockIdx.x * columns + c] = (signed char)code;
  });
  if (has_outliers && checked > 0 && blockIdx.x == 0) list_flagged(flags, columns, list, status);
}

// One thread block.
extern "C" __global__ void __launch_bounds__(1024)
list_columns(const unsigned char* flags, int columns, int* list, int* count) {
  list_flagged(flags, columns, list, count);
}

// The listed columns of the codes become 0. A thread block per row.
extern "C" __global__ void clear_columns(signed char* codes, int columns, const int* list,
                                         const int* count) {
  for (int i = threadIdx.x; i < *count; i += blockDim.x) {
    codes[(long long)blockIdx.x * columns + list[i]] = 0;
  }
}

// out = codes * scale of the row / 127. A thread block per row and 2048 columns.
extern "C" __global__ void __launch_bounds__(256)
expand_8bit(const signed char* codes, const float* scales, int columns, Value* out) {
  const long long row = (long long)blockIdx.x * columns;
  const float scale = scales[blockIdx.x];
  const int begin = (blockIdx.y * 256 + threadIdx.x) * 8;
  if (begin + 8 <= columns && columns % 8 == 0) {
    const uint2 word = *(const uint2*)(codes + row + begin);
    float values[8];
    for (int i = 0; i < 8; ++i) {
      values[i] = value_8bit((signed char)((i < 4 ? word.x : word.y) >> 8 * (i % 4)), scale);
    }
    store8(out + row + begin, values);
    return;
  }
  for (int c = begin; c < min(begin + 8, columns); ++c) {
    out[row + c] = rounded<Value>(value_8bit(codes[row + c], scale));
  }
}

// y = sums [rows, outputs] finished, plus the product of the listed columns. A thread block of 256
// has 32 rows and 64 outputs.
extern "C" __global__ void __launch_bounds__(256)
finish_8bit(const int* sums, const Value* x, const signed char* codes, Finish by, const int* list,
            const int* count, Value* y, int rows, int inputs, int outputs) {
  constexpr int kColumns = 32;  // at a time
  __shared__ float weight[kColumns][64];
  __shared__ float input[32][kColumns + 1];
  const int listed = count == nullptr ? 0 : *count;
  const int output = blockIdx.x * 64 + threadIdx.x % 64;
  const int own = threadIdx.x / 64 * 8;  // the first of 8 rows
  const int top = blockIdx.y * 32;
  float extra[8] = {};
  for (int begin = 0; begin < listed; begin += kColumns) {
    __syncthreads();
    for (int i = threadIdx.x; i < kColumns * 64; i += 256) {
      const int o = blockIdx.x * 64 + i % 64;
      const bool is_there = begin + i / 64 < listed && o < outputs;
      weight[i / 64][i % 64] =
          is_there ? value_8bit(codes[(long long)o * inputs + list[begin + i / 64]], by.scales[o])
                   : 0.0f;
    }
    for (int i = threadIdx.x; i < 32 * kColumns; i += 256) {
      const int r = top + i / kColumns;
      const bool is_there = begin + i % kColumns < listed && r < rows;
      input[i / kColumns][i % kColumns] =
          is_there ? to_float(x[(long long)r * inputs + list[begin + i % kColumns]]) : 0.0f;
    }
    __syncthreads();
    for (int c = 0; c < min(kColumns, listed - begin); ++c) {
      for (int r = 0; r < 8; ++r) extra[r] += input[own + r][c] * weight[c][threadIdx.x % 64];
    }
  }
  if (output >= outputs) return;
  for (int r = 0; r < 8; ++r) {
    const int row = top + own + r;
    if (row >= rows) return;
    const long long at = (long long)row * outputs + output;
    y[at] = finished(by, sums[at], row, output, listed > 0, extra[r]);
  }
}
)cuda";

const std::string_view kGpuProduct8bit = R"cuda(
// y = codes of x [rows, inputs] * codes of the weight [outputs, inputs]^T, finished, plus the
// product of the listed columns. inputs is a multiple of 16. 256 or 512 threads, whose warps divide
// k.
//
// A step is k = 64 values of 16 rows; lane 4 * g + t has the values 16 * t ... of rows g and g + 8.
constexpr int kSteps = 4;  // whose bytes are on their way
constexpr int kStride = 16 + 4;

extern "C" __global__ void __launch_bounds__(512)
product_8bit(const signed char* weight, const signed char* codes, const Value* x, Finish by,
             const int* list, const int* count, Value* y, int rows, int inputs, int outputs) {
  extern __shared__ __align__(16) int sums[];
  const int warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;
  const int g = threadIdx.x % 32 / 4;
  const int t = threadIdx.x % 4;
  const int tiles = (outputs + 15) / 16;
  const int steps = (inputs + 63) / 64;
  const int begin = (int)((long long)steps * warp / warps);
  const int end = (int)((long long)steps * (warp + 1) / warps);
  const int listed = count == nullptr ? 0 : *count;

  Words<4> bytes[kSteps][2];
  const auto fetch = [&](int slot, int tile, int step) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = min(tile * 16 + 8 * h + g, outputs - 1);
      // Where the inputs end within a step, those of x are 0.
      const int at = min(step * 64 + t * 16, inputs - 16);
      bytes[slot][h] = load_once<4>(weight + (long long)row * inputs + at);
    }
  };
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    if (begin + s < end) fetch(s, blockIdx.x, begin + s);
  }

  int parity = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int next = tile + gridDim.x;
    int total[kColumnTiles][4] = {};
    for (int round = begin; round < end; round += kSteps) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int step = round + s;
        if (step < end) {
#pragma unroll
          for (int n = 0; n < kColumnTiles; ++n) {
            uint4 b = make_uint4(0, 0, 0, 0);
            const int at = step * 64 + t * 16;
            if (8 * n + g < rows && at < inputs) {
              b = __ldg((const uint4*)(codes + (long long)(8 * n + g) * inputs + at));
            }
            const unsigned* const low = bytes[s][0].word;
            const unsigned* const high = bytes[s][1].word;
            multiply_add(total[n], low[0], high[0], low[1], high[1], b.x, b.y);
            multiply_add(total[n], low[2], high[2], low[3], high[3], b.z, b.w);
          }
          if (step + kSteps < end) {
            fetch(s, tile, step + kSteps);
          } else if (next < tiles) {
            fetch(s, next, begin + s);
          }
        }
      }
    }

    // Two areas by turns, so that one barrier per tile is enough.
    int* const area = sums + parity * warps * (8 * kColumnTiles * kStride);
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = 8 * n + 2 * t + e % 2;
        if (column < rows) {
          area[(warp * (8 * kColumnTiles) + column) * kStride + 8 * (e / 2) + g] = total[n][e];
        }
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * rows; i += blockDim.x) {
      const int row = i / 16;
      const int output = tile * 16 + i % 16;
      if (output >= outputs) continue;
      int sum = 0;
      for (int w = 0; w < warps; ++w) {
        sum += area[(w * (8 * kColumnTiles) + row) * kStride + i % 16];
      }
      float extra = 0;
      for (int c = 0; c < listed; ++c) {
        extra += to_float(x[(long long)row * inputs + list[c]]) *
                 value_8bit(weight[(long long)output * inputs + list[c]], by.scales[output]);
      }
      y[(long long)row * outputs + output] = finished(by, sum, row, output, listed > 0, extra);
    }
    parity ^= 1;
  }
}
)cuda";

}  // namespace accelerate::detail::quantization
