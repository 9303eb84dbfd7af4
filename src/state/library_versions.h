// src/state/library_versions.h - the versions of the libraries that this process runs with.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "accelerate/api.h"

namespace accelerate::detail::state {

/// The version of "torch", "accelerate", "cuda", "cudnn" or "nccl"; nullopt if it is not loaded.
/// Throws `UnsupportedError` for another name.
[[nodiscard]] ACCELERATE_API std::optional<std::string> library_version(std::string_view library);

/// The folder that LibTorch was loaded from.
[[nodiscard]] ACCELERATE_API std::string libtorch_folder();

}  // namespace accelerate::detail::state
