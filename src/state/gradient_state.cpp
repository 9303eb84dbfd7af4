#include "accelerate/state/gradient_state.h"

#include <algorithm>
#include <mutex>
#include <ostream>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "accelerate/kwargs.h"
#include "core/text.h"

namespace accelerate {
namespace {

using detail::str;

// The address identifies a loader without owning it: releasing a temporary reference could destroy
// the loader, whose destructor calls this file.
struct LoaderReference {
  std::weak_ptr<DataLoaderStateMixin> loader;
  const DataLoaderStateMixin* address = nullptr;
};

struct GradientFacts {
  bool sync_gradients = true;
  bool xla_gradients_synced = false;
  GradientAccumulationPlugin plugin = {};
  std::vector<LoaderReference> loaders = {};
};

struct GradientSlot {
  std::mutex mutex;
  std::optional<GradientFacts> facts;
};

GradientSlot& slot() {
  static auto* const the_slot = new GradientSlot;  // loaders may be destroyed after main()
  return *the_slot;
}

// Runs `f` on the facts under the lock.
template <class F>
auto with_facts(const char* attribute, F&& f) {
  const std::lock_guard lock(slot().mutex);
  if (!slot().facts) {
    throw StateError(str("`GradientState` object has no attribute `", attribute,
                         "`. This happens if `GradientState._reset_state()` was called and no "
                         "`Accelerator` or `GradientState` was made afterwards. Make one first."));
  }
  return f(*slot().facts);
}

std::shared_ptr<DataLoaderStateMixin> innermost(const GradientFacts& facts) {
  for (auto each = facts.loaders.rbegin(); each != facts.loaders.rend(); ++each) {
    if (auto loader = each->loader.lock()) return loader;
  }
  return nullptr;
}

}  // namespace

DataLoaderStateMixin::~DataLoaderStateMixin() = default;

GradientState::GradientState() {
  const std::lock_guard lock(slot().mutex);
  if (!slot().facts) slot().facts.emplace();
}

GradientState::GradientState(const GradientAccumulationPlugin& plugin) {
  validate(plugin);
  const std::lock_guard lock(slot().mutex);
  if (!slot().facts) slot().facts.emplace();
  slot().facts->plugin = plugin;
}

bool GradientState::initialized() noexcept {
  const std::lock_guard lock(slot().mutex);
  return slot().facts.has_value();
}

void GradientState::_reset_state() {
  const std::lock_guard lock(slot().mutex);
  slot().facts.reset();
}

bool GradientState::sync_gradients() const {
  return with_facts("sync_gradients", [](const auto& facts) { return facts.sync_gradients; });
}

std::int64_t GradientState::num_steps() const {
  return with_facts("num_steps",
                    [](const auto& facts) { return facts.plugin.num_steps.value_or(1); });
}

void GradientState::set_num_steps(std::int64_t num_steps) {
  if (num_steps < 1) {
    throw ArgumentError(
        str("num_steps is ", num_steps, ", but an optimizer step takes at least one batch."));
  }
  with_facts("num_steps", [&](auto& facts) { facts.plugin.num_steps = num_steps; });
}

bool GradientState::adjust_scheduler() const {
  return with_facts("adjust_scheduler", [](const auto& facts) {
    return facts.plugin.adjust_scheduler.value_or(false);
  });
}

bool GradientState::sync_with_dataloader() const {
  return with_facts("sync_with_dataloader",
                    [](const auto& facts) { return facts.plugin.sync_with_dataloader; });
}

bool GradientState::sync_each_batch() const {
  return with_facts("sync_each_batch",
                    [](const auto& facts) { return facts.plugin.sync_each_batch; });
}

bool GradientState::end_of_dataloader() const {
  const auto loader = active_dataloader();
  return loader != nullptr && loader->end_of_dataloader();
}

std::int64_t GradientState::remainder() const {
  const auto loader = active_dataloader();
  return loader == nullptr ? -1 : loader->remainder();
}

bool GradientState::in_dataloader() const { return active_dataloader() != nullptr; }

std::shared_ptr<DataLoaderStateMixin> GradientState::active_dataloader() const {
  return with_facts("active_dataloader", [](const auto& facts) { return innermost(facts); });
}

std::vector<std::shared_ptr<DataLoaderStateMixin>> GradientState::dataloader_references() const {
  return with_facts("dataloader_references", [](const auto& facts) {
    std::vector<std::shared_ptr<DataLoaderStateMixin>> alive;
    for (const auto& reference : facts.loaders) {
      if (auto loader = reference.loader.lock()) alive.push_back(std::move(loader));
    }
    return alive;
  });
}

bool GradientState::is_xla_gradients_synced() const {
  const bool synced = with_facts("is_xla_gradients_synced",
                                 [](const auto& facts) { return facts.xla_gradients_synced; });
  return synced || parse_flag_from_env("ACCELERATE_USE_FSDP");
}

void GradientState::set_is_xla_gradients_synced(bool synced) {
  with_facts("is_xla_gradients_synced", [&](auto& facts) { facts.xla_gradients_synced = synced; });
}

void GradientState::_set_sync_gradients(bool sync_gradients) {
  with_facts("sync_gradients", [&](auto& facts) { facts.sync_gradients = sync_gradients; });
}

void GradientState::_add_dataloader(std::weak_ptr<DataLoaderStateMixin> loader) {
  const auto alive = loader.lock();
  with_facts("dataloader_references",
             [&](auto& facts) { facts.loaders.push_back({std::move(loader), alive.get()}); });
}

void GradientState::_remove_dataloader(
    const std::shared_ptr<DataLoaderStateMixin>& loader) noexcept {
  _remove_dataloader(loader.get());
}

void GradientState::_remove_dataloader(const DataLoaderStateMixin* loader) noexcept {
  const std::lock_guard lock(slot().mutex);
  if (!slot().facts) return;
  std::erase_if(slot().facts->loaders, [&](const LoaderReference& reference) {
    return reference.address == loader || reference.loader.expired();
  });
}

std::ostream& operator<<(std::ostream& out, const GradientState& state) {
  const auto truth = [](bool value) { return value ? "True" : "False"; };
  const auto plugin =
      with_facts("num_steps", [](const auto& facts) { return to_kwargs(facts.plugin); });
  return out << "Sync Gradients: " << truth(state.sync_gradients())
             << "\nAt end of current dataloader: " << truth(state.end_of_dataloader())
             << "\nExtra samples added: " << state.remainder()
             << "\nGradient accumulation plugin: " << Value(plugin).repr() << "\n";
}

}  // namespace accelerate
