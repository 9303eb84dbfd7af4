#include "offload/lazy_params.h"

#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <limits>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <unordered_map>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "accelerate/memory.h"
#include "core/log.h"
#include "core/text.h"
#include "offload/released_storage.h"
#include "offload/slot_ring.h"
#include "offload/trigger.h"
#include "state/accelerator_backend.h"

namespace accelerate::detail::offload {
namespace {

constexpr std::size_t kAlignment = 256;  // of storages in a slot: what CUDA's allocator gives
constexpr std::size_t kNone = static_cast<std::size_t>(-1);

enum class State : std::uint8_t { kReleased, kFilling, kFilled, kResident, kFailed };

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

std::int64_t bytes_of(const std::optional<ByteSize>& size, std::int64_t fallback) {
  if (!size) return fallback;
  return std::visit([](const auto& value) { return convert_file_size_to_int(value); }, *size);
}

const c10::StorageImpl* storage_of(const c10::TensorImpl& tensor) {
  return tensor.has_storage() ? tensor.unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

/// Others cannot be put into a storage of their own, and stay where they are.
bool can_be_managed(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() &&
         !tensor.is_nested() && !tensor.is_quantized() && tensor.is_contiguous() &&
         tensor.nbytes() > 0 && find_managed(tensor) == nullptr;
}

/// A tensor that is resident for good: only the arguments beside it are moved.
class ResidentStorage final : public ManagedStorage {
 public:
  explicit ResidentStorage(c10::Device device) : device_(device) {}
  void pin(Access) override {}
  void unpin() noexcept override {}
  c10::Device device() const override { return device_; }

 private:
  c10::Device device_;
};

struct Alias {
  std::string name;
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
};

}  // namespace

struct Group;

/// A storage of a group.
struct Entry final : ManagedStorage {
  void pin(Access access) override;
  void unpin() noexcept override;
  c10::Device device() const override { return storage->device(); }

  [[nodiscard]] const std::string& name() const { return aliases.front().name; }
  [[nodiscard]] std::string absent() const {
    return str(
        "The parameter '", name(),
        "' is offloaded, and its bytes are not in memory now. Operators bring them; for a raw "
        "pointer use align_module_device, to save the model its state_dict().");
  }

  std::shared_ptr<LazyParams::Engine> engine;
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
  bool dirty = false;
  bool came_ahead = false;
  std::uint64_t arrival = 0;  // when another group was in use before, counted in changes
  std::exception_ptr failure;
};

struct LazyParams::Engine : std::enable_shared_from_this<Engine> {
  explicit Engine(const LazyOptions& wanted)
      : options(wanted),
        timeout_seconds(get_int_from_env({"ACCELERATE_OFFLOAD_TIMEOUT"}, 600)),
        budget{bytes_of(wanted.pinned_bytes, std::numeric_limits<std::int64_t>::max())} {}

  // -- for operators
  void pin(Entry& entry, Access access);
  void unpin(Group& group);

  // All below are called with the mutex held.
  using Lock = std::unique_lock<std::mutex>;
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
  [[nodiscard]] std::size_t successor_of(std::size_t before, std::size_t current) const;
  [[nodiscard]] Slot* slot_for(Group& group);
  [[nodiscard]] Slot* slot_ahead(std::span<const std::size_t> wanted);
  [[nodiscard]] at::Tensor memory_of(const Entry& entry) const;
  [[nodiscard]] at::Tensor host_bytes(Entry& entry);
  void restore(Entry& entry);
  void resize_ring();
  void note_resident();

  void serve();
  [[nodiscard]] bool stop() noexcept;

  LazyOptions options;
  const std::int64_t timeout_seconds;
  PinnedBudget budget;
  std::function<void()> before_fill;

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::unique_ptr<Group>> groups;
  std::vector<std::pair<Alias, c10::intrusive_ptr<c10::StorageImpl>>> residents;
  std::optional<SlotRing> ring;
  LazyStats stats;

