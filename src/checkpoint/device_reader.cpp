#include "checkpoint/device_reader.h"

#include <ATen/Functions.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace accelerate::detail::checkpoint {
namespace {

constexpr std::int64_t kBufferBytes = 8 << 20;
// A thread copies out of the page cache at a fraction of the bus's rate.
constexpr std::size_t kReaders = 8;
// A reader fills one buffer while another one of its own is sent.
constexpr std::size_t kBuffers = 2 * kReaders;

// A contiguous range of the file that fits into a buffer, and the pieces in it.
struct Chunk {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::size_t first_piece = 0;
};

std::int64_t end_of(const DevicePiece& piece) {
  return piece.offset + static_cast<std::int64_t>(piece.tensor.nbytes());
}

// Neighbours share a chunk, so that small tensors cost one read together.
std::vector<Chunk> cut(std::span<const DevicePiece> pieces) {
  std::vector<Chunk> chunks;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    auto begin = pieces[i].offset;
    const auto end = end_of(pieces[i]);
    while (begin < end) {
      const bool fits = !chunks.empty() && chunks.back().end == begin &&
                        begin - chunks.back().begin < kBufferBytes;
      if (!fits) chunks.push_back({begin, begin, i});
      auto& chunk = chunks.back();
      chunk.end = std::min(end, chunk.begin + kBufferBytes);
      begin = chunk.end;
    }
  }
  return chunks;
}

at::Tensor as_bytes(const at::Tensor& tensor) {
  const auto size = static_cast<std::int64_t>(tensor.nbytes());
  const auto offset = tensor.storage_offset() * static_cast<std::int64_t>(tensor.itemsize());
  return at::empty({0}, tensor.options().dtype(at::kByte).requires_grad(false))
      .set_(tensor.storage(), offset, {size}, {1});
}

// Readers fill buffer after buffer, in the order of the chunks; the calling thread sends them.
class Pipeline {
 public:
  Pipeline(std::span<const DevicePiece> pieces, const ReadBytes& read)
      : pieces_(pieces), read_(read), chunks_(cut(pieces)) {
    for (std::size_t i = 0; i < std::min(kBuffers, chunks_.size()); ++i) {
      buffers_.at(i).bytes =
          at::empty({kBufferBytes}, at::TensorOptions(at::kByte).pinned_memory(true));
      buffers_.at(i).sent.emplace(pieces_.front().tensor.device().type());
    }
  }

  void run() {
    {
      std::vector<std::jthread> readers;
      const auto count = std::min<std::size_t>(kReaders, std::thread::hardware_concurrency());
      try {
        for (std::size_t i = 0; i < std::min(std::max<std::size_t>(count, 1), chunks_.size());
             ++i) {
          readers.emplace_back([this] { fill_buffers(); });
        }
        for (std::size_t i = 0; i < chunks_.size() && wait_until_full(i); ++i) send(i);
      } catch (...) {
        fail();
      }
    }
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  struct Buffer {
    at::Tensor bytes;
    std::optional<c10::Event> sent;  // behind the copies out of it
  };

  Buffer& buffer_of(std::size_t chunk) { return buffers_.at(chunk % kBuffers); }

  // The calling reader's next chunk, as soon as its buffer was sent; nullopt at the end.
  std::optional<std::size_t> next_chunk() {
    std::unique_lock lock(mutex_);
    if (next_ == chunks_.size()) return std::nullopt;
    const auto chunk = next_++;
    changed_.wait(lock, [&] { return failure_ || chunk < sent_ + kBuffers; });
    if (failure_) return std::nullopt;
    return chunk;
  }

  void fill_buffers() {
    try {
      while (const auto chunk = next_chunk()) {
        auto& buffer = buffer_of(*chunk);
        buffer.sent->synchronize();
        const auto& range = chunks_[*chunk];
        read_(range.begin, {static_cast<std::byte*>(buffer.bytes.data_ptr()),
                            static_cast<std::size_t>(range.end - range.begin)});
        const std::lock_guard lock(mutex_);
        full_.at(*chunk % kBuffers) = true;
        changed_.notify_all();
      }
    } catch (...) {
      fail();
    }
  }

  bool wait_until_full(std::size_t chunk) {
    std::unique_lock lock(mutex_);
    auto& full = full_.at(chunk % kBuffers);
    changed_.wait(lock, [&] { return failure_ || full; });
    return !failure_ && std::exchange(full, false);
  }

  void send(std::size_t chunk) {
    const auto& range = chunks_[chunk];
    auto& buffer = buffer_of(chunk);
    for (auto i = range.first_piece; i < pieces_.size() && pieces_[i].offset < range.end; ++i) {
      const auto begin = std::max(range.begin, pieces_[i].offset);
      const auto size = std::min(range.end, end_of(pieces_[i])) - begin;
      if (size <= 0) continue;
      as_bytes(pieces_[i].tensor)
          .narrow(0, begin - pieces_[i].offset, size)
          .copy_(buffer.bytes.narrow(0, begin - range.begin, size), /*non_blocking=*/true);
    }
    const auto device = pieces_.front().tensor.device();
    buffer.sent->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    const std::lock_guard lock(mutex_);
    sent_ = chunk + 1;
    changed_.notify_all();
  }

  void fail() {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::current_exception();
    changed_.notify_all();
  }

  std::span<const DevicePiece> pieces_;
  const ReadBytes& read_;
  std::vector<Chunk> chunks_;
  std::array<Buffer, kBuffers> buffers_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<bool, kBuffers> full_{};
  std::size_t next_ = 0;
  std::size_t sent_ = 0;  // chunks, in order
  std::exception_ptr failure_;
};

}  // namespace

void read_to_device(std::vector<DevicePiece> pieces, const ReadBytes& read) {
  std::erase_if(pieces, [](const DevicePiece& piece) { return piece.tensor.nbytes() == 0; });
  if (pieces.empty()) return;
  std::ranges::sort(pieces, {}, &DevicePiece::offset);
  Pipeline(pieces, read).run();
}

}  // namespace accelerate::detail::checkpoint
