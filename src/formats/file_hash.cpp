#include "formats/file_hash.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <span>
#include <vector>

#include "core/python_text.h"
#include "core/run_in_parallel.h"
#include "core/xxh3.h"

namespace accelerate::detail::formats {

namespace {

constexpr std::int64_t kChunk = 1 << 20;  // stays in the cache of a core

/// Hashes chunks in order that several threads read ahead: reading takes several times as long.
class OrderedHash {
 public:
  OrderedHash(std::size_t threads, const HashProgress& progress)
      : slots_(2 * threads - 1), progress_(progress) {}

  /// Calls `read` for chunk `i` once there is room for it, then hashes all chunks that are next.
  void add(std::size_t i, std::size_t length,
           const std::function<void(std::span<std::byte>)>& read) {
    std::unique_lock lock(mutex_);
    room_.wait(lock, [&] { return failed_ || i < hashed_ + slots_.size(); });
    if (failed_) return;
    auto& slot = slots_[i % slots_.size()];
    lock.unlock();
    try {
      slot.bytes.resize(length);
      read(slot.bytes);
    } catch (...) {
      fail(lock);
      throw;
    }
    lock.lock();
    slot.ready = true;
    if (hashing_ || i != hashed_) return;  // another thread takes it
    hashing_ = true;
    for (auto* next = &slot; next->ready; next = &slots_[hashed_ % slots_.size()]) {
      lock.unlock();
      try {
        hash_.update(next->bytes);
        total_ += static_cast<std::int64_t>(next->bytes.size());
        if (progress_) progress_(total_);
      } catch (...) {
        fail(lock);
        throw;
      }
      lock.lock();
      next->ready = false;
      ++hashed_;
      room_.notify_all();
    }
    hashing_ = false;
  }

  [[nodiscard]] std::uint64_t digest() const { return hash_.digest(); }

 private:
  void fail(std::unique_lock<std::mutex>& lock) {
    lock.lock();
    failed_ = true;
    room_.notify_all();
  }

  struct Slot {
    std::vector<std::byte> bytes = {};
    bool ready = false;
  };

  std::mutex mutex_;
  std::condition_variable room_;
  std::vector<Slot> slots_;
  const HashProgress& progress_;
  Xxh3 hash_;               // of the thread that is hashing, as is `total_`
  std::int64_t total_ = 0;  // bytes
  std::size_t hashed_ = 0;  // chunks
  bool hashing_ = false;
  bool failed_ = false;
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
