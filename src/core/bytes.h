// src/core/bytes.h - sizes of memory and files as people write them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace accelerate::detail::inline core {

/// "300 bytes", "2.0 KB", "1.46 MB", up to PB; steps of 1024. The unit is chosen before rounding,
/// so that one byte less than a GiB is "1024.0 MB", as in Python.
[[nodiscard]] std::string convert_bytes(std::int64_t size);
/// `convert_bytes` of a double: whole bytes show a decimal, "700.0 bytes".
[[nodiscard]] std::string convert_bytes(double size);

/// "1MiB" is 1048576, "5GB" 5 * 10^9. Units KiB MiB GiB (1024) and KB MB GB (1000), in any case; a
/// lower-case b behind a decimal unit means bits: "8Gb" is 10^9. Throws `ArgumentError` with the
/// text for anything else, for negative sizes and for what does not fit into 64 bits.
[[nodiscard]] std::int64_t convert_file_size_to_int(std::string_view size);
/// A number of bytes as it is. Throws `ArgumentError` for a negative one.
[[nodiscard]] std::int64_t convert_file_size_to_int(std::int64_t size);

/// The sizes of shards, by huggingface_hub's rules: units TB GB MB KB (1000) in any case, blanks
/// around number and unit. "0.5 gb" is 500000000. Throws `ArgumentError` with the text for anything
/// else, and for a size that is not at least one byte or does not fit into 64 bits.
[[nodiscard]] std::int64_t parse_size_to_int(std::string_view size);

}  // namespace accelerate::detail::inline core
