// src/formats/offload_index.h - the index.json of an offload folder, as text.
#pragma once

#include <string>
#include <string_view>

#include "accelerate/checkpoint/offload_index.h"

namespace accelerate::detail::formats {

/// What is wrong with the name of a tensor that is to have a file of its own in a folder; "" if
/// nothing is.
[[nodiscard]] std::string_view problem_with_weight_name(std::string_view name);

/// Throws `FormatError` with `source` and the problem: not JSON, a key twice, an entry that is no
/// object or lacks a field, a shape that is no list of sizes or has more than 2^60 elements, a name
/// that leads out of the folder.
[[nodiscard]] OffloadIndex parse_offload_index(std::string_view text, std::string_view source);

/// The bytes that Python writes for it.
[[nodiscard]] std::string write_offload_index(const OffloadIndex& index);

}  // namespace accelerate::detail::formats
