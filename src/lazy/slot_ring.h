// src/lazy/slot_ring.h - memory of a device that groups of parameters take turns in.
//
// Copies run on a stream of their own. The stream of copies waits for the work that used a slot
// before, and a stream that computes for the copies into it. The host waits for neither. On the CPU
// there are no streams, and all is done when the call returns.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace accelerate::detail::lazy {

struct Slot {
  at::Tensor memory;  ///< bytes
  bool is_taken = false;
  bool is_temporary = false;
  /// Behind the copies into it. Unset on the CPU.
  std::optional<c10::Event> filled = std::nullopt;
  /// Streams that wait for `filled` and use the slot since.
  std::vector<c10::Stream> users = {};
  /// Behind their work, after `leave`: the first `num_left` are valid.
  std::vector<c10::Event> left = {};
  std::size_t num_left = 0;
};

class SlotRing {
 public:
  explicit SlotRing(c10::Device device);
  /// Waits for all copies: they use the memory of stores.
  ~SlotRing();
  SlotRing(const SlotRing&) = delete;
  SlotRing& operator=(const SlotRing&) = delete;
  [[nodiscard]] c10::Device device() const noexcept { return device_; }

  /// At most `count` slots of `bytes` bytes. Memory is allocated when a slot is taken first.
  void resize(std::size_t bytes, std::size_t count);
  /// A free slot; null if there is none.
  [[nodiscard]] Slot* take();
  /// One more than the ring has, of any size; gone when it is given back.
  [[nodiscard]] Slot* take_temporary(std::size_t bytes);
  void give_back(Slot* slot);
  /// Frees the memory of slots that are not taken.
  void free_memory();

  /// Calls `f`, which queues copies into or out of the slot, on the stream of copies. The copies
  /// wait for the work of streams that have left the slot.
  void copy(Slot& slot, const std::function<void()>& f);
  /// Work that this thread queues from now on waits for the copies into the slot.
  void use(Slot& slot) const;
  /// No stream uses the slot from here on; what is queued still does.
  static void leave(Slot& slot);
  /// Copies from now on wait for the work that this thread has queued: it wrote what they read.
  void wait_for_caller() const;
  /// The host waits for all copies.
  void synchronize() const;

  [[nodiscard]] std::size_t allocated_bytes() const;

 private:
  [[nodiscard]] c10::Stream current_stream() const;
  void allocate(Slot& slot, std::size_t bytes) const;

  c10::Device device_;
  std::optional<c10::Stream> copies_;  // unset on the CPU
  std::size_t slot_bytes_ = 0;
  std::size_t count_ = 0;
  std::vector<std::unique_ptr<Slot>> slots_;
};

}  // namespace accelerate::detail::lazy
