// src/formats/torch_dtypes.h - the dtypes of Torch, by name.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace accelerate::detail::formats {

struct TorchDtype {
  std::string_view name;         // "float32"
  std::int64_t bytes = 0;        // of an element
  std::string_view storage;      // "FloatStorage"; empty for dtypes of untyped storages
  std::string_view safetensors;  // "F32"; empty if that format does not have it
  std::string_view numpy = {};   // "f4", likewise
};

inline constexpr auto kTorchDtypes = std::to_array<TorchDtype>({
    {"float64", 8, "DoubleStorage", "F64", "f8"},
    {"float32", 4, "FloatStorage", "F32", "f4"},
    {"float16", 2, "HalfStorage", "F16", "f2"},
    {"bfloat16", 2, "BFloat16Storage", "BF16"},
    {"int64", 8, "LongStorage", "I64", "i8"},
    {"int32", 4, "IntStorage", "I32", "i4"},
    {"int16", 2, "ShortStorage", "I16", "i2"},
    {"int8", 1, "CharStorage", "I8", "i1"},
    {"uint8", 1, "ByteStorage", "U8", "u1"},
    {"bool", 1, "BoolStorage", "BOOL", "b1"},
    {"complex128", 16, "ComplexDoubleStorage", "", "c16"},
    {"complex64", 8, "ComplexFloatStorage", "C64", "c8"},
    {"complex32", 4, "", ""},
    {"uint16", 2, "", "U16", "u2"},
    {"uint32", 4, "", "U32", "u4"},
    {"uint64", 8, "", "U64", "u8"},
    {"float8_e4m3fn", 1, "", "F8_E4M3"},
    {"float8_e5m2", 1, "", "F8_E5M2"},
    {"float8_e4m3fnuz", 1, "", "F8_E4M3FNUZ"},
    {"float8_e5m2fnuz", 1, "", "F8_E5M2FNUZ"},
    {"float8_e8m0fnu", 1, "", "F8_E8M0"},
    {"float4_e2m1fn_x2", 1, "", "F4"},
    {"bits1x8", 1, "", ""},
    {"bits2x4", 1, "", ""},
    {"bits4x2", 1, "", ""},
    {"bits8", 1, "", ""},
    {"bits16", 2, "", ""},
});

/// The dtype with this name in a column of the table, or null.
[[nodiscard]] constexpr const TorchDtype* find_dtype_by(std::string_view TorchDtype::* column,
                                                        std::string_view name) {
  for (const auto& dtype : kTorchDtypes) {
    if (!name.empty() && dtype.*column == name) return &dtype;
  }
  return nullptr;
}
[[nodiscard]] constexpr const TorchDtype* find_torch_dtype(std::string_view name) {
  return find_dtype_by(&TorchDtype::name, name);
}

}  // namespace accelerate::detail::formats
