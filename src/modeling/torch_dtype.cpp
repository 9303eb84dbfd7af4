#include "modeling/torch_dtype.h"

#include <torch/types.h>

namespace accelerate::detail::modeling {

std::optional<at::ScalarType> dtype_of(std::string_view name) {
  for (int code = 0; code < static_cast<int>(at::ScalarType::Undefined); ++code) {
    const auto dtype = static_cast<at::ScalarType>(code);
    if (name_of(dtype) == name) return dtype;
  }
  return std::nullopt;
}

std::string name_of(at::ScalarType dtype) { return std::string(c10::getDtypeNames(dtype).first); }

}  // namespace accelerate::detail::modeling
