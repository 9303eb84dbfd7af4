#include "core/run_in_parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace accelerate::detail::inline core {
namespace {

constexpr std::size_t kChunkBytes = 8 << 20;

}  // namespace

void run_in_parallel(std::size_t count, std::size_t threads,
                     const std::function<void(std::size_t)>& work) {
  std::atomic<std::size_t> next = 0;
  std::exception_ptr failure;
  std::mutex failure_mutex;
  const auto take_turns = [&] {
    try {
      for (auto i = next++; i < count; i = next++) work(i);
    } catch (...) {
      next = count;
      const std::lock_guard lock(failure_mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> others;
    for (std::size_t i = 1; i < std::min(threads, count); ++i) others.emplace_back(take_turns);
    take_turns();
  }
  if (failure) std::rethrow_exception(failure);
}

void run_in_chunks(std::span<const std::size_t> sizes, const ChunkWork& work) {
  struct Chunk {
    std::size_t item;
    std::size_t begin;
    std::size_t length;
  };
  std::vector<Chunk> chunks;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    bytes += sizes[i];
    for (std::size_t begin = 0; begin < sizes[i]; begin += kChunkBytes) {
      chunks.push_back({i, begin, std::min(kChunkBytes, sizes[i] - begin)});
    }
  }
  run_in_parallel(chunks.size(), std::min(transfer_threads(), bytes / kChunkBytes),
                  [&](std::size_t i) {
                    const auto& [item, begin, length] = chunks[i];
                    work(item, begin, length);
                  });
}

std::size_t transfer_threads() {
  // Page cache and NVMe disks are saturated by a few threads.
  constexpr std::size_t kMostThreads = 8;
  return std::min<std::size_t>(kMostThreads, std::thread::hardware_concurrency());
}

}  // namespace accelerate::detail::inline core
