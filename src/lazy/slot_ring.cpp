#include "lazy/slot_ring.h"

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace accelerate::detail::lazy {

SlotRing::SlotRing(c10::Device device) : device_(device) {
  // On the meta device there is nothing to copy.
  if (device.is_cuda()) {
    copies_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, true);
  }
}

SlotRing::~SlotRing() {
  try {
    synchronize();
  } catch (const c10::Error&) {  // NOLINT(bugprone-empty-catch): no copy runs on a lost device
  }
}

c10::Stream SlotRing::current_stream() const {
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

void SlotRing::resize(std::size_t bytes, std::size_t count) {
  count_ = count;
  if (bytes <= slot_bytes_) return;
  slot_bytes_ = bytes;
  free_memory();  // slots that are taken now are smaller: `take` passes them over
}

void SlotRing::allocate(Slot& slot, std::size_t bytes) const {
  slot.memory =
      at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions(at::kByte).device(device_));
  if (!copies_) return;
  // The allocator may give memory that queued work of this stream still uses.
  slot.users.push_back(current_stream());
  leave(slot);
  slot.memory.record_stream(*copies_);
}

Slot* SlotRing::take() {
  const auto free = std::ranges::find_if(slots_, [&](const auto& slot) {
    return !slot->is_taken && slot->memory.nbytes() >= slot_bytes_;
  });
  if (free != slots_.end()) {
    (*free)->is_taken = true;
    return free->get();
  }
  const auto fixed =
      std::ranges::count_if(slots_, [](const auto& slot) { return !slot->is_temporary; });
  if (static_cast<std::size_t>(fixed) >= count_) return nullptr;
  auto slot = std::make_unique<Slot>();
  allocate(*slot, slot_bytes_);
  slot->is_taken = true;
  return slots_.emplace_back(std::move(slot)).get();
}

Slot* SlotRing::take_temporary(std::size_t bytes) {
  auto slot = std::make_unique<Slot>();
  allocate(*slot, bytes);
  slot->is_taken = slot->is_temporary = true;
  return slots_.emplace_back(std::move(slot)).get();
}

void SlotRing::give_back(Slot* slot) {
  slot->is_taken = false;
  if (slot->is_temporary || slot->memory.nbytes() < slot_bytes_) {
    std::erase_if(slots_, [&](const auto& other) { return other.get() == slot; });
  }
}

void SlotRing::free_memory() {
  std::erase_if(slots_, [](const auto& slot) { return !slot->is_taken; });
}

void SlotRing::copy(Slot& slot, const std::function<void()>& f) {
  if (!copies_) {
    f();
    return;
  }
  const c10::StreamGuard on_stream(*copies_);
  for (std::size_t i = 0; i < slot.num_left; ++i) slot.left[i].block(*copies_);
  slot.num_left = 0;
  f();
  if (!slot.filled) slot.filled.emplace(device_.type());
  slot.filled->record(*copies_);
}

void SlotRing::use(Slot& slot) const {
  if (!copies_) return;
  const auto stream = current_stream();
  if (std::ranges::find(slot.users, stream) != slot.users.end()) return;
  slot.filled->block(stream);
  slot.memory.record_stream(stream);
  slot.users.push_back(stream);
}

void SlotRing::leave(Slot& slot) {
  slot.num_left = slot.users.size();
  for (std::size_t i = 0; i < slot.users.size(); ++i) {
    if (slot.left.size() <= i) slot.left.emplace_back(slot.users[i].device_type());
    slot.left[i].record(slot.users[i]);
  }
  slot.users.clear();
}

void SlotRing::wait_for_caller() const {
  if (!copies_) return;
  c10::Event written(device_.type());
  written.record(current_stream());
  written.block(*copies_);
}

void SlotRing::synchronize() const {
  if (copies_) copies_->synchronize();
}

std::size_t SlotRing::allocated_bytes() const {
  std::size_t bytes = 0;
  for (const auto& slot : slots_) bytes += slot->memory.nbytes();
  return bytes;
}

}  // namespace accelerate::detail::lazy
