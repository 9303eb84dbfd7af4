// src/comm/dtype_name.h - dtypes as Python writes them.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace accelerate::detail {

/// "torch.float32".
[[nodiscard]] std::string dtype_name(at::ScalarType dtype);

}  // namespace accelerate::detail
