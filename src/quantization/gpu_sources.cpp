#include "quantization/gpu_sources.h"

namespace accelerate::detail::quantization {

// The inputs of a product have at most 16 rows here. A warp computes 16 outputs at a time by
// mma.m16n8k16 (4 bits) or m16n8k32 (8 bits): rows of the weight are the rows of the first factor,
// inputs are the columns of the second. Which 16 values of k meet in one instruction is free, as
// long as both factors agree; so a lane takes bytes of the weight that lie side by side.

const std::string_view kGpuTypes = R"cuda(
struct Half { unsigned short bits; };
struct Bfloat { unsigned short bits; };

struct Table { float value[16]; };
struct Scales {
  const void* absmax;
  const float* map;
  const float* nested;
  float offset;
  int shift;
  int nested_shift;
};

template <int n> struct Words { unsigned word[n]; };

// BEGIN PTX
__device__ __forceinline__ float to_float(Half value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}
// Two values as one word, the first in the low half; both are rounded to nearest even.
__device__ __forceinline__ unsigned pair_of(Half, float first, float second) {
#if __CUDA_ARCH__ >= 800
  unsigned result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
  return result;
#else
  unsigned short low, high;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(low) : "f"(first));
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(high) : "f"(second));
  return low | (unsigned)high << 16;
#endif
}
__device__ __forceinline__ unsigned pair_of(Bfloat, float first, float second) {
#if __CUDA_ARCH__ >= 800
  unsigned result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
  return result;
#else
  const float both[2] = {first, second};
  unsigned bits[2];
  for (int i = 0; i < 2; ++i) {
    const unsigned u = __float_as_uint(both[i]);
    bits[i] = (u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : (u + 0x7FFFu + (u >> 16 & 1)) >> 16;
  }
  return bits[0] | bits[1] << 16;
#endif
}

// A place in shared memory. Plain pointers to it cost one more instruction per access.
typedef unsigned Place;
__device__ __forceinline__ Place place_of(const void* shared) {
  return (unsigned)__cvta_generic_to_shared(shared);
}
__device__ __forceinline__ unsigned load_word(Place from) {
  unsigned result;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(result) : "r"(from));
  return result;
}
__device__ __forceinline__ uint4 load_four_words(Place from) {
  uint4 to;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
               : "r"(from));
  return to;
}
// A barrier of `threads` threads of a thread block; number 0 is that of __syncthreads.
__device__ __forceinline__ void wait_for_all(int number, int threads) {
  asm volatile("bar.sync %0, %1;" : : "r"(number), "r"(threads) : "memory");
}

// Bytes of weights, which are read once: they shall not displace inputs in the first cache.
template <int n> __device__ __forceinline__ Words<n> load_once(const void* from);
template <> __device__ __forceinline__ Words<2> load_once<2>(const void* from) {
  Words<2> to;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];"
               : "=r"(to.word[0]), "=r"(to.word[1]) : "l"(from));
  return to;
}
template <> __device__ __forceinline__ Words<4> load_once<4>(const void* from) {
  Words<4> to;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to.word[0]), "=r"(to.word[1]), "=r"(to.word[2]), "=r"(to.word[3])
               : "l"(from));
  return to;
}

