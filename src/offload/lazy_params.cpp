// Taking tensors over, and giving them back.
#include "offload/lazy_params.h"

#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <limits>
#include <ranges>
#include <unordered_map>

#include "accelerate/errors.h"
#include "core/log.h"
#include "core/text.h"
#include "lazy/released_storage.h"
#include "modeling/tensors.h"
#include "offload/lazy_engine.h"
#include "state/tensor_device.h"

namespace accelerate::detail::offload {

namespace {

constexpr std::size_t kAlignment = 256;  // of storages in a slot: what CUDA's allocator gives

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

const c10::StorageImpl* storage_of(const c10::TensorImpl& tensor) {
  return tensor.has_storage() ? tensor.unsafe_storage().unsafeGetStorageImpl() : nullptr;
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

void check_counts(std::int64_t prefetch_depth, std::int64_t keep) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (prefetch_depth >= 0 && prefetch_depth <= kMost && keep >= 1 && keep <= kMost) return;
  throw ConfigError(str("LazyOptions has prefetch_depth = ", prefetch_depth, " and keep = ", keep,
                        ": prefetch_depth must be 0 or more, keep 1 or more, both at most ", kMost,
                        "."));
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
        {name, offset, tensor.nbytes(), tensor.scalar_type(), tensor.sizes().vec()});
    entries[found->second]->aliases.push_back(
        {name, c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr())});
    by_entry[found->second].push_back(tensor);
  }
  return entries;
}

c10::intrusive_ptr<c10::StorageImpl> share_storage(const at::Tensor& tensor) {
  return c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
      tensor.storage().unsafeGetStorageImpl());
}

/// Keeps the storage, and with it all views, where the device stays the same. If it throws, all
/// tensors are as they were.
void take_over(const std::vector<std::shared_ptr<Entry>>& entries,
               const std::vector<std::vector<at::Tensor>>& by_entry, c10::Device device) {
  std::vector<std::pair<at::Tensor, c10::intrusive_ptr<c10::StorageImpl>>> before;
  try {
    for (std::size_t i = 0; i < entries.size(); ++i) {
      auto& entry = *entries[i];
      entry.storage = share_storage(by_entry[i].front());
      if (entry.storage->device() == device) continue;
      entry.storage = lazy::make_empty_storage(entry.storage->nbytes(), device);
      for (const auto& tensor : by_entry[i]) {
        auto storage = share_storage(tensor);
        lazy::rebind(tensor, entry.storage, entry.name());
        before.emplace_back(tensor, std::move(storage));
      }
    }
  } catch (...) {
    for (const auto& [tensor, storage] : before) lazy::rebind(tensor, storage, "");
    throw;
  }
  for (std::size_t i = 0; i < entries.size(); ++i) {
    lazy::forbid(*entries[i]->storage, entries[i]->absent());
    for (const auto& tensor : by_entry[i]) lazy::mark(*tensor.unsafeGetTensorImpl());
  }
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

/// Where its tensors are after `restore`.
c10::Device home_of(const Entry& entry) {
  return entry.original.is_meta() ? c10::Device(c10::kCPU) : entry.original;
}

}  // namespace

void LazyEngine::restore(Entry& entry, const at::Tensor& bytes) {
  const auto tensors = living(entry);
  const auto home = home_of(entry);
  if (bytes.defined() && home == entry.storage->device()) {
    auto* source = bytes.storage().unsafeGetStorageImpl();
    lazy::allow(*entry.storage, source->set_data_ptr(c10::DataPtr(nullptr, home)));
  } else {
    // Views that others hold must not see the slot, which other groups use.
    lazy::forbid(*entry.storage, entry.absent());
  }
  for (const auto& tensor : tensors) {
    if (home != entry.storage->device()) {
      lazy::rebind(tensor, share_storage(bytes), entry.name());
    }
    lazy::unmark(*tensor.unsafeGetTensorImpl());
  }
  lazy::forget_storage(*entry.storage);
}