  std::size_t before = kNone;  // the groups that were used last
  std::size_t current = kNone;
  std::uint64_t arrivals = 0;
  std::unordered_map<std::uint64_t, std::size_t> successors;  // by the last two groups

  std::thread worker;  // fills from slow stores
  std::deque<Group*> queue;
  Group* being_filled = nullptr;
  bool stopping = false;
  bool is_late = false;  // a fill took longer than allowed
};

using Engine = LazyParams::Engine;

void Entry::pin(Access access) { engine->pin(*this, access); }
void Entry::unpin() noexcept { engine->unpin(*group); }

void Engine::pin(Entry& entry, Access access) {
  Lock lock(mutex);
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
    } else {
      bring(group, lock);
    }
    if (group.slot != nullptr) ring->use(*group.slot);
    if (writes) entry.dirty = group.dirty = true;
    if (group.index != current) arrive(group);
  } catch (...) {
    --group.pins;
    throw;
  }
}

void Engine::unpin(Group& group) {
  const Lock lock(mutex);
  --group.pins;
}

// -- bringing a group -----------------------------------------------------------------------------

void Engine::bring(Group& group, Lock& lock) {
  if (before_fill && group.state == State::kReleased) {
    lock.unlock();
    before_fill();
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
void Engine::start_fill(Group& group, Slot* slot) {
  group.slot = slot;
  group.state = State::kFilling;
  group.arrival = arrivals;
  ++stats.fills;
  stats.bytes_read += static_cast<std::int64_t>(group.plan.bytes);
  note_resident();
  if (group.store->is_mapped()) {
    group.state = State::kFilled;
  } else if (group.store->is_slow()) {
    if (!worker.joinable()) {
      worker = std::thread([self = shared_from_this()] { self->serve(); });
    }
    queue.push_back(&group);
    changed.notify_all();
  } else {
    finish_fill(group, fill_slot(group));
  }
}

/// Returns what it failed with. Called without the mutex for slow stores: nobody else touches the
/// slot of a group that is Filling.
std::exception_ptr Engine::fill_slot(const Group& group) {
  const at::AutoDispatchBelowADInplaceOrView below;
  try {
    auto* backend = state::accelerator_backend();
    if (backend != nullptr && backend->is_capturing()) {
      throw StateError(
          "a CUDA graph is being captured, which would keep the address of memory that other "
          "weights use later. Capture with weights that stay on the device.");
    }
    auto& slot = *group.slot;
    ring->copy(slot, [&] {
      group.store->fill(slot.memory.narrow(0, 0, static_cast<std::int64_t>(group.plan.bytes)));
    });
    return nullptr;
  } catch (const CheckpointError&) {
    return std::current_exception();  // names parameter, file and offset
  } catch (const std::exception& error) {
    return std::make_exception_ptr(
        StateError(str("The parameter '", group.entries.front()->name(),
                       "' could not be brought to its device: ", error.what())));
  }
}

void Engine::finish_fill(Group& group, std::exception_ptr failure) {
  group.failure = std::move(failure);
  group.state = group.failure ? State::kFailed : State::kFilled;
  if (group.failure) ring->give_back(std::exchange(group.slot, nullptr));
  changed.notify_all();
}

void Engine::wait_until_filled(Group& group, Lock& lock) {
  const auto there = [&] { return group.state != State::kFilling; };
  if (timeout_seconds == 0) {
    changed.wait(lock, there);
  } else if (!changed.wait_for(lock, std::chrono::seconds(timeout_seconds), there)) {
    is_late = true;
    throw StateError(str("The parameter '", group.entries.front()->name(),
                         "' was not brought to its device within ", timeout_seconds,
                         " s. The disk is too slow or hangs; ACCELERATE_OFFLOAD_TIMEOUT sets the "
                         "limit in seconds, 0 for none."));
  }
}

at::Tensor Engine::memory_of(const Entry& entry) const {
  const auto bytes = static_cast<std::int64_t>(entry.storage->nbytes());
  if (entry.group->slot == nullptr) {
    return at::from_blob(entry.storage->mutable_data(), {bytes}, at::kByte);
  }
  const auto offset = entry.group->plan.storages[entry.index].offset;
  return entry.group->slot->memory.narrow(0, static_cast<std::int64_t>(offset), bytes);
}

void Engine::bind(Group& group) {
  try {
    for (const auto& entry : group.entries) {
      allow(*entry->storage,
            group.slot == nullptr
                ? group.store->map(entry->index)
                : c10::DataPtr(memory_of(*entry).mutable_data_ptr(), entry->storage->device()));
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

void Engine::write_back(Group& group) {
  if (!group.dirty) return;
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto write = [&] {
    for (const auto& entry : group.entries) {
      if (!entry->dirty) continue;
      group.store->write_back(entry->index, memory_of(*entry));
      entry->dirty = false;
    }
  };
  if (group.slot != nullptr) {
    SlotRing::leave(*group.slot);
    ring->copy(*group.slot, write);
  } else {
    write();
  }
  group.dirty = false;
  ++stats.writebacks;
}

/// The storages throw from now on. What was changed must have been written back.
void Engine::drop(Group& group) noexcept {
  for (const auto& entry : group.entries) forbid(*entry->storage, entry->absent());
  if (group.slot != nullptr) {
    if (!group.slot->users.empty()) SlotRing::leave(*group.slot);
    ring->give_back(std::exchange(group.slot, nullptr));
  }
  group.state = State::kReleased;
  note_resident();
}

void Engine::release(Group& group) {
  write_back(group);  // if it throws, the group stays, with its changes
  drop(group);
}

void Engine::note_resident() {
  std::size_t mapped = 0;
  for (const auto& group : groups) {
    const bool here = group->state == State::kFilled || group->state == State::kResident;
    if (here && group->slot == nullptr) mapped += group->plan.bytes;
  }
  stats.resident_bytes =
      static_cast<std::int64_t>(mapped + (ring ? ring->allocated_bytes() : std::size_t{0}));
  stats.peak_resident_bytes = std::max(stats.peak_resident_bytes, stats.resident_bytes);
}

// -- which group comes next -----------------------------------------------------------------------

std::uint64_t pair_of(std::size_t before, std::size_t current) {
  return static_cast<std::uint64_t>(before) << 32U | (current & 0xFFFFFFFFU);
}

std::size_t Engine::successor_of(std::size_t previous, std::size_t group) const {
  const auto known = successors.find(pair_of(previous, group));
  return known != successors.end() ? known->second : (group + 1) % groups.size();
}

/// Another group than the last one is in use: releases groups that were used before, brings those
/// that will be next.
void Engine::arrive(Group& group) {
  if (current != kNone) successors[pair_of(before, current)] = group.index;
  before = std::exchange(current, group.index);
  group.arrival = ++arrivals;
  for (const auto& other : groups) {
    const auto age = arrivals - other->arrival;
    if (other->state == State::kResident && other->pins == 0 &&
        age >= static_cast<std::uint64_t>(options.keep)) {
      release(*other);
    }
  }
  prefetch();
}

void Engine::prefetch() {
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
Slot* Engine::slot_ahead(std::span<const std::size_t> wanted) {
  if (auto* slot = ring->take()) return slot;
  for (const auto& group : groups) {
    if (group->state == State::kFilled && group->pins == 0 &&
        std::ranges::find(wanted, group->index) == wanted.end()) {
      drop(*group);
      return ring->take();
    }
  }
  return nullptr;
}

/// A slot for a group that is needed now: free, of the group that was used least recently, or one
/// more if all groups are in use.
Slot* Engine::slot_for(Group& group) {
  if (auto* slot = ring->take()) return slot;
  Group* oldest = nullptr;
  for (const auto& other : groups) {
    const bool idle = other->pins == 0 && other->slot != nullptr &&
                      (other->state == State::kResident || other->state == State::kFilled);
    if (idle && (oldest == nullptr || other->arrival < oldest->arrival)) oldest = other.get();
  }
  if (oldest != nullptr) {
    release(*oldest);
    if (auto* slot = ring->take()) return slot;
  }
  return ring->take_temporary(group.plan.bytes);
}

// -- the worker -----------------------------------------------------------------------------------

void Engine::serve() {
  Lock lock(mutex);
  for (;;) {
    changed.wait(lock, [&] { return stopping || !queue.empty(); });
    if (stopping) return;
    being_filled = queue.front();
    queue.pop_front();
    lock.unlock();
    auto failure = fill_slot(*being_filled);
    lock.lock();
    finish_fill(*std::exchange(being_filled, nullptr), std::move(failure));
  }
}

/// Returns false if the worker hangs in a fill that took longer than allowed: it goes on without
/// us.
bool Engine::stop() noexcept {
  Lock lock(mutex);
  stopping = true;
  changed.notify_all();
  if (!worker.joinable()) return true;
  if (is_late && being_filled != nullptr) {
    worker.detach();
    return false;
  }
  lock.unlock();
  worker.join();
  return true;
}

// -- taking tensors over, and giving them back ----------------------------------------------------

namespace {

c10::Device with_index(c10::Device device) {
  if (!device.is_cuda() || device.has_index()) return device;
  return c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

void check_counts(std::int64_t prefetch_depth, std::int64_t keep) {
  if (prefetch_depth >= 0 && keep >= 1) return;
  throw ConfigError(str("LazyOptions has prefetch_depth = ", prefetch_depth, " and keep = ", keep,
                        ": prefetch_depth must be 0 or more, keep 1 or more."));
}

/// The tensors of a group by storage, and where each of them will be.
std::vector<std::shared_ptr<Entry>> plan_group(const std::vector<NamedTensor>& tensors,
                                               GroupPlan& plan,
                                               std::vector<std::vector<at::Tensor>>& by_entry) {
  std::vector<std::shared_ptr<Entry>> entries;
  std::unordered_map<const c10::StorageImpl*, std::size_t> known;
  for (const auto& [name, tensor] : tensors) {
    if (!can_be_managed(tensor)) continue;
    const auto* storage = tensor.storage().unsafeGetStorageImpl();
    const auto [found, is_new] = known.try_emplace(storage, entries.size());
    if (is_new) {
      auto entry = std::make_shared<Entry>();
      entry->index = entries.size();
      entry->original = tensor.device();
      entries.push_back(std::move(entry));
      plan.storages.push_back({plan.bytes, storage->nbytes(), {}});
      plan.bytes = aligned(plan.bytes + storage->nbytes());
      by_entry.emplace_back();
    }
    const auto offset = static_cast<std::size_t>(tensor.storage_offset()) * tensor.itemsize();
    plan.storages[found->second].tensors.push_back(
        {name, offset, tensor.nbytes(), tensor.scalar_type()});
    entries[found->second]->aliases.push_back(
        {name, c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr())});
    by_entry[found->second].push_back(tensor);
  }
  return entries;
}

/// Keeps the storage, and with it all views, where the device stays the same.
void take_over(Entry& entry, const std::vector<at::Tensor>& tensors, c10::Device device) {
  const auto& first = tensors.front();
  if (first.device() == device) {
    entry.storage =
        c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(first.storage().unsafeGetStorageImpl());
  } else {
    entry.storage = make_empty_storage(first.storage().nbytes(), device);
    for (const auto& tensor : tensors) rebind(tensor, entry.storage);
  }
  forbid(*entry.storage, entry.absent());
  for (const auto& tensor : tensors) mark(*tensor.unsafeGetTensorImpl());
}

/// The tensors that still are what `manage` got.
std::vector<at::Tensor> living(const Entry& entry) {
  std::vector<at::Tensor> tensors;
  for (const auto& alias : entry.aliases) {
    auto tensor = alias.tensor.lock();
    if (tensor && storage_of(*tensor) == entry.storage.get()) {
      tensors.emplace_back(std::move(tensor));
    }
  }
  return tensors;
}

}  // namespace

void Engine::restore(Entry& entry) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto tensors = living(entry);
  const auto home = entry.original.is_meta() ? c10::Device(c10::kCPU) : entry.original;
  // If the model is gone, its values are not needed.
  const auto bytes = tensors.empty() ? at::Tensor() : host_bytes(entry).to(home);
  if (bytes.defined() && home == entry.storage->device()) {
    auto* source = bytes.storage().unsafeGetStorageImpl();
    allow(*entry.storage, source->set_data_ptr(c10::DataPtr(nullptr, home)));
  } else {
    // Views that others hold must not see the slot, which other groups use.
    forbid(*entry.storage, entry.absent());
  }
  for (const auto& tensor : tensors) {
    if (home != entry.storage->device()) {
      rebind(tensor, c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
                         bytes.storage().unsafeGetStorageImpl()));
    }
    unmark(*tensor.unsafeGetTensorImpl());
  }
  forget_storage(*entry.storage);
}

at::Tensor Engine::host_bytes(Entry& entry) {
  write_back(*entry.group);
  if (ring) ring->synchronize();
  return entry.group->store->bytes(entry.index);
}

LazyParams::LazyParams(const LazyOptions& options) : engine_(std::make_shared<Engine>(options)) {
  check_counts(options.prefetch_depth, options.keep);
  (void)bytes_of(options.max_resident_bytes, 0);
}

LazyParams::~LazyParams() {
  if (engine_ == nullptr) return;
  try {
    restore();
  } catch (const std::exception& error) {
    warn(str("Offloaded parameters could not be restored, and throw when they are used: ",
             error.what()));
  }
  const bool ended = engine_->stop();
  const Engine::Lock lock(engine_->mutex);
  for (const auto& group : engine_->groups) {
    for (const auto& entry : group->entries) {
      forget_storage(*entry->storage);
      if (ended) entry->engine.reset();
    }
  }
}

void LazyParams::manage(const std::string& group, const std::vector<NamedTensor>& tensors,
                        c10::Device device, const MakeStore& make_store) {
  const at::AutoDispatchBelowADInplaceOrView below;
  device = with_index(device);
  auto managed = std::make_unique<Group>();
  managed->plan.name = group;
  std::vector<std::vector<at::Tensor>> by_entry;
  managed->entries = plan_group(tensors, managed->plan, by_entry);
  if (managed->entries.empty()) return;
  managed->store = make_store(managed->plan);

  auto& engine = *engine_;
  const Engine::Lock lock(engine.mutex);
  if (!engine.ring) engine.ring.emplace(device);
  managed->index = engine.groups.size();
  for (std::size_t i = 0; i < managed->entries.size(); ++i) {
    const auto& entry = managed->entries[i];
    entry->engine = engine_;
    entry->group = managed.get();
    take_over(*entry, by_entry[i], device);
    manage_storage(*entry->storage, entry);
  }
  engine.stats.managed_bytes += static_cast<std::int64_t>(managed->plan.bytes);
  engine.groups.push_back(std::move(managed));
  engine.resize_ring();
}

void Engine::resize_ring() {
  std::size_t largest = 0;
  for (const auto& group : groups) {
    if (!group->store->is_mapped()) largest = std::max(largest, group->plan.bytes);
  }
  if (largest == 0) return;
  const auto wanted = options.keep + options.prefetch_depth;
  const auto fit = bytes_of(options.max_resident_bytes, std::numeric_limits<std::int64_t>::max()) /
                   static_cast<std::int64_t>(largest);
  ring->resize(largest, static_cast<std::size_t>(std::clamp<std::int64_t>(fit, 1, wanted)));
}

void LazyParams::manage_resident(const std::vector<NamedTensor>& tensors) {
  const Engine::Lock lock(engine_->mutex);
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.has_storage() || tensor.layout() != at::kStrided) continue;
    auto storage =
        c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl());
    mark(*tensor.unsafeGetTensorImpl());
    manage_storage(*storage, std::make_shared<ResidentStorage>(tensor.device()));
    engine_->residents.emplace_back(
        Alias{name, c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr())},
        std::move(storage));
  }
}

