// src/formats/format_error.h - errors of files that break the rules of their format.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>

#include "accelerate/errors.h"
#include "accelerate/value.h"

namespace accelerate::detail::formats {

/// "'model.safetensors', byte 8: the header is not JSON." with the path `source`. The offset counts
/// from the start of the file. `reason` has no full stop, remedies may follow it as sentences.
[[nodiscard]] FormatError format_error(std::string_view source, std::uint64_t offset,
                                       std::string_view reason);

/// The JSON in `text`, in which no object has a key twice. Throws `FormatError` with `source`.
[[nodiscard]] Value json_content(std::string_view text, const std::filesystem::path& source);

/// What is wrong with the name of a file that a file in the same folder gives; "" if it is inside
/// that folder. Refused are absolute names, empty parts, "." and "..", backslashes, control
/// characters and names of more than 4096 bytes.
[[nodiscard]] std::string_view problem_with_inner_path(std::string_view name);

}  // namespace accelerate::detail::formats
