// src/formats/torch_dtypes.h - the dtypes of Torch, by name.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace accelerate::detail::formats {

struct TorchDtype {
  std::string_view name;     // "float32"
  std::int64_t bytes = 0;    // of an element
  std::string_view storage;  // "FloatStorage"; empty for dtypes of untyped storages
};

inline constexpr auto kTorchDtypes = std::to_array<TorchDtype>({
    {"float64", 8, "DoubleStorage"},
    {"float32", 4, "FloatStorage"},
    {"float16", 2, "HalfStorage"},
    {"bfloat16", 2, "BFloat16Storage"},
    {"int64", 8, "LongStorage"},
    {"int32", 4, "IntStorage"},
    {"int16", 2, "ShortStorage"},
    {"int8", 1, "CharStorage"},
    {"uint8", 1, "ByteStorage"},
    {"bool", 1, "BoolStorage"},
    {"complex128", 16, "ComplexDoubleStorage"},
    {"complex64", 8, "ComplexFloatStorage"},
    {"complex32", 4, ""},
    {"uint16", 2, ""},
    {"uint32", 4, ""},
    {"uint64", 8, ""},
    {"float8_e4m3fn", 1, ""},
    {"float8_e5m2", 1, ""},
    {"float8_e4m3fnuz", 1, ""},
    {"float8_e5m2fnuz", 1, ""},
    {"float8_e8m0fnu", 1, ""},
    {"float4_e2m1fn_x2", 1, ""},
    {"bits1x8", 1, ""},
    {"bits2x4", 1, ""},
    {"bits4x2", 1, ""},
    {"bits8", 1, ""},
    {"bits16", 2, ""},
});

/// The dtype of this name, or null.
[[nodiscard]] constexpr const TorchDtype* find_torch_dtype(std::string_view name) {
  for (const auto& dtype : kTorchDtypes) {
    if (dtype.name == name) return &dtype;
  }
  return nullptr;
}

/// The dtype of a storage class such as "FloatStorage", or null.
[[nodiscard]] constexpr const TorchDtype* find_storage_dtype(std::string_view storage) {
  for (const auto& dtype : kTorchDtypes) {
    if (!dtype.storage.empty() && dtype.storage == storage) return &dtype;
  }
  return nullptr;
}

}  // namespace accelerate::detail::formats
