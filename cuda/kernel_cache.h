// cuda/kernel_cache.h - compiled kernels on disk.
//
// In accelerate/kernels of $XDG_CACHE_HOME or ~/.cache, a file per source and device type. A file
// that is torn, of something else or cannot be read counts as missing.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace accelerate::detail::cuda {

/// `key` is all that the binary depends on.
[[nodiscard]] std::optional<std::string> find_cached_kernel(std::string_view key);
/// Keeps a binary, if the folder can be written.
void cache_kernel(std::string_view key, std::string_view binary) noexcept;

}  // namespace accelerate::detail::cuda
