// src/quantization/gpu_sources.h - kernels of packed weights: texts of CUDA C++ without includes.
//
// A text is compiled for one variant: its types and constants are put before it. What kernels read
// and write is described at each of them; gpu_kernels.cpp launches them.
#pragma once

#include <string>
#include <string_view>

namespace accelerate::detail::quantization {

/// Conversions, loads and matrix instructions; all other texts need it.
extern const std::string_view kGpuTypes;
/// expand_4bit, quantize_4bit. Needs Value.
extern const std::string_view kGpuBlocks;
/// product_4bit. Needs Value (Half or Bfloat), kSplit, kColumnTiles, kRowTiles, kNested, kStaged.
extern const std::string_view kGpuProduct4bit;
/// What the two texts below have in common. Needs Value.
extern const std::string_view kGpuFinish;
/// quantize_rows, list_columns, clear_columns, expand_8bit, finish_8bit.
extern const std::string_view kGpuRows;
/// product_8bit. Needs kColumnTiles.
extern const std::string_view kGpuProduct8bit;

// The layout of parameters that are passed by value. The texts declare the same.

struct GpuTable {
  float value[16];
};

/// Scales of blocks: float32 in `absmax`, or 8-bit codes there, whose values are
/// map[code] * nested[block >> nested_shift] + offset.
struct GpuScales {
  const void* absmax = nullptr;
  const float* map = nullptr;
  const float* nested = nullptr;  // nullptr: `absmax` is float32
  float offset = 0;
  int shift = 6;  // a block has 1 << shift values
  int nested_shift = 8;
};

}  // namespace accelerate::detail::quantization
