// src/formats/quant_state.h - how bitsandbytes describes a weight in 4 bits, and what belongs to
// it.
//
// Beside "fc.weight" (codes) a file has "fc.weight.absmax", "fc.weight.quant_map", with double
// quantization "fc.weight.nested_absmax" and "fc.weight.nested_quant_map", and the JSON text below
// as bytes in "fc.weight.quant_state.bitsandbytes__nf4" (or __fp4).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace accelerate::detail::formats {

/// The name of the text without the type: "quant_state.bitsandbytes__".
inline constexpr std::string_view kQuantStateName = "quant_state.bitsandbytes__";

struct QuantStateText {
  std::string quant_type;  // nf4 or fp4
  std::int64_t blocksize = 64;
  std::string dtype;  // of the weight before: "float16"
  std::vector<std::int64_t> shape;
  struct Nested {
    std::int64_t blocksize = 256;
    std::string dtype = "float32";
    double offset = 0;
    bool operator==(const Nested&) const = default;
  };
  std::optional<Nested> nested = std::nullopt;

  bool operator==(const QuantStateText&) const = default;
};

/// Throws `FormatError`: the weight cannot be read, for `problem`.
[[noreturn]] void refuse_weight(const std::string& weight, const std::string& problem);

/// Throws `FormatError` with the name of the weight and the problem: not JSON, an unknown or
/// missing member, a type, size or shape that no quantized weight has.
[[nodiscard]] QuantStateText parse_quant_state(std::string_view text, const std::string& weight);
/// The bytes that Python writes for it.
[[nodiscard]] std::string write_quant_state(const QuantStateText& state);

struct QuantTensorFacts {
  std::string dtype;
  std::vector<std::int64_t> shape;
};
/// By the names behind "fc.weight."; the codes themselves by "".
using QuantTensors = std::map<std::string, QuantTensorFacts>;
/// The member of `tensors` that is the text. Throws `FormatError` if there is none or several, or
/// one of an unknown type.
[[nodiscard]] std::string find_quant_state(const QuantTensors& tensors, const std::string& weight);
/// Throws `FormatError` if a tensor is missing, unknown, or not of the size that `state` asks for.
void check_quant_tensors(const QuantStateText& state, const QuantTensors& tensors,
                         const std::string& weight);

/// The same for a weight in 8 bits: "fc.weight" of that shape, "fc.SCB" and "fc.weight_format",
/// which are the names in `tensors`, with `weight_format` as its value.
void check_int8_tensors(const std::vector<std::int64_t>& shape,
                        std::optional<std::int64_t> weight_format, const QuantTensors& tensors,
                        const std::string& weight);

}  // namespace accelerate::detail::formats
