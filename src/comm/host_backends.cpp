// Which backend carries the collectives of the host's memory: shared memory where all ranks of a
// group are on one host, else Gloo.
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "comm/group_guard.h"
#include "comm/guarded_gloo.h"
#include "comm/shared_page.h"
#include "comm/shm_backend.h"
#include "core/log.h"
#include "core/text.h"
#include "core/world.h"
#include "state/process_group.h"

namespace accelerate::detail {
namespace {

constexpr const char* kVariable = "ACCELERATE_HOST_BACKEND";

enum class Wish : std::uint8_t { kAny, kGloo, kShm };

Wish wish_of(const Environment& environment) {
  const auto text = environment.get(kVariable);
  if (!text) return Wish::kAny;
  const auto word = to_lower(*text);
  if (word == "gloo") return Wish::kGloo;
  if (word == "shm") return Wish::kShm;
  throw ConfigError(str(kVariable, " is '", *text, "'. Choose gloo, or shm for shared memory."));
}

std::vector<std::uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

std::string get(const c10::intrusive_ptr<c10d::Store>& store, const std::string& key) {
  const auto bytes = store->get(key);
  return {bytes.begin(), bytes.end()};
}

std::shared_ptr<GroupGuard> make_guard(const c10::intrusive_ptr<c10d::Store>& store,
                                       const GroupOptions& options) {
  const Blackboard blackboard{
      .set = [store](const auto& key, const auto& value) { store->set(key, bytes_of(value)); },
      .get = [store](const auto& key) { return get(store, key); }};
  return std::make_shared<GroupGuard>(WatchOptions{.rank = options.rank,
                                                   .size = options.world_size,
                                                   .address = options.address,
                                                   .timeout = options.timeout},
                                      blackboard);
}

/// Collective. What all ranks want and where they are; the same answer on all of them.
struct Common {
  bool one_host = true;
  Wish wish = Wish::kAny;
};

Common agree(const c10::intrusive_ptr<c10d::Store>& store, const GroupOptions& options) {
  const auto wish = wish_of(Environment::process());
  const auto own = str(static_cast<int>(wish), " ", host_identity(), "/", this_host_name());
  store->set(str("host/", options.rank), bytes_of(own));
  Common common{.one_host = true, .wish = wish};
  for (int rank = 0; rank < options.world_size; ++rank) {
    const auto other = get(store, str("host/", rank));
    if (other[0] != own[0]) {
      throw ConfigError(str(kVariable, " differs between rank ", options.rank, " and rank ", rank,
                            ". Give it to all ranks or to none."));
    }
    common.one_host = common.one_host && other == own;
  }
  return common;
}

c10::intrusive_ptr<c10d::Backend> make_shm(const c10::intrusive_ptr<c10d::Store>& store,
                                           const GroupOptions& options,
                                           const std::shared_ptr<GroupGuard>& guard) {
  const auto common = agree(store, options);
  if (common.wish == Wish::kGloo) return nullptr;
  std::string why_not = "the ranks are on several hosts";
  c10::intrusive_ptr<c10d::Backend> shm;
  if (common.one_host) {
    shm = ShmBackend::try_make(c10::make_intrusive<c10d::PrefixStore>("shm", store), options.rank,
                               options.world_size, {.timeout = options.timeout}, guard, why_not);
  }
  if (!shm && common.wish == Wish::kShm) {
    throw ConfigError(str(kVariable, " is shm, which is not possible here: ", why_not,
                          ". Leave it unset, and gloo is taken."));
  }
  if (!shm) info(str("the processes of this host talk through gloo: ", why_not));
  return shm;
}

}  // namespace

HostBackends make_host_backends(const c10::intrusive_ptr<c10d::Store>& store,
                                const GroupOptions& options) {
  const auto guard = make_guard(store, options);
  HostBackends backends{.cpu = make_shm(store, options, guard),
                        .gloo = make_guarded_gloo(store, options, guard)};
  return backends;
}

}  // namespace accelerate::detail