PinnedBudget& LazyParams::pinned_budget() { return engine_->budget; }

void LazyParams::before_fill(std::function<void()> f) { engine_->before_fill = std::move(f); }

void LazyParams::prefetch(std::int64_t depth) {
  check_counts(depth, engine_->options.keep);
  const Engine::Lock lock(engine_->mutex);
  engine_->options.prefetch_depth = depth;
  engine_->resize_ring();
}

void LazyParams::offload_now() {
  auto& engine = *engine_;
  const Engine::Lock lock(engine.mutex);
  for (const auto& group : engine.groups) {
    const bool here = group->state == State::kResident || group->state == State::kFilled;
    if (here && group->pins == 0) engine.release(*group);
  }
  if (engine.ring) engine.ring->free_memory();
  engine.note_resident();
}

void LazyParams::reset() {
  const Engine::Lock lock(engine_->mutex);
  for (const auto& group : engine_->groups) {
    if (group->state == State::kFailed) group->state = State::kReleased;
  }
}

void LazyParams::restore() {
  auto& engine = *engine_;
  Engine::Lock lock(engine.mutex);
  while (!engine.groups.empty()) {
    auto& group = *engine.groups.back();
    if (group.state == State::kFilling) engine.wait_until_filled(group, lock);
    for (const auto& entry : group.entries) engine.restore(*entry);
    if (group.slot != nullptr) engine.ring->give_back(group.slot);
    for (const auto& entry : group.entries) entry->engine.reset();
    engine.groups.pop_back();
  }
  for (const auto& [alias, storage] : engine.residents) {
    if (const auto tensor = alias.tensor.lock()) unmark(*tensor);
    forget_storage(*storage);
  }
  engine.residents.clear();
  engine.successors.clear();
  engine.before = engine.current = kNone;
  if (engine.ring) engine.ring->free_memory();
  engine.note_resident();
  engine.stats.managed_bytes = 0;
}

