// tests/checkpoint/random_state.h - the state dicts of tests/reference/safetensors, made again.
#pragma once

#include <ATen/Functions.h>

#include <array>
#include <cstdint>
#include <string>

#include "accelerate/safetensors.h"

namespace accelerate::test {

inline constexpr std::array<at::ScalarType, 20> kSafetensorsTypes{at::ScalarType::Bool,
                                                                  at::ScalarType::Float4_e2m1fn_x2,
                                                                  at::ScalarType::Byte,
                                                                  at::ScalarType::Char,
                                                                  at::ScalarType::Float8_e5m2,
                                                                  at::ScalarType::Float8_e4m3fn,
                                                                  at::ScalarType::Float8_e8m0fnu,
                                                                  at::ScalarType::Float8_e4m3fnuz,
                                                                  at::ScalarType::Float8_e5m2fnuz,
                                                                  at::ScalarType::Short,
                                                                  at::ScalarType::UInt16,
                                                                  at::ScalarType::Half,
                                                                  at::ScalarType::BFloat16,
                                                                  at::ScalarType::Int,
                                                                  at::ScalarType::UInt32,
                                                                  at::ScalarType::Float,
                                                                  at::ScalarType::ComplexFloat,
                                                                  at::ScalarType::Double,
                                                                  at::ScalarType::Long,
                                                                  at::ScalarType::UInt64};

/// The generator of write_safetensors.py.
class Numbers {
 public:
  explicit Numbers(std::uint64_t seed) : state_(seed) {}
  std::int64_t below(std::uint64_t limit) {
    state_ = state_ * 6364136223846793005U + 1442695040888963407U;
    return static_cast<std::int64_t>((state_ >> 33) % limit);
  }

 private:
  std::uint64_t state_;
};

inline at::Tensor tensor_of(Numbers& numbers, at::ScalarType type,
                            const std::vector<std::int64_t>& shape) {
  auto tensor = at::empty(shape, type);
  auto* bytes = static_cast<unsigned char*>(tensor.data_ptr());
  for (std::size_t i = 0; i < tensor.nbytes(); ++i) {
    bytes[i] = static_cast<unsigned char>(numbers.below(type == at::kBool ? 2 : 256));
  }
  return tensor;
}

inline at::Tensor random_tensor(Numbers& numbers) {
  const auto type = kSafetensorsTypes.at(static_cast<std::size_t>(numbers.below(20)));
  auto rank = numbers.below(4);
  if (type == at::ScalarType::Float4_e2m1fn_x2 && rank == 0) rank = 1;
  std::vector<std::int64_t> shape;
  for (std::int64_t i = 0; i < rank; ++i) shape.push_back(numbers.below(5));
  return tensor_of(numbers, type, shape);
}

inline std::string random_text(Numbers& numbers) {
  static const std::array<std::string, 14> kPieces{
      "weight", "bias",        "layers",    "0",        "\u00e9", "\u91cd\u307f", "\U0001F600",
      "a\"b",   "back\\slash", "new\nline", "\x1f\x7f", "",       "a/b",          "\u2028"};
  std::string text;
  const auto count = 1 + numbers.below(3);
  for (std::int64_t i = 0; i < count; ++i) {
    if (i > 0) text += '.';
    text += kPieces.at(static_cast<std::size_t>(numbers.below(kPieces.size())));
  }
  return text;
}

struct RandomState {
  StateDict tensors;
  safetensors::Metadata metadata;
};

inline RandomState random_state(std::uint64_t seed) {
  Numbers numbers(seed);
  RandomState state;
  const auto count = numbers.below(12);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto name = random_text(numbers) + "." + std::to_string(i);
    state.tensors.insert(name, random_tensor(numbers));
  }
  const auto kind = numbers.below(3);
  if (kind == 1) state.metadata = {{"format", "pt"}};
  if (kind == 2) {
    const auto key = random_text(numbers);
    state.metadata = {{key, random_text(numbers)}};
  }
  return state;
}

}  // namespace accelerate::test
