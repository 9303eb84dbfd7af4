// src/checkpoint/safetensors_dtypes.h - dtypes and shapes of safetensors in Torch's terms.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "formats/safetensors_header.h"

namespace accelerate::detail::checkpoint {

/// nullopt for what the other side does not have.
[[nodiscard]] std::optional<formats::Dtype> safetensors_dtype(c10::ScalarType type);
[[nodiscard]] std::optional<c10::ScalarType> scalar_type(formats::Dtype dtype);

/// The entry of a tensor in a header. Throws `ArgumentError` for a dtype that the format does not
/// have.
[[nodiscard]] formats::TensorEntry entry_of(const std::string& name, const at::Tensor& tensor);

/// Dtype and shape of the tensor that Torch makes of an entry. Throws `UnsupportedError` for a
/// dtype that Torch does not have.
struct TorchForm {
  c10::ScalarType type;
  std::vector<std::int64_t> shape;
};
[[nodiscard]] TorchForm torch_form(const formats::TensorEntry& entry,
                                   const std::filesystem::path& path);

}  // namespace accelerate::detail::checkpoint
