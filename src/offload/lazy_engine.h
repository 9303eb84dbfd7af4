// src/offload/lazy_engine.h - the inside of `LazyParams`: groups, their states, who brings them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lazy/slot_ring.h"
#include "lazy/trigger.h"
#include "offload/lazy_params.h"
#include "offload/store.h"

namespace accelerate::detail::offload {

using lazy::Access;
using lazy::ManagedStorage;
using lazy::Slot;
using lazy::SlotRing;

inline constexpr std::size_t kNoGroup = static_cast<std::size_t>(-1);

enum class State : std::uint8_t { kReleased, kFilling, kFilled, kResident, kFailed };

struct Alias {
  std::string name;
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
};

/// What becomes of tensors that were on the meta device before and have to be read: they come to
/// the CPU, or throw when they are used.
enum class After : std::uint8_t { kRemoveHooks, kEndOfHandle };

struct Group;

/// A storage of a group.
struct Entry final : ManagedStorage {
  void pin(Access access) override;
  void unpin() noexcept override;
  c10::Device device() const override { return storage->device(); }

  [[nodiscard]] const std::string& name() const { return aliases.front().name; }
  /// What an access to the bytes says while they are away.
  [[nodiscard]] std::string absent() const;

  std::shared_ptr<LazyEngine> engine;
  /// Null once its tensors were given back or abandoned. Guarded by the mutex of the engine.
  Group* group = nullptr;
  std::size_t index = 0;
  c10::intrusive_ptr<c10::StorageImpl> storage;
  c10::Device original = c10::kCPU;
  std::vector<Alias> aliases;
  bool dirty = false;
};

struct Group {
  std::size_t index = 0;
  GroupPlan plan;
  std::unique_ptr<Store> store;
  std::vector<std::shared_ptr<Entry>> entries;
  State state = State::kReleased;
  Slot* slot = nullptr;  // null where the store maps
  int pins = 0;
  bool is_captured = false;  // by a CUDA graph, which pins it for good
  bool dirty = false;
  bool came_ahead = false;
  std::uint64_t arrival = 0;  // when another group was in use before, counted in changes
  std::exception_ptr failure;

  /// By operators or aligned modules.
  [[nodiscard]] bool is_used() const { return pins > (is_captured ? 1 : 0); }
};

/// Shared by the handle, by operators that are running and by the thread that reads files.
struct LazyEngine : std::enable_shared_from_this<LazyEngine> {
  explicit LazyEngine(const LazyOptions& wanted);

  // -- for operators
  void pin(Entry& entry, Access access);
  void unpin(Entry& entry) noexcept;

  // All below are called with the mutex held.
  using Lock = std::unique_lock<std::mutex>;
  void unpin(Group& group, Lock& lock) noexcept;
  void bring(Group& group, Lock& lock);
  void start_fill(Group& group, Slot* slot);
  [[nodiscard]] std::exception_ptr fill_slot(const Group& group);
  void finish_fill(Group& group, std::exception_ptr failure);
  void bind(Group& group);
  void wait_until_filled(Group& group, Lock& lock);
  void write_back(Group& group);
  void release(Group& group);
  void drop(Group& group) noexcept;
  void arrive(Group& group);
  void prefetch();
  [[nodiscard]] std::size_t successor_of(std::size_t previous, std::size_t group) const;
  [[nodiscard]] Slot* slot_for(Group& group);
  bool release_oldest();
  [[nodiscard]] Slot* slot_ahead(std::span<const std::size_t> wanted);
  [[nodiscard]] at::Tensor memory_of(const Entry& entry) const;
  [[nodiscard]] at::Tensor host_bytes(Entry& entry);
  void restore(Entry& entry, const at::Tensor& bytes);
  /// Throws `StateError` if operators or aligned modules use the group.
  void check_unused(const Group& group) const;
  /// Gives the tensors of a group back; it is not managed from now on.
  void restore(Group& group, After after, Lock& lock);
  /// All groups that can be restored. Returns what the first of the others failed with.
  [[nodiscard]] std::exception_ptr restore_all(After after, Lock& lock);
  /// Returns `failure`, else what failed.
  [[nodiscard]] std::exception_ptr undo_all(std::exception_ptr failure);
  /// For a storage that is not restored: throws `why` when it is used.
  static void abandon(Entry& entry, const std::string& why) noexcept;
  /// After the end of the handle: restores a group or abandons it, and forgets it.
  void let_go(Group& group, Lock& lock) noexcept;
  /// Its tensors were given back or abandoned: `remove` follows.
  void forget(Group& group) noexcept;
  void remove(const Group& group) noexcept;
  /// For the largest group so far, within the budget.
  void resize_ring();
  void note_resident();

  void serve();
  void stop() noexcept;

  LazyOptions options;
  const std::int64_t timeout_seconds;
  PinnedBudget budget;
  std::function<void()> before_fill;

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::unique_ptr<Group>> groups;
  std::vector<Group*> here;  // Filling, Filled and Resident ones
  std::vector<std::pair<Alias, c10::intrusive_ptr<c10::StorageImpl>>> residents;
  std::vector<std::function<void()>> undo;
  std::optional<SlotRing> ring;
  std::size_t largest_bytes = 0;  // of a group that needs a slot
  LazyStats stats;

  std::size_t before = kNoGroup;  // the groups that were used last
  std::size_t current = kNoGroup;
  std::uint64_t arrivals = 0;
  std::unordered_map<std::uint64_t, std::size_t> successors;  // by the last two groups

  std::thread worker;  // fills from slow stores
  std::deque<Group*> queue;
  Group* being_filled = nullptr;
  bool stopping = false;
  bool is_abandoned = false;  // the handle is gone
  bool is_late = false;       // a fill took longer than allowed
};

}  // namespace accelerate::detail::offload
