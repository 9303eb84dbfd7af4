// src/checkpoint/parallel_chunks.h - large transfers between files and memory, by a few threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

namespace accelerate::detail::checkpoint {

/// A range of a file and the memory that belongs to it.
struct FilePiece {
  std::int64_t offset = 0;
  std::span<std::byte> memory;
};

/// Calls `transfer` for all pieces, large ones cut into chunks, on several threads if there is
/// enough to do. After the first exception no further chunk begins, and it is thrown here.
void transfer_in_parallel(std::span<const FilePiece> pieces,
                          const std::function<void(const FilePiece&)>& transfer);

}  // namespace accelerate::detail::checkpoint
