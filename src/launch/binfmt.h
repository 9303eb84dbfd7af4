// src/launch/binfmt.h - formats that the kernel runs through a helper: programs of another
// architecture by an emulator, .jar files by Java, ...
#pragma once

#include <filesystem>
#include <string_view>

namespace accelerate::detail {

/// How much of a file the kernel compares with its rules.
inline constexpr std::size_t kBinfmtHead = 256;

/// Whether a rule, as a file of /proc/sys/fs/binfmt_misc shows it, is enabled and fits a file with
/// this name and these first bytes.
[[nodiscard]] bool fits_binfmt_rule(std::string_view rule, std::string_view file_name,
                                    std::string_view head);

/// Whether any rule of this machine fits.
[[nodiscard]] bool runs_by_binfmt(const std::filesystem::path& file, std::string_view head);

}  // namespace accelerate::detail
