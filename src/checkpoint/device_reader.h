// src/checkpoint/device_reader.h - files read onto a device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace accelerate::detail::checkpoint {

/// A range of a file and the tensor that takes it: contiguous, on a device, of any dtype.
struct DevicePiece {
  std::int64_t offset = 0;
  at::Tensor tensor;
};

using ReadBytes = std::function<void(std::int64_t offset, std::span<std::byte> out)>;

/// Fills all tensors, which are on one device. A few threads call `read` with buffers of pinned
/// memory, which are copied to the device while the next ones are read. Returns when the bytes are
/// on their way: work that is queued on the current stream later sees them.
void read_to_device(std::vector<DevicePiece> pieces, const ReadBytes& read);

}  // namespace accelerate::detail::checkpoint
