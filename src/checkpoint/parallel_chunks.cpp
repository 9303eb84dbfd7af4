#include "checkpoint/parallel_chunks.h"

#include <vector>

#include "core/run_in_parallel.h"

namespace accelerate::detail::checkpoint {

void transfer_in_parallel(std::span<const FilePiece> pieces,
                          const std::function<void(const FilePiece&)>& transfer) {
  std::vector<std::size_t> sizes;
  for (const auto& piece : pieces) sizes.push_back(piece.memory.size());
  run_in_chunks(sizes, [&](std::size_t i, std::size_t begin, std::size_t length) {
    transfer({.offset = pieces[i].offset + static_cast<std::int64_t>(begin),
              .memory = pieces[i].memory.subspan(begin, length)});
  });
}

}  // namespace accelerate::detail::checkpoint