void LazyEngine::check_unused(const Group& group) const {
  if (!group.is_used()) return;
  throw StateError(str("The parameter '", group.entries.front()->name(),
                       "' cannot be restored: it is in use. End what align_module_device returned, "
                       "and the operators of other threads, first."));
}

void LazyEngine::restore(Group& group, After after, Lock& lock) {
  if (group.state == State::kFilling) wait_until_filled(group, lock);
  check_unused(group);
  ring->synchronize();  // a copy ahead may still read the memory of the store
  const at::AutoDispatchBelowADInplaceOrView below;
  // Reading a model of the meta device at the end of its handle could take all memory, or minutes.
  const bool may_read = after == After::kRemoveHooks || !group.store->is_slow();
  const auto is_left = [&](const Entry& entry) { return !may_read && entry.original.is_meta(); };
  if (std::ranges::any_of(group.entries, [&](const auto& entry) { return is_left(*entry); })) {
    write_back(group);
  }
  std::vector<at::Tensor> bytes;  // all first: nothing has changed if one cannot be had
  for (const auto& entry : group.entries) {
    // If the model is gone, its values are not needed.
    const bool none = is_left(*entry) || living(*entry).empty();
    bytes.push_back(none ? at::Tensor() : host_bytes(*entry).to(home_of(*entry)));
  }
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    auto& entry = *group.entries[i];
    if (is_left(entry)) {
      abandon(entry, str("The parameter '", entry.name(),
                         "' has no value any more: the handle that its model was dispatched with "
                         "has ended. Keep the handle as long as the model is used, or call "
                         "remove_hooks() before, which reads all weights into host memory."));
    } else {
      restore(entry, bytes[i]);
    }
  }
  forget(group);
}

void LazyEngine::forget(Group& group) noexcept {
  std::erase(here, &group);
  std::erase(queue, &group);
  if (group.slot != nullptr) ring->give_back(std::exchange(group.slot, nullptr));
  group.state = State::kReleased;
  group.pins = 0;
  group.is_captured = false;
  for (const auto& entry : group.entries) entry->group = nullptr;
}