#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ void multiply_add(float (&c)[4], Half, unsigned a0, unsigned a1,
                                             unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_add(float (&c)[4], Bfloat, unsigned a0, unsigned a1,
                                             unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_add(int (&c)[4], unsigned a0, unsigned a1, unsigned a2,
                                             unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#endif
// END PTX

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(Bfloat value) {
  return __uint_as_float((unsigned)value.bits << 16);
}
template <class T> __device__ __forceinline__ T rounded(float value) {
  return {(unsigned short)pair_of(T(), value, 0.0f)};
}
template <> __device__ __forceinline__ float rounded<float>(float value) { return value; }

// Eight values that are aligned.
template <class T> __device__ __forceinline__ void load8(const T* from, float (&to)[8]) {
  const uint4 all = *(const uint4*)from;
  const unsigned words[4] = {all.x, all.y, all.z, all.w};
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = to_float(T{(unsigned short)words[i]});
    to[2 * i + 1] = to_float(T{(unsigned short)(words[i] >> 16)});
  }
}
template <> __device__ __forceinline__ void load8<float>(const float* from, float (&to)[8]) {
  const float4 first = ((const float4*)from)[0];
  const float4 second = ((const float4*)from)[1];
  to[0] = first.x, to[1] = first.y, to[2] = first.z, to[3] = first.w;
  to[4] = second.x, to[5] = second.y, to[6] = second.z, to[7] = second.w;
}
template <class T> __device__ __forceinline__ void store8(T* to, const float (&from)[8]) {
  *(uint4*)to = make_uint4(pair_of(T(), from[0], from[1]), pair_of(T(), from[2], from[3]),
                           pair_of(T(), from[4], from[5]), pair_of(T(), from[6], from[7]));
}
template <> __device__ __forceinline__ void store8<float>(float* to, const float (&from)[8]) {
  ((float4*)to)[0] = make_float4(from[0], from[1], from[2], from[3]);
  ((float4*)to)[1] = make_float4(from[4], from[5], from[6], from[7]);
}
)cuda";

const std::string_view kGpuBlocks = R"cuda(
constexpr int kGroups = 4;  // of 8 values, of one thread

// Values `first` up to `first + count` of packed ones; `first` is a multiple of 8. 256 threads.
extern "C" __global__ void __launch_bounds__(256)
expand_4bit(const unsigned char* packed, Scales scales, const __grid_constant__ Table table,
            long long first, long long count, Value* out) {
  __shared__ float entries[16];
  __shared__ float map[256];
  const bool nested = scales.nested != nullptr;
  const long long start = (long long)blockIdx.x * (256 * kGroups) + threadIdx.x;
  unsigned codes[kGroups];
  float scale[kGroups];
  unsigned scale_code[kGroups];
#pragma unroll
  for (int u = 0; u < kGroups; ++u) {
    const long long at = 8 * (start + u * 256);
    codes[u] = 0;
    scale_code[u] = 0;
    scale[u] = 0;
    if (at < count) {
      const unsigned char* from = packed + (first + at) / 2;
      if (at + 8 <= count) {
        codes[u] = *(const unsigned*)from;
      } else {
        for (int i = 0; i < (int)(count - at + 1) / 2; ++i) codes[u] |= (unsigned)from[i] << 8 * i;
      }
      const long long block = (first + at) >> scales.shift;
      if (nested) {
        scale_code[u] = ((const unsigned char*)scales.absmax)[block];
        scale[u] = scales.nested[block >> scales.nested_shift];
      } else {
        scale[u] = ((const float*)scales.absmax)[block];
      }
    }
  }
  if (threadIdx.x < 16) entries[threadIdx.x] = table.value[threadIdx.x];
  if (nested) map[threadIdx.x] = scales.map[threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int u = 0; u < kGroups; ++u) {
    const long long at = 8 * (start + u * 256);
    if (at >= count) continue;
    if (nested) scale[u] = __fadd_rn(__fmul_rn(map[scale_code[u]], scale[u]), scales.offset);
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int position = 8 * (i / 2) + (i % 2 == 0 ? 4 : 0);
      values[i] = __fmul_rn(entries[codes[u] >> position & 15], scale[u]);
    }
    if (at + 8 <= count) {
      store8(out + at, values);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (at + i < count) out[at + i] = rounded<Value>(values[i]);
      }
    }
  }
}

__device__ __forceinline__ unsigned code_nf4(float value, const float* thresholds) {
  unsigned code = 0;
  for (unsigned step = 8; step > 0; step /= 2) {
    if (value > thresholds[code + step - 1]) code += step;
  }
  return code;
}
__device__ __forceinline__ unsigned code_fp4(float value, const float* thresholds) {
  const float magnitude = fabsf(value);
  unsigned step = 0;
  for (int i = 0; i < 7; ++i) step += magnitude > thresholds[i] ? 1 : 0;
  return (0x32547610u >> 4 * step & 15) + (value < 0 ? 8 : 0);
}

