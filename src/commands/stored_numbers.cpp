#include "commands/stored_numbers.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <span>

#include "core/python_text.h"
#include "formats/torch_dtypes.h"

namespace accelerate::detail::commands {
namespace {

template <class T>
double number(const std::byte* bytes) {
  T value{};
  std::memcpy(&value, bytes, sizeof value);
  return static_cast<double>(value);
}

// Floats of 8 and 16 bits by the rules of IEEE 754; kFinite: without infinities (e4m3fn).
template <class Bits, int kExponent, int kMantissa, bool kFinite = false>
double small_float(const std::byte* bytes) {
  Bits bits{};
  std::memcpy(&bits, bytes, sizeof bits);
  constexpr int kOnes = (1 << kExponent) - 1;
  const int exponent = (bits >> kMantissa) & kOnes;
  const int mantissa = bits & ((1 << kMantissa) - 1);
  const double sign = bits >> (kExponent + kMantissa) != 0 ? -1 : 1;
  if (exponent == kOnes && (!kFinite || mantissa == (1 << kMantissa) - 1)) {
    return mantissa != 0 ? NAN : sign * INFINITY;
  }
  const int implicit = exponent == 0 ? 0 : 1 << kMantissa;
  const int power = std::max(exponent, 1) - (kOnes >> 1) - kMantissa;
  return sign * std::ldexp(mantissa + implicit, power);
}

template <std::integral T>
std::string integer_text(const std::byte* bytes) {
  T value{};
  std::memcpy(&value, bytes, sizeof value);
  return std::to_string(value);
}

template <double (*kLoad)(const std::byte*)>
std::string float_text(const std::byte* bytes) {
  return python_repr(kLoad(bytes));
}

template <double (*kLoad)(const std::byte*)>
constexpr NumberType float_type(std::string_view dtype) {
  return {.dtype = dtype, .load = kLoad, .show = float_text<kLoad>};
}

template <std::integral T>
constexpr NumberType integer_type(std::string_view dtype) {
  return {.dtype = dtype, .load = number<T>, .show = integer_text<T>};
}

constexpr auto kNumberTypes = std::to_array<NumberType>({
    float_type<number<double>>("float64"),
    float_type<number<float>>("float32"),
    float_type<small_float<std::uint16_t, 5, 10>>("float16"),
    float_type<small_float<std::uint16_t, 8, 7>>("bfloat16"),
    float_type<small_float<std::uint8_t, 4, 3, true>>("float8_e4m3fn"),
    float_type<small_float<std::uint8_t, 5, 2>>("float8_e5m2"),
    integer_type<std::int64_t>("int64"),
    integer_type<std::int32_t>("int32"),
    integer_type<std::int16_t>("int16"),
    integer_type<std::int8_t>("int8"),
    integer_type<std::uint64_t>("uint64"),
    integer_type<std::uint32_t>("uint32"),
    integer_type<std::uint16_t>("uint16"),
    integer_type<std::uint8_t>("uint8"),
});

}  // namespace

std::string_view torch_name(std::string_view dtype) {
  const auto* const found = formats::find_dtype_by(&formats::TorchDtype::safetensors, dtype);
  return found != nullptr ? found->name : dtype;
}

const NumberType* find_number_type(std::string_view dtype) {
  const auto* const found = std::ranges::find(kNumberTypes, torch_name(dtype), &NumberType::dtype);
  return found != kNumberTypes.end() ? found : nullptr;
}

std::string scalar_text(const formats::MappedFile& file, const StoredTensor& tensor) {
  const auto* const type = find_number_type(tensor.dtype);
  const auto* const dtype = formats::find_torch_dtype(torch_name(tensor.dtype));
  if (type == nullptr || dtype == nullptr || tensor.bytes != dtype->bytes) return {};
  std::array<std::byte, 8> bytes{};
  file.read(tensor.offset, std::span(bytes).first(static_cast<std::size_t>(dtype->bytes)));
  return type->show(bytes.data());
}

}  // namespace accelerate::detail::commands