std::exception_ptr LazyEngine::restore_all(After after, Lock& lock) {
  std::exception_ptr failure;
  // Other threads may come between while one is waited for.
  std::vector<Group*> all;
  for (const auto& group : groups) all.push_back(group.get());
  for (auto* group : std::views::reverse(all)) {
    try {
      restore(*group, after, lock);
      stats.managed_bytes -= static_cast<std::int64_t>(group->plan.bytes);
      remove(*group);
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  for (const auto& [alias, storage] : residents) {
    if (const auto tensor = alias.tensor.lock()) lazy::unmark(*tensor);
    lazy::forget_storage(*storage);
  }
  residents.clear();
  // A model of which a part computes where it was dispatched to is left together.
  if (!failure || after == After::kEndOfHandle) failure = undo_all(failure);
  if (ring) ring->free_memory();
  note_resident();
  return failure;
}

std::exception_ptr LazyEngine::undo_all(std::exception_ptr failure) {
  for (const auto& f : std::views::reverse(std::exchange(undo, {}))) {
    try {
      f();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  return failure;
}

void LazyEngine::abandon(Entry& entry, const std::string& why) noexcept {
  lazy::forbid(*entry.storage, why);
  lazy::forget_storage(*entry.storage);
}

void LazyEngine::let_go(Group& group, Lock& lock) noexcept {
  if (being_filled == &group) {
    // The thread that fills it was late: it ends without us, and forgets the group.
    for (const auto& entry : group.entries) {
      abandon(*entry, entry->absent());
      entry->group = nullptr;
    }
    return;
  }
  try {
    restore(group, After::kEndOfHandle, lock);
  } catch (const std::exception& error) {
    warn(str("The parameter '", group.entries.front()->name(),
             "' could not be restored, and throws when it is used: ", error.what()));
    for (const auto& entry : group.entries) abandon(*entry, entry->absent());
    forget(group);
  }
  remove(group);
}

void LazyEngine::remove(const Group& group) noexcept {
  std::erase_if(groups, [&](const auto& other) { return other.get() == &group; });
  for (std::size_t i = 0; i < groups.size(); ++i) groups[i]->index = i;
  successors.clear();  // of other indices
  before = current = kNoGroup;
}

at::Tensor LazyEngine::host_bytes(Entry& entry) {
  write_back(*entry.group);
  if (ring) ring->synchronize();
  return entry.group->store->bytes(entry.index);
}

LazyParams::LazyParams(const LazyOptions& options)
    : engine_(std::make_shared<LazyEngine>(options)) {
  check_counts(options.prefetch_depth, options.keep);
}

LazyParams::~LazyParams() {
  if (engine_ == nullptr) return;
  auto& engine = *engine_;
  try {
    LazyEngine::Lock lock(engine.mutex);
    if (const auto failure = engine.restore_all(After::kEndOfHandle, lock)) {
      std::rethrow_exception(failure);
    }
  } catch (const std::exception& error) {
    warn(
        str("Offloaded parameters could not be restored; those that are in use come back when that "
            "ends, others throw when they are used: ",
            error.what()));
  }
  engine.stop();
  LazyEngine::Lock lock(engine.mutex);
  engine.is_abandoned = true;
  std::vector<Group*> unused;
  for (const auto& group : engine.groups) {
    if (!group->is_used()) unused.push_back(group.get());
  }
  for (auto* group : unused) engine.let_go(*group, lock);
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
  const LazyEngine::Lock lock(engine.mutex);
  if (!engine.ring) engine.ring.emplace(device);
  if (engine.ring->device() != device) {
    throw ArgumentError(str("The weights of '", group, "' shall compute on ", device.str(),
                            ", those before on ", engine.ring->device().str(),
                            ". Offloaded weights of one model compute on one device."));
  }
  managed->index = engine.groups.size();
  take_over(managed->entries, by_entry, device);
  for (const auto& entry : managed->entries) {
    entry->engine = engine_;
    entry->group = managed.get();
    lazy::manage_storage(*entry->storage, entry);
  }
  if (!managed->store->is_mapped()) {
    engine.largest_bytes = std::max(engine.largest_bytes, managed->plan.bytes);
  }
  engine.stats.managed_bytes += static_cast<std::int64_t>(managed->plan.bytes);
  engine.groups.push_back(std::move(managed));
  engine.resize_ring();
}

void LazyParams::manage_resident(const std::vector<NamedTensor>& tensors) {
  const LazyEngine::Lock lock(engine_->mutex);
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.has_storage() || tensor.layout() != at::kStrided) continue;
    auto storage = share_storage(tensor);
    lazy::mark(*tensor.unsafeGetTensorImpl());
    lazy::manage_storage(*storage, std::make_shared<ResidentStorage>(tensor.device()));
    engine_->residents.emplace_back(
        Alias{name, c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr())},
        std::move(storage));
  }
}

PinnedBudget& LazyParams::pinned_budget() { return engine_->budget; }

void LazyParams::undo_with(std::function<void()> f) {
  const LazyEngine::Lock lock(engine_->mutex);
  engine_->undo.push_back(std::move(f));
}

void LazyParams::keep_moves() {
  const LazyEngine::Lock lock(engine_->mutex);
  engine_->undo.clear();
}

void LazyParams::before_fill(std::function<void()> f) { engine_->before_fill = std::move(f); }

void LazyParams::prefetch(std::int64_t depth) {
  check_counts(depth, engine_->options.keep);
  const LazyEngine::Lock lock(engine_->mutex);
  engine_->options.prefetch_depth = depth;
  engine_->resize_ring();
}

void LazyParams::offload_now() {
  auto& engine = *engine_;
  const LazyEngine::Lock lock(engine.mutex);
  for (auto* group : std::vector(engine.here)) {
    if (group->state != State::kFilling && group->pins == 0) engine.release(*group);
  }
  if (engine.ring) engine.ring->free_memory();
  engine.note_resident();
}

void LazyParams::reset() {
  const LazyEngine::Lock lock(engine_->mutex);
  for (const auto& group : engine_->groups) {
    if (group->state == State::kFailed) group->state = State::kReleased;
  }
}

void LazyParams::restore() {
  auto& engine = *engine_;
  LazyEngine::Lock lock(engine.mutex);
  for (const auto& group : engine.groups) engine.check_unused(*group);
  if (const auto failure = engine.restore_all(After::kRemoveHooks, lock)) {
    std::rethrow_exception(failure);
  }
}

void LazyParams::check_not_moved() const {
  const LazyEngine::Lock lock(engine_->mutex);
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
  const LazyEngine::Lock lock(engine_->mutex);
  return engine_->groups.empty();
}

LazyStats LazyParams::stats() const {
  const LazyEngine::Lock lock(engine_->mutex);
  return engine_->stats;
}

c10::Device with_index(c10::Device device) {
  if (!device.is_cuda() || device.has_index()) return state::tensor_device(device);
  return c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

bool can_be_managed(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() &&
         !tensor.is_nested() && !tensor.is_quantized() && !tensor.is_conj() && !tensor.is_neg() &&
         tensor.is_contiguous() && tensor.nbytes() > 0 && lazy::find_managed(tensor) == nullptr;
}

bool is_offloaded(const at::Tensor& tensor) {
  return std::dynamic_pointer_cast<Entry>(lazy::find_managed(tensor)) != nullptr;
}

at::Tensor host_value(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto entry = std::dynamic_pointer_cast<Entry>(lazy::find_managed(tensor));
  if (entry == nullptr) return tensor.detach().cpu();
  const LazyEngine::Lock lock(entry->engine->mutex);
  if (entry->group == nullptr) return tensor.detach().cpu();  // given back meanwhile
  const auto bytes = entry->engine->host_bytes(*entry);
  return at::empty({0}, tensor.scalar_type())
      .set_(bytes.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
}

namespace {

class HostValues {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.has_storage()) return host_value(tensor);
    auto& known = known_[storage_of(*tensor.unsafeGetTensorImpl())];
    for (const auto& [other, value] : known) {
      if (modeling::same_view(other, tensor)) return value;
    }
    known.emplace_back(tensor, next_view(tensor, known));
    return known.back().second;
  }

 private:
  using Views = std::vector<std::pair<at::Tensor, at::Tensor>>;  // with their values

  static at::Tensor next_view(const at::Tensor& tensor, const Views& known) {
    const auto dtype = storage_dtype(tensor);
    if (dtype != tensor.scalar_type()) return host_value(tensor).to(dtype);
    // The value of an offloaded tensor has all bytes of its storage.
    if (known.empty() || !is_offloaded(tensor)) return host_value(tensor);
    return at::empty({0}, dtype)
        .set_(known.front().second.storage(), tensor.storage_offset(), tensor.sizes(),
              tensor.strides());
  }

  std::unordered_map<const c10::StorageImpl*, Views> known_;
};

}  // namespace

StateDict host_values(const StateDict& state) {
  const at::NoGradGuard no_grad;
  StateDict values("Tensor");
  HostValues host;
  std::vector<std::string> absent;
  for (const auto& item : state) {
    if (item.value().is_meta()) {
      absent.push_back(item.key());
    } else {
      values.insert(item.key(), host.of(item.value()));
    }
  }
  if (!absent.empty()) {
    warn(str("The state dict has no ", join(absent),
             ": they are on the meta device and have no values."));
  }
  return values;
}

at::ScalarType storage_dtype(const at::Tensor& tensor) {
  const auto entry = std::dynamic_pointer_cast<Entry>(lazy::find_managed(tensor));
  if (entry == nullptr) return tensor.scalar_type();
  const LazyEngine::Lock lock(entry->engine->mutex);
  return entry->group == nullptr ? tensor.scalar_type()
                                 : entry->group->store->storage_dtype(tensor.scalar_type());
}

}  // namespace accelerate::detail::offload
