#include "checkpoint/safetensors_dtypes.h"

#include <algorithm>
#include <array>
#include <utility>

#include "accelerate/errors.h"
#include "core/python_text.h"
#include "core/text.h"

namespace accelerate::detail::checkpoint {
namespace {

using formats::Dtype;

constexpr std::array<std::pair<Dtype, c10::ScalarType>, 20> kPairs{{
    {Dtype::kBool, c10::ScalarType::Bool},
    {Dtype::kF4, c10::ScalarType::Float4_e2m1fn_x2},
    {Dtype::kU8, c10::ScalarType::Byte},
    {Dtype::kI8, c10::ScalarType::Char},
    {Dtype::kF8E5M2, c10::ScalarType::Float8_e5m2},
    {Dtype::kF8E4M3, c10::ScalarType::Float8_e4m3fn},
    {Dtype::kF8E8M0, c10::ScalarType::Float8_e8m0fnu},
    {Dtype::kF8E4M3Fnuz, c10::ScalarType::Float8_e4m3fnuz},
    {Dtype::kF8E5M2Fnuz, c10::ScalarType::Float8_e5m2fnuz},
    {Dtype::kI16, c10::ScalarType::Short},
    {Dtype::kU16, c10::ScalarType::UInt16},
    {Dtype::kF16, c10::ScalarType::Half},
    {Dtype::kBF16, c10::ScalarType::BFloat16},
    {Dtype::kI32, c10::ScalarType::Int},
    {Dtype::kU32, c10::ScalarType::UInt32},
    {Dtype::kF32, c10::ScalarType::Float},
    {Dtype::kC64, c10::ScalarType::ComplexFloat},
    {Dtype::kF64, c10::ScalarType::Double},
    {Dtype::kI64, c10::ScalarType::Long},
    {Dtype::kU64, c10::ScalarType::UInt64},
}};

}  // namespace

std::optional<Dtype> safetensors_dtype(c10::ScalarType type) {
  const auto* at = std::ranges::find(kPairs, type, &std::pair<Dtype, c10::ScalarType>::second);
  return at == kPairs.end() ? std::nullopt : std::optional(at->first);
}

std::optional<c10::ScalarType> scalar_type(Dtype dtype) {
  const auto* at = std::ranges::find(kPairs, dtype, &std::pair<Dtype, c10::ScalarType>::first);
  return at == kPairs.end() ? std::nullopt : std::optional(at->second);
}

formats::TensorEntry entry_of(const std::string& name, const at::Tensor& tensor) {
  const auto dtype = safetensors_dtype(tensor.scalar_type());
  if (!dtype) {
    throw ArgumentError(str("The tensor ", python_repr(name), " has the dtype ",
                            c10::toString(tensor.scalar_type()),
                            ", which safetensors files cannot hold. Convert it before saving."));
  }
  formats::TensorEntry entry{.name = name, .dtype = *dtype, .shape = tensor.sizes().vec()};
  if (*dtype == Dtype::kF4) {  // two numbers in an element
    if (entry.shape.empty()) {
      throw ArgumentError(str("The tensor ", python_repr(name),
                              " holds one pair of 4-bit floats and has no dimension, which "
                              "safetensors files cannot hold. Save it with shape [1]."));
    }
    entry.shape.back() *= 2;
  }
  return entry;
}

TorchForm torch_form(const formats::TensorEntry& entry, const std::filesystem::path& path) {
  const auto type = scalar_type(entry.dtype);
  if (!type) {
    throw UnsupportedError(str("'", path.string(), "': tensor ", python_repr(entry.name),
                               " has the dtype ", to_string(entry.dtype),
                               ", which Torch does not have."));
  }
  TorchForm form{*type, entry.shape};
  if (entry.dtype == Dtype::kF4) {
    if (form.shape.empty() || form.shape.back() % 2 != 0) {
      throw UnsupportedError(str("'", path.string(), "': tensor ", python_repr(entry.name),
                                 " has the dtype F4 and shape [", join(entry.shape),
                                 "]; Torch needs an even last dimension."));
    }
    form.shape.back() /= 2;
  }
  return form;
}

}  // namespace accelerate::detail::checkpoint
