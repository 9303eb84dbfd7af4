#include "checkpoint/parallel_chunks.h"

#include <algorithm>
#include <thread>
#include <vector>

#include "core/run_in_parallel.h"

namespace accelerate::detail::checkpoint {
namespace {

constexpr std::size_t kChunkBytes = 8 << 20;
// Page cache and NVMe disks are saturated by a few threads.
constexpr std::size_t kMostThreads = 8;

std::vector<FilePiece> cut(std::span<const FilePiece> pieces) {
  std::vector<FilePiece> chunks;
  for (auto piece : pieces) {
    while (!piece.memory.empty()) {
      const auto size = std::min(piece.memory.size(), kChunkBytes);
      chunks.push_back({piece.offset, piece.memory.first(size)});
      piece.offset += static_cast<std::int64_t>(size);
      piece.memory = piece.memory.subspan(size);
    }
  }
  return chunks;
}

}  // namespace

void transfer_in_parallel(std::span<const FilePiece> pieces,
                          const std::function<void(const FilePiece&)>& transfer) {
  const auto chunks = cut(pieces);
  std::size_t bytes = 0;
  for (const auto& chunk : chunks) bytes += chunk.memory.size();
  const auto threads = std::min<std::size_t>(
      {kMostThreads, std::thread::hardware_concurrency(), bytes / kChunkBytes});
  run_in_parallel(chunks.size(), threads, [&](std::size_t i) { transfer(chunks[i]); });
}

}  // namespace accelerate::detail::checkpoint