// Blocks of 1 << shift values become codes; a block is the work of up to 32 lanes with 8 values
// each at a time. *status becomes 1 if a value is infinite or NaN. 256 threads.
extern "C" __global__ void __launch_bounds__(256)
quantize_4bit(const Value* values, long long count, int shift,
              const __grid_constant__ Table thresholds, int is_nf4, unsigned char* packed,
              float* absmax, int* status) {
  __shared__ float steps[16];
  if (threadIdx.x < 16) steps[threadIdx.x] = thresholds.value[threadIdx.x];
  __syncthreads();
  const int size = 1 << shift;
  const int lanes = min(32, size / 8);
  const int own = threadIdx.x % lanes;
  const long long block = ((long long)blockIdx.x * 256 + threadIdx.x) / lanes;
  const long long begin = block << shift;
  const auto load = [&](long long at, float (&to)[8]) {
    if (at + 8 <= count) {
      load8(values + at, to);
    } else {
      for (int i = 0; i < 8; ++i) to[i] = at + i < count ? to_float(values[at + i]) : 0.0f;
    }
  };
  float value[8];
  unsigned most = 0;
  for (int i = own * 8; i < size; i += lanes * 8) {
    load(begin + i, value);
    for (int j = 0; j < 8; ++j) most = max(most, __float_as_uint(value[j]) & 0x7FFFFFFFu);
  }
  for (int apart = lanes / 2; apart > 0; apart /= 2) {
    most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, apart));
  }
  if (begin >= count) return;
  if (own == 0) {
    absmax[block] = __uint_as_float(most);
    if (most >= 0x7F800000u) *status = 1;
  }
  const float scale = __fdiv_rn(1.0f, __uint_as_float(most));
  const unsigned zero = is_nf4 ? 7 : 0;
  for (int i = own * 8; i < size; i += lanes * 8) {
    const long long at = begin + i;
    if (at >= count) return;
    load(at, value);
    unsigned codes = 0;
    for (int j = 0; j < 8; ++j) {
      const float scaled = __fmul_rn(value[j], scale);
      unsigned code = is_nf4 ? code_nf4(scaled, steps) : code_fp4(scaled, steps);
      if (most == 0 || at + j >= count) code = zero;
      codes |= code << (8 * (j / 2) + (j % 2 == 0 ? 4 : 0));
    }
    if (at + 8 <= count) {
      *(unsigned*)(packed + at / 2) = codes;
    } else {
      for (int j = 0; j < (int)(count - at + 1) / 2; ++j) packed[at / 2 + j] = codes >> 8 * j;
    }
  }
}
)cuda";

const std::string_view kGpuProduct4bit = R"cuda(
// y [rows, outputs] = x [rows, inputs] * W^T + bias, for a packed weight [outputs, inputs]. inputs
// is a multiple of 64 * kSplit, blocks have at least 64 values. The warps of a thread block are teams
// of 1 << team_shift. A team has a tile of outputs at a time; its warps divide k, and their sums are
// added in a fixed order.
//
// A step of a warp is k = 64 * kSplit values of 16 * kRowTiles rows. Lane 4 * g + t has the values
// 16 * kSplit * t ... of rows g and g + 8: one piece of memory, within one block of 64. Both values
// of a byte come from a table, of which every lane has a copy in its bank of shared memory.
// A scale is applied to the sums over its block. With kSplit = 2 a step has two blocks, which must
// not meet in a sum: inputs 0 to 3 are columns 0 to 3 for lanes t = 0, 1 and columns 4 to 7 for
// lanes t = 2, 3; other elements of the second factor are 0.
//
// With kSplit = 2, where bytes come fastest for the work they are: as many warps as a multiprocessor
// has registers for, with few bytes each on their way; inputs in shared memory if they fit there
// (kStaged), so that they do not queue behind bytes of the weight; and a table with room between
// its entries, so that one instruction makes the address of an entry.
constexpr int kSteps = kSplit == 2 ? 2 : 4;  // whose bytes are on their way
constexpr int kThreads = kSplit == 2 ? 1024 : 512;
constexpr int kWords = 2 * kSplit;  // of a lane, a row and a step
constexpr int kScales = kSteps * kSplit / 4;
constexpr int kRows = 16 * kRowTiles;
constexpr int kColumns = kSplit == 2 ? 4 : 8 * kColumnTiles;
constexpr int kStride = kRows + 4;  // of sums in shared memory, without bank conflicts
constexpr int kEntry = kSplit == 2 ? 256 : 128;  // bytes from one entry of the table to the next
constexpr int kTable = 256 * kEntry;
constexpr int kInputsApart = 16;  // values between staged rows, against bank conflicts
constexpr unsigned kAll = 0xFFFFFFFFu;