void LazyParams::check_not_moved() const {
  const Engine::Lock lock(engine_->mutex);
  const auto check = [](const Alias& alias, const c10::StorageImpl& storage) {
    const auto tensor = alias.tensor.lock();
    if (!tensor || storage_of(*tensor) == &storage) return;
    throw StateError(str("The parameter '", alias.name,
                         "' was moved or given other data while its model is dispatched. Do not "
                         "call to() on such a model; call remove_hooks() first."));
  };
  for (const auto& group : engine_->groups) {
    for (const auto& entry : group->entries) {
      for (const auto& alias : entry->aliases) check(alias, *entry->storage);
    }
  }
  for (const auto& [alias, storage] : engine_->residents) check(alias, *storage);
}

bool LazyParams::is_empty() const {
  const Engine::Lock lock(engine_->mutex);
  return engine_->groups.empty();
}

LazyStats LazyParams::stats() const {
  const Engine::Lock lock(engine_->mutex);
  return engine_->stats;
}

bool is_offloaded(const at::Tensor& tensor) {
  return std::dynamic_pointer_cast<Entry>(find_managed(tensor)) != nullptr;
}

at::Tensor host_value(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto entry = std::dynamic_pointer_cast<Entry>(find_managed(tensor));
  if (entry == nullptr) return tensor.detach().cpu();
  const Engine::Lock lock(entry->engine->mutex);
  const auto bytes = entry->engine->host_bytes(*entry);
  return at::empty({0}, tensor.scalar_type())
      .set_(bytes.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
}

at::ScalarType storage_dtype(const at::Tensor& tensor) {
  const auto entry = std::dynamic_pointer_cast<Entry>(find_managed(tensor));
  return entry == nullptr ? tensor.scalar_type()
                          : entry->group->store->storage_dtype(tensor.scalar_type());
}

}  // namespace accelerate::detail::offload
