// src/core/first_names.h - long lists of names in messages.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "core/text.h"

namespace accelerate::detail::inline core {

/// The first eight, and "..." if there are more.
[[nodiscard]] inline std::string first_names(std::vector<std::string> names) {
  constexpr std::size_t kMost = 8;
  if (names.size() > kMost) {
    names.resize(kMost);
    names.emplace_back("...");
  }
  return join(names);
}

}  // namespace accelerate::detail::inline core