// What a warp reads of the weight: the steps of a tile, then those of its next tile, kSteps ahead.
struct Stream {
  const unsigned char* packed;  // from the lane's first byte of a step
  Scales scales;
  int outputs, blocks;  // blocks of 64 of a row
  int g, t;
  int begin, end;  // steps

  Words<kWords> bytes[kSteps][kRowTiles][2];
  // Of the blocks of the next kSteps steps; lane t has those of blocks t, t + 4, ...
  unsigned next[kRowTiles][2][kScales];
  float next_nested[kRowTiles][2][kScales];

  // The number of the first block of a row.
  __device__ __forceinline__ int first_of(int tile, int m, int h) const {
    return min(tile * kRows + 16 * m + 8 * h + g, outputs - 1) * blocks;
  }

  __device__ __forceinline__ void fetch(int slot, int tile, int step) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const long long block = first_of(tile, m, h) + step * kSplit;
        bytes[slot][m][h] = load_once<kWords>(packed + block * 32);
      }
    }
  }

  __device__ __forceinline__ void fetch_scales(int tile, int step) {
#pragma unroll
    for (int a = 0; a < kScales; ++a) {
      const int block = min(step * kSplit + 4 * a + t, blocks - 1);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int index = (first_of(tile, m, h) + block) >> (scales.shift - 6);
          if (kNested) {
            next[m][h][a] = __ldg((const unsigned char*)scales.absmax + index);
            next_nested[m][h][a] = __ldg(scales.nested + (index >> scales.nested_shift));
          } else {
            next[m][h][a] = __ldg((const unsigned*)scales.absmax + index);
          }
        }
      }
    }
  }

  // The first steps of the first tile.
  __device__ __forceinline__ void start(int tile) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (begin + s < end) fetch(s, tile, begin + s);
    }
    if (begin < end) fetch_scales(tile, begin);
  }

  // The scales that were fetched.
  __device__ __forceinline__ void take_scales(float (&to)[kRowTiles][2][kScales],
                                              const float* map) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int a = 0; a < kScales; ++a) {
          to[m][h][a] = kNested ? __fadd_rn(__fmul_rn(map[next[m][h][a] & 255],
                                                      next_nested[m][h][a]), scales.offset)
                                : __uint_as_float(next[m][h][a]);
        }
      }
    }
  }
};

// A lane's columns of the second factor.
struct Inputs {
  bool is_there[kColumnTiles];
  const uint4* from[kColumnTiles];
  Place staged[kColumnTiles];

  __device__ __forceinline__ Inputs(const Value* x, Place copy, int rows, int inputs, int g,
                                    int t) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      const int row = kSplit == 1 ? 8 * n + g : g % 4;
      is_there[n] = row < rows && (kSplit == 1 || g / 4 == t / 2);
      const int nearest = min(row, rows - 1);
      from[n] = (const uint4*)(x + (long long)nearest * inputs + t * (16 * kSplit));
      staged[n] = copy + (nearest * (inputs + kInputsApart) + t * (16 * kSplit)) * 2;
    }
  }
  // 8 values.
  __device__ __forceinline__ uint4 load(int n, int step, int part) const {
    if (!is_there[n]) return make_uint4(0, 0, 0, 0);
    const int at = step * (8 * kSplit) + part;
    return kStaged ? load_four_words(staged[n] + at * 16) : __ldg(from[n] + at);
  }
};

