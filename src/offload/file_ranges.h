// src/offload/file_ranges.h - where the bytes of the weights in an offload index are.
#pragma once

#include <filesystem>

#include "accelerate/checkpoint/offload_index.h"
#include "offload/store.h"

namespace accelerate::detail::offload {

/// `folder` has the .dat files. Reads the headers of safetensors files that the index names. Throws
/// `CheckpointError` and `FormatError` for files that are not what the index says.
[[nodiscard]] FileRanges file_ranges(const OffloadIndex& index,
                                     const std::filesystem::path& folder);

}  // namespace accelerate::detail::offload
