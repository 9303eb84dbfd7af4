// src/core/sorted_entries.h - the entries of a dict in the order of a file.
#pragma once

#include <algorithm>
#include <vector>

#include "accelerate/value.h"

namespace accelerate::detail::inline core {

/// The entries as they are, or sorted: texts by code point, numbers by value. Where both occur
/// there is no order (Python has none) and the dict's own is kept.
[[nodiscard]] inline std::vector<const ValueDict::Entry*> entries(const Value::Dict& dict,
                                                                  bool sorted) {
  std::vector<const ValueDict::Entry*> result;
  result.reserve(dict.size());
  for (const auto& entry : dict) result.push_back(&entry);
  if (!sorted) return result;
  const auto is_text = [](const ValueDict::Entry* entry) { return entry->key().is_string(); };
  const auto number = [](const ValueDict::Entry* entry) {
    return entry->key().is_bool() ? std::int64_t{entry->key().as_bool()} : entry->key().as_int();
  };
  if (std::ranges::all_of(result, is_text)) {
    // Bytes of UTF-8 sort as the code points do.
    std::ranges::sort(result, {}, [](const auto* entry) -> const std::string& {
      return entry->key().as_string();
    });
  } else if (std::ranges::none_of(result, is_text)) {
    std::ranges::sort(result, {}, number);
  }
  return result;
}

}  // namespace accelerate::detail::inline core