// Pairs of values by bytes: a lane's copy of the table.
struct Pairs {
  Place table;
  unsigned own;  // within an entry

  __device__ __forceinline__ Pairs(const void* memory, int lane)
      : table(place_of(memory) + (kEntry == 256 ? 0 : lane * 4)), own(lane * 4) {}

  // Both values of byte `position` of a word.
  __device__ __forceinline__ unsigned look_up(unsigned word, int position) const {
    if (kEntry == 256) return load_word(table + __byte_perm(word, own, 0x7704 + 16 * position));
    return load_word(table + __byte_perm(word, 0, 0x4440 + position) * kEntry);
  }
};

// sums = the products of one step.
__device__ __forceinline__ void multiply(const Words<kWords> (&bytes)[kRowTiles][2],
                                         const Inputs& inputs, int step, const Pairs& pairs,
                                         float (&sums)[kRowTiles][kColumnTiles][4]) {
#pragma unroll
  for (int q = 0; q < kWords; ++q) {
    uint4 b[kColumnTiles];
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) b[n] = inputs.load(n, step, q);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const unsigned low = bytes[m][0].word[q];
      const unsigned high = bytes[m][1].word[q];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned a0 = pairs.look_up(low, 2 * i);
        const unsigned a1 = pairs.look_up(high, 2 * i);
        const unsigned a2 = pairs.look_up(low, 2 * i + 1);
        const unsigned a3 = pairs.look_up(high, 2 * i + 1);
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
          multiply_add(sums[m][n], Value(), a0, a1, a2, a3, i == 0 ? b[n].x : b[n].z,
                       i == 0 ? b[n].y : b[n].w);
        }
      }
    }
  }
}

// All steps of a tile. `next` is the tile after it; there is none if it is negative.
__device__ __forceinline__ void add_steps(Stream& stream, int tile, int next, const Inputs& inputs,
                                          const Pairs& pairs, const float* map,
                                          float (&total)[kRowTiles][kColumnTiles][4]) {
  const int lane = threadIdx.x % 32;
  for (int round = stream.begin; round < stream.end; round += kSteps) {
    float scale[kRowTiles][2][kScales];
    stream.take_scales(scale, map);
    if (round + kSteps < stream.end) {
      stream.fetch_scales(tile, round + kSteps);
    } else if (next >= 0) {
      stream.fetch_scales(next, stream.begin);
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int step = round + s;
      if (step < stream.end) {
        float part[kRowTiles][kColumnTiles][4] = {};
        multiply(stream.bytes[s], inputs, step, pairs, part);
        if (step + kSteps < stream.end) {
          stream.fetch(s, tile, step + kSteps);
        } else if (next >= 0) {
          stream.fetch(s, next, stream.begin + s);
        }
        const int source = (lane & 28) | ((s * kSplit + (kSplit == 1 ? 0 : stream.t / 2)) & 3);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          const float low = __shfl_sync(kAll, scale[m][0][s * kSplit / 4], source);
          const float high = __shfl_sync(kAll, scale[m][1][s * kSplit / 4], source);
#pragma unroll
          for (int n = 0; n < kColumnTiles; ++n) {
            total[m][n][0] += part[m][n][0] * low;
            total[m][n][1] += part[m][n][1] * low;
            total[m][n][2] += part[m][n][2] * high;
            total[m][n][3] += part[m][n][3] * high;
          }
        }
      }
    }
  }
}

// Warps that have a tile in common.
struct Team {
  int number, warps;
  int warp;  // of the team

  __device__ __forceinline__ explicit Team(int shift)
      : number(threadIdx.x / 32 >> shift),
        warps(1 << shift),
        warp(threadIdx.x / 32 & (warps - 1)) {}
};

