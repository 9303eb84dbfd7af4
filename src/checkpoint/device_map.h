// src/checkpoint/device_map.h - where the tensors of a model go.
#pragma once

#include <string>
#include <string_view>

#include "accelerate/checkpoint.h"

namespace accelerate::detail::checkpoint {

/// The entry of the map for a tensor or module: that of the longest name above it, or null.
[[nodiscard]] const std::string* find_in_device_map(const DeviceMap& map, std::string_view name);

/// "cpu", "cuda:1"; a number is a CUDA device. Throws `ArgumentError` with the text.
[[nodiscard]] c10::Device device_from_text(const std::string& text);

}  // namespace accelerate::detail::checkpoint
