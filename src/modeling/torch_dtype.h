// src/modeling/torch_dtype.h - dtypes by the names that files use.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <string_view>

namespace accelerate::detail::modeling {

/// The dtype that Python prints as torch.<name>; nullopt if this LibTorch has none.
[[nodiscard]] std::optional<at::ScalarType> dtype_of(std::string_view name);

/// "float32".
[[nodiscard]] std::string name_of(at::ScalarType dtype);

}  // namespace accelerate::detail::modeling
