// When groups come and when they go.
#include "offload/lazy_engine.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "core/log.h"
#include "core/text.h"
#include "lazy/released_storage.h"
#include "state/accelerator_backend.h"

namespace accelerate::detail::offload {

namespace {

std::int64_t bytes_of(const std::optional<MemorySize>& size) {
  return size ? std::int64_t{*size} : std::numeric_limits<std::int64_t>::max();
}

std::uint64_t pair_of(std::size_t before, std::size_t current) {
  return static_cast<std::uint64_t>(before) << 32U | (current & 0xFFFFFFFFU);
}

std::exception_ptr cannot_bring(const Group& group, const std::exception& error) {
  return std::make_exception_ptr(
      StateError(str("The parameter '", group.entries.front()->name(),
                     "' could not be brought to its device: ", error.what())));
}

bool is_capturing() {
  const auto* backend = state::accelerator_backend();
  return backend != nullptr && backend->is_capturing();
}

}  // namespace

LazyEngine::LazyEngine(const LazyOptions& wanted)
    : options(wanted),
      timeout_seconds(get_int_from_env({"ACCELERATE_OFFLOAD_TIMEOUT"}, 600)),
      budget{bytes_of(wanted.pinned_bytes)} {}

void LazyEngine::resize_ring() {
  if (largest_bytes == 0) return;
  const auto wanted = options.keep + options.prefetch_depth;
  const auto fit = bytes_of(options.max_resident_bytes) / static_cast<std::int64_t>(largest_bytes);
  ring->resize(largest_bytes, static_cast<std::size_t>(std::clamp<std::int64_t>(fit, 1, wanted)));
}

std::string Entry::absent() const {
  return str("The parameter '", name(),
             "' is offloaded, and its bytes are not in memory now. Operators bring them; for a raw "
             "pointer use align_module_device, to save the model its state_dict().");
}
void Entry::pin(Access access) { engine->pin(*this, access); }
void Entry::unpin() noexcept { engine->unpin(*this); }

void LazyEngine::pin(Entry& entry, Access access) {
  Lock lock(mutex);
  if (entry.group == nullptr) {
    throw StateError(
        str("The weights of this model were given back while an operator waited for "
            "them: '",
            entry.name(),
            "'. Call remove_hooks(), and end the last handle, when no other thread "
            "runs the model."));
  }
  auto& group = *entry.group;
  const bool writes = access == Access::kWrite;
  if (writes && !group.store->is_writable()) {
    throw StateError(str("The parameter '", entry.name(),
                         "' is on disk and cannot be changed. Set LazyOptions::writable to have "
                         "changes written to its file."));
  }
  ++group.pins;
  try {
    if (group.state == State::kResident) {
      ++stats.hits;
      if (group.slot != nullptr && !group.is_captured && is_capturing()) {
        group.is_captured = true;  // the graph keeps its address
        ++group.pins;
      }
    } else {
      bring(group, lock);
    }
    if (group.slot != nullptr) ring->use(*group.slot);
    if (writes) entry.dirty = group.dirty = true;
    if (group.index != current) arrive(group);
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    unpin(group, lock);
    throw;
  }
}

void LazyEngine::unpin(Entry& entry) noexcept {
  Lock lock(mutex);
  unpin(*entry.group, lock);
}

void LazyEngine::unpin(Group& group, Lock& lock) noexcept {
  --group.pins;
  if (!group.is_used() && is_abandoned) let_go(group, lock);
}

// -- bringing a group -----------------------------------------------------------------------------

void LazyEngine::bring(Group& group, Lock& lock) {
  if (is_capturing()) {
    throw StateError(str("The parameter '", group.entries.front()->name(),
                         "' is not on its device while a CUDA graph is being captured, which would "
                         "keep the address of memory that other weights use later. Capture with "
                         "weights that stay on the device."));
  }
  if (before_fill && group.state == State::kReleased) {
    lock.unlock();
    before_fill();  // `pin` takes the lock again if it throws
    lock.lock();
  }
  if (group.state == State::kReleased) {
    start_fill(group, group.store->is_mapped() ? nullptr : slot_for(group));
  } else if (group.came_ahead) {
    ++stats.prefetch_hits;
  }
  group.came_ahead = false;
  if (group.state == State::kFilling) wait_until_filled(group, lock);
  if (group.state == State::kFailed) std::rethrow_exception(group.failure);
  if (group.state == State::kFilled) bind(group);
}

/// A group that is released. Fills it, or lets the worker fill it. Does not throw what a store
/// does.
void LazyEngine::start_fill(Group& group, Slot* slot) {
  group.slot = slot;
  group.state = State::kFilling;
  group.arrival = arrivals;
  here.push_back(&group);
  ++stats.fills;
  stats.bytes_read += static_cast<std::int64_t>(group.plan.bytes);
  note_resident();
  if (group.store->is_mapped()) {
    group.state = State::kFilled;
  } else if (group.store->is_slow()) {
    try {
      if (stopping) throw StateError("The handle of its model has ended.");
      if (!worker.joinable()) {
        worker = std::thread([self = shared_from_this()] { self->serve(); });
      }
      queue.push_back(&group);
      changed.notify_all();
    } catch (const std::exception& error) {
      finish_fill(group, cannot_bring(group, error));
    }
  } else {
    finish_fill(group, fill_slot(group));
  }
}

/// Returns what it failed with. Called without the mutex for slow stores: no other thread touches
/// the slot of a group that is Filling.
std::exception_ptr LazyEngine::fill_slot(const Group& group) {
  const at::AutoDispatchBelowADInplaceOrView below;
  try {
    auto& slot = *group.slot;
    ring->copy(slot, [&] {
      group.store->fill(slot.memory.narrow(0, 0, static_cast<std::int64_t>(group.plan.bytes)));
    });
    return nullptr;
  } catch (const CheckpointError&) {
    return std::current_exception();  // names parameter, file and offset
  } catch (const std::exception& error) {
    return cannot_bring(group, error);
  }
}

void LazyEngine::finish_fill(Group& group, std::exception_ptr failure) {
  group.failure = std::move(failure);
  group.state = group.failure ? State::kFailed : State::kFilled;
  if (group.failure) {
    std::erase(here, &group);
    ring->give_back(std::exchange(group.slot, nullptr));
  }
  changed.notify_all();
}

void LazyEngine::wait_until_filled(Group& group, Lock& lock) {
  const auto there = [&] {
    return group.state != State::kFilling || (stopping && being_filled != &group);
  };
  if (timeout_seconds == 0) {
    changed.wait(lock, there);
  } else if (!changed.wait_for(lock, std::chrono::seconds(timeout_seconds), there)) {
    is_late = true;
    throw StateError(str("The parameter '", group.entries.front()->name(),
                         "' was not brought to its device within ", timeout_seconds,
                         " s. The disk is too slow or hangs; ACCELERATE_OFFLOAD_TIMEOUT sets the "
                         "limit in seconds, 0 for none."));
  }
  if (group.state == State::kFilling) {  // no thread fills it any more
    std::erase(queue, &group);
    finish_fill(group, cannot_bring(group, StateError("The handle of its model has ended.")));
  }
}

at::Tensor LazyEngine::memory_of(const Entry& entry) const {
  const auto bytes = static_cast<std::int64_t>(entry.storage->nbytes());
  if (entry.group->slot == nullptr) {
    return at::from_blob(entry.storage->mutable_data(), {bytes}, at::kByte);
  }
  const auto offset = entry.group->plan.storages[entry.index].offset;
  return entry.group->slot->memory.narrow(0, static_cast<std::int64_t>(offset), bytes);
}

void LazyEngine::bind(Group& group) {
  try {
    for (const auto& entry : group.entries) {
      lazy::allow(*entry->storage, group.slot == nullptr
                                       ? group.store->map(entry->index)
                                       : c10::DataPtr(memory_of(*entry).mutable_data_ptr(),
                                                      entry->storage->device()));
    }
  } catch (...) {
    group.failure = std::current_exception();
    drop(group);
    group.state = State::kFailed;
    throw;
  }
  group.state = State::kResident;
}

// -- releasing it ---------------------------------------------------------------------------------

void LazyEngine::write_back(Group& group) {
  if (!group.dirty) return;
  const bool in_use = group.pins > 0;  // an operator of another thread may be about to change it
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto write = [&] {
    for (const auto& entry : group.entries) {
      if (!entry->dirty) continue;
      group.store->write_back(entry->index, memory_of(*entry));
      entry->dirty = in_use;
    }
  };
  if (group.slot != nullptr) {
    const auto users = in_use ? group.slot->users : std::vector<c10::Stream>();
    SlotRing::leave(*group.slot);
    ring->copy(*group.slot, write);
    group.slot->users = users;
  } else {
    write();
  }
  group.dirty = in_use;
  ++stats.writebacks;
}

/// The storages throw from now on. What was changed must have been written back.
void LazyEngine::drop(Group& group) noexcept {
  for (const auto& entry : group.entries) lazy::forbid(*entry->storage, entry->absent());
  if (group.slot != nullptr) {
    if (!group.slot->users.empty()) SlotRing::leave(*group.slot);
    ring->give_back(std::exchange(group.slot, nullptr));
  }
  group.state = State::kReleased;
  std::erase(here, &group);
  note_resident();
}

void LazyEngine::release(Group& group) {
  write_back(group);  // if it throws, the group stays, with its changes
  drop(group);
}

void LazyEngine::note_resident() {
  std::size_t mapped = 0;
  for (const auto* group : here) {
    if (group->slot == nullptr) mapped += group->plan.bytes;
  }
  stats.resident_bytes =
      static_cast<std::int64_t>(mapped + (ring ? ring->allocated_bytes() : std::size_t{0}));
  stats.peak_resident_bytes = std::max(stats.peak_resident_bytes, stats.resident_bytes);
}

// -- which group comes next -----------------------------------------------------------------------

std::size_t LazyEngine::successor_of(std::size_t previous, std::size_t group) const {
  const auto known = successors.find(pair_of(previous, group));
  return known != successors.end() ? known->second : (group + 1) % groups.size();
}

/// Another group than the last one is in use: releases groups that were used before, brings those
/// that will be next.
void LazyEngine::arrive(Group& group) {
  if (stopping || is_capturing()) return;
  if (current != kNoGroup) successors[pair_of(before, current)] = group.index;
  before = std::exchange(current, group.index);
  group.arrival = ++arrivals;
  for (auto* other : std::vector(here)) {
    const auto age = arrivals - other->arrival;
    if (other->state == State::kResident && other->pins == 0 &&
        age >= static_cast<std::uint64_t>(options.keep)) {
      release(*other);
    }
  }
  prefetch();
}

void LazyEngine::prefetch() {
  std::vector<std::size_t> wanted;
  auto previous = before;
  auto last = current;
  for (std::int64_t i = 0; i < options.prefetch_depth; ++i) {
    const auto next = successor_of(previous, last);
    if (next == current || std::ranges::find(wanted, next) != wanted.end()) break;
    wanted.push_back(next);
    previous = std::exchange(last, next);
  }
  for (const auto next : wanted) {
    auto& group = *groups[next];
    // A mapped file is there without being brought.
    if (group.state != State::kReleased || group.store->is_mapped()) continue;
    auto* slot = slot_ahead(wanted);
    if (slot == nullptr) return;
    group.came_ahead = true;
    start_fill(group, slot);
  }
}

/// A slot for a group that is not needed yet: free, or of a group that was brought in vain.
Slot* LazyEngine::slot_ahead(std::span<const std::size_t> wanted) {
  try {
    if (auto* slot = ring->take()) return slot;
  } catch (const c10::OutOfMemoryError&) {
    return nullptr;  // the next group then comes when it is used, to the slot of this one
  }
  const auto vain = std::ranges::find_if(here, [&](const Group* group) {
    return group->state == State::kFilled && group->pins == 0 &&
           std::ranges::find(wanted, group->index) == wanted.end();
  });
  if (vain == here.end()) return nullptr;
  drop(**vain);
  return ring->take();
}

/// Releases the group that was used least recently, of those that hold a slot in vain. Returns
/// false if there is none.
bool LazyEngine::release_oldest() {
  Group* oldest = nullptr;
  for (auto* other : here) {
    const bool idle = other->pins == 0 && other->slot != nullptr && other->state != State::kFilling;
    if (idle && (oldest == nullptr || other->arrival < oldest->arrival)) oldest = other;
  }
  if (oldest == nullptr) return false;
  release(*oldest);
  return true;
}

/// A slot for a group that is needed now: free, of the group that was used least recently, or one
/// more if all groups are in use. If there is no memory for another slot, fewer do.
Slot* LazyEngine::slot_for(Group& group) {
  for (;;) {
    try {
      if (auto* slot = ring->take()) return slot;
      if (release_oldest()) {
        if (auto* slot = ring->take()) return slot;
      }
      return ring->take_temporary(group.plan.bytes);
    } catch (const c10::OutOfMemoryError& error) {
      if (release_oldest()) continue;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "There is no memory for the parameter '",
                       group.entries.front()->name(), "' and those that come with it, ",
                       group.plan.bytes, " bytes: ", error.what_without_backtrace());
    }
  }
}

// -- the worker -----------------------------------------------------------------------------------

void LazyEngine::serve() {
  Lock lock(mutex);
  for (;;) {
    changed.wait(lock, [&] { return stopping || !queue.empty(); });
    if (stopping) break;
    being_filled = queue.front();
    queue.pop_front();
    lock.unlock();
    auto failure = fill_slot(*being_filled);
    lock.lock();
    finish_fill(*std::exchange(being_filled, nullptr), std::move(failure));
  }
  // One that was late: what it filled was kept for it.
  if (is_abandoned) std::erase_if(groups, [](const auto& group) { return !group->is_used(); });
}

/// A worker that hangs in a fill that took longer than allowed goes on without us, and holds what
/// it uses.
void LazyEngine::stop() noexcept {
  Lock lock(mutex);
  stopping = true;
  changed.notify_all();
  if (!worker.joinable()) return;
  if (is_late && being_filled != nullptr) {
    worker.detach();
    return;
  }
  lock.unlock();
  worker.join();
}

}  // namespace accelerate::detail::offload
