#include "comm/call_facts.h"

#include <array>
#include <string>

#include "accelerate/to_value.h"

namespace accelerate::detail {

const char* dtype_literal(at::ScalarType dtype) {
  constexpr auto kCount = static_cast<std::size_t>(at::ScalarType::NumOptions);
  static const auto* const names = [] {
    auto* all = new std::array<std::string, kCount>;
    for (std::size_t i = 0; i < kCount; ++i) {
      const auto name = dtype_name(static_cast<at::ScalarType>(i));
      (*all)[i] = name.substr(name.rfind('.') + 1);  // without "torch."
    }
    return all;
  }();
  const auto index = static_cast<std::size_t>(dtype);
  return index < kCount ? (*names)[index].c_str() : "?";
}

}  // namespace accelerate::detail
