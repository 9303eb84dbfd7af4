#include "formats/file_hash.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <span>
#include <vector>

#include "core/python_text.h"
#include "core/run_in_parallel.h"
#include "core/xxh3.h"

namespace accelerate::detail::formats {

namespace {

constexpr std::int64_t kChunk = 1 << 18;  // stays in the cache of a core

/// Hashes chunks in order. Each thread reads one and waits for its turn: reading takes several
/// times as long as hashing what is in the cache of the core.
class OrderedHash {
 public:
  OrderedHash(std::size_t threads, const HashProgress& progress)
      : buffers_(threads), progress_(progress) {}

  /// To be called for all chunks, in ascending order, by as many threads as were announced.
  void add(std::size_t i, std::size_t length,
           const std::function<void(std::span<std::byte>)>& read) {
    try {
      // Chunks under way follow each other: there are never more of them than threads.
      auto& buffer = buffers_[i % buffers_.size()];
      buffer.resize(length);
      read(buffer);
      for (auto turn = turn_.load(); turn != i; turn = turn_.load()) {
        if (turn == kFailed) return;
        turn_.wait(turn);
      }
      hash_.update(buffer);
      total_ += static_cast<std::int64_t>(length);
      if (progress_) progress_(total_);
    } catch (...) {
      give_turn(kFailed);
      throw;
    }
    give_turn(i + 1);
  }

  [[nodiscard]] std::uint64_t digest() const { return hash_.digest(); }

 private:
  static constexpr std::size_t kFailed = std::numeric_limits<std::size_t>::max();

  void give_turn(std::size_t i) {
    // A failure elsewhere is not forgotten.
    for (auto turn = turn_.load(); turn != kFailed;) {
      if (turn_.compare_exchange_weak(turn, i)) break;
    }
    turn_.notify_all();
  }

  std::vector<std::vector<std::byte>> buffers_;
  const HashProgress& progress_;
  /// The chunk whose thread may use what follows.
  std::atomic<std::size_t> turn_ = 0;
  Xxh3 hash_;
  std::int64_t total_ = 0;  // bytes
};

}  // namespace

std::uint64_t xxh3_of(const MappedFile& file, std::int64_t offset, std::int64_t size,
                      const HashProgress& progress) {
  constexpr std::size_t kChunksPerThread = 8;
  const auto count = static_cast<std::size_t>((size + kChunk - 1) / kChunk);
  const auto threads = std::clamp<std::size_t>(count / kChunksPerThread, 1,
                                               std::max<std::size_t>(1, transfer_threads()));
  OrderedHash hash(threads, progress);
  run_in_parallel(count, threads, [&](std::size_t i) {
    const auto at = static_cast<std::int64_t>(i) * kChunk;
    hash.add(i, static_cast<std::size_t>(std::min(kChunk, size - at)),
             [&](std::span<std::byte> out) { file.read(offset + at, out); });
  });
  return hash.digest();
}

std::string xxh3_text(std::uint64_t sum) {
  std::string text;
  append_hex(text, static_cast<std::uint32_t>(sum >> 32), 8);
  append_hex(text, static_cast<std::uint32_t>(sum), 8);
  return text;
}

}  // namespace accelerate::detail::formats
