// src/core/files.h - read and write small files whole.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>

#include "accelerate/environment.h"

namespace accelerate::detail::inline core {

/// All bytes of a file. Throws `ConfigError` with the path and the reason when it cannot be read or
/// is larger than `max_bytes`.
[[nodiscard]] std::string read_whole_file(const std::filesystem::path& path,
                                          std::size_t max_bytes = std::size_t{64} << 20);

/// Replaces a file by one with this content, or creates it, through an `OutputFile`. Throws
/// `ConfigError` with the path and the reason.
void write_file_atomically(const std::filesystem::path& path, std::string_view content);

/// "~" and "~/x" with the home of this user: HOME of `environment`, else the password file's.
[[nodiscard]] std::filesystem::path expand_user(const std::string& path,
                                                const Environment& environment);

}  // namespace accelerate::detail::inline core