// Adds the totals of a team and stores the outputs of a tile. `area` is not used by the next tile:
// one barrier per tile is enough.
__device__ __forceinline__ void finish(const float (&total)[kRowTiles][kColumnTiles][4],
                                       const Team& team, float* area, int tile, const Value* bias,
                                       Value* y, int rows, int outputs) {
  const int g = threadIdx.x % 32 / 4;
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float sum = total[m][n][e];
        if (kSplit == 2) sum += __shfl_xor_sync(kAll, sum, 2);
        const int column = 8 * n + 2 * t + e % 2;
        if (column < rows && (kSplit == 1 || t < 2)) {
          area[(team.warp * kColumns + column) * kStride + 16 * m + 8 * (e / 2) + g] = sum;
        }
      }
    }
  }
  wait_for_all(1 + team.number, team.warps * 32);
  for (int i = team.warp * 32 + threadIdx.x % 32; i < kRows * rows; i += team.warps * 32) {
    const int column = i / kRows;
    const int output = tile * kRows + i % kRows;
    if (output >= outputs) continue;
    float sum = 0;
    for (int w = 0; w < team.warps; ++w) {
      sum += area[(w * kColumns + column) * kStride + i % kRows];
    }
    if (bias != nullptr) sum += to_float(bias[output]);
    y[(long long)column * outputs + output] = rounded<Value>(sum);
  }
}

// Shared memory: the table, two areas of sums, the map of scales if they are nested, the inputs if
// they are staged.
extern "C" __global__ void __launch_bounds__(kThreads)
product_4bit(const unsigned char* packed, Scales scales, const __grid_constant__ Table table,
             const Value* x, const Value* bias, Value* y, int rows, int inputs, int outputs,
             int team_shift) {
  extern __shared__ __align__(128) unsigned char memory[];
  constexpr int kArea = kColumns * kStride;  // of a warp
  const int lane = threadIdx.x % 32;
  const int warps = blockDim.x / 32;
  const Team team(team_shift);
  float* const areas = (float*)(memory + kTable);
  float* const map = areas + 2 * warps * kArea;
  Value* const copy = (Value*)(map + (kNested ? 256 : 0));
  const int steps = inputs / (64 * kSplit);
  Stream stream;
  stream.packed = packed + lane % 4 * (8 * kSplit);
  stream.scales = scales;
  stream.outputs = outputs;
  stream.blocks = inputs / 64;
  stream.g = lane / 4;
  stream.t = lane % 4;
  stream.begin = steps * team.warp >> team_shift;
  stream.end = steps * (team.warp + 1) >> team_shift;

  const int tiles = (outputs + kRows - 1) / kRows;
  const int apart = (int)gridDim.x * (warps >> team_shift);  // of the tiles of a team
  int tile = team.number * (int)gridDim.x + (int)blockIdx.x;
  if (tile < tiles) stream.start(tile);
  for (int entry = threadIdx.x / 32; entry < 256; entry += warps) {
    ((unsigned*)(memory + entry * kEntry))[lane] =
        pair_of(Value(), table.value[entry / 16], table.value[entry % 16]);
  }
  if (kNested && threadIdx.x < 256) map[threadIdx.x] = scales.map[threadIdx.x];
  if (kStaged) {
    for (int row = 0; row < rows; ++row) {
      const uint4* const from = (const uint4*)(x + (long long)row * inputs);
      uint4* const to = (uint4*)(copy + row * (inputs + kInputsApart));
      for (int i = threadIdx.x; i < inputs / 8; i += blockDim.x) to[i] = __ldg(from + i);
    }
  }
  const Inputs in(x, place_of(copy), rows, inputs, stream.g, stream.t);
  const Pairs pairs(memory, lane);
  __syncthreads();

  int parity = 0;
  for (; tile < tiles; tile += apart) {
    float total[kRowTiles][kColumnTiles][4] = {};
    const int next = tile + apart;
    add_steps(stream, tile, next < tiles ? next : -1, in, pairs, map, total);
    finish(total, team, areas + (parity * warps + team.number * team.warps) * kArea, tile, bias, y,
           rows, outputs);
    parity ^= 1;
  }
}
)cuda";

}  // namespace accelerate::detail::quantization
