// Which backend carries the collectives of the host's memory: shared memory where all ranks of a
// group are on one host, both that and Gloo where they are on several, or Gloo alone.
#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "comm/group_guard.h"
#include "comm/guarded_gloo.h"
#include "comm/shm_backend.h"
#include "comm/two_level_backend.h"
#include "core/log.h"
#include "core/processes.h"
#include "core/text.h"
#include "core/world.h"
#include "state/process_group.h"
#include "state/roll.h"

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

std::shared_ptr<GroupGuard> make_guard(const Roll& roll, const GroupOptions& options,
                                       std::chrono::milliseconds stall = WatchOptions{}.stall) {
  const Blackboard blackboard{
      .set = [&](const auto& key, const auto& value) { roll.say(key, value); },
      .get = [&](const auto& key) { return roll.hear(key, 0); }};
  return std::make_shared<GroupGuard>(WatchOptions{.rank = options.rank,
                                                   .size = options.world_size,
                                                   .global_ranks = options.global_ranks,
                                                   .address = options.address,
                                                   .times = {.timeout = options.timeout},
                                                   .stall = stall,
                                                   .timeout = options.timeout},
                                      blackboard);
}

/// Collective. What all ranks want and where they are; the same answer on all of them.
struct Common {
  RanksByHost hosts;
  Wish wish = Wish::kAny;
};

Common agree(const Roll& roll, const GroupOptions& options) {
  const auto wish = wish_of(Environment::process());
  const auto own = str(static_cast<int>(wish), " ", host_identity(), "/", this_host_name());
  roll.say(str("host/", options.rank), own);
  Common common{.hosts = {}, .wish = wish};
  const auto all = roll.hear_all("host");
  for (int rank = 0; rank < options.world_size; ++rank) {
    const auto& other = all[rank];
    if (other[0] != own[0]) {
      throw ConfigError(str(kVariable, " differs between rank ", options.rank, " and rank ", rank,
                            ". Give it to all ranks or to none."));
    }
    const auto known = std::ranges::find_if(
        common.hosts, [&](const auto& ranks) { return all[ranks.front()] == other; });
    if (known != common.hosts.end()) {
      known->push_back(rank);
    } else {
      common.hosts.push_back({rank});
    }
  }
  return common;
}

ShmOptions shm_options(const GroupOptions& options) {
  ShmOptions shm{.timeout = options.timeout};
  shm.meeting_timeout = std::min(shm.meeting_timeout, options.timeout);
  return shm;
}

// Null when plain Gloo is to serve the CPU.
c10::intrusive_ptr<c10d::Backend> make_cpu(const c10::intrusive_ptr<c10d::Store>& store,
                                           const GroupOptions& options, const Roll& roll,
                                           const Common& common,
                                           const c10::intrusive_ptr<c10d::Backend>& gloo,
                                           const std::shared_ptr<GroupGuard>& guard) {
  if (common.wish == Wish::kGloo) return nullptr;
  const bool several = common.hosts.size() > 1;
  std::string why_not;
  c10::intrusive_ptr<c10d::Backend> cpu;
  if (several && common.wish == Wish::kShm) {
    why_not = "the ranks are on several hosts";
  } else if (several && common.hosts.size() == static_cast<std::size_t>(options.world_size)) {
    why_not = "each is on a host of its own";
  } else if (several) {
    cpu = TwoLevelBackend::try_make(store, options, roll, common.hosts, shm_options(options), gloo,
                                    guard, why_not);
  } else {
    cpu = ShmBackend::try_make(c10::make_intrusive<c10d::PrefixStore>("shm", store), options.rank,
                               options.world_size, shm_options(options), guard, why_not);
  }
  if (!cpu && common.wish == Wish::kShm) {
    throw ConfigError(str(kVariable, " is shm, which is not possible here: ", why_not,
                          ". Leave it unset, and gloo is taken."));
  }
  if (!cpu) info(str("the processes talk through gloo alone: ", why_not));
  return cpu;
}

}  // namespace

std::shared_ptr<DeviceCallGuard> make_device_guard(const GroupOptions& options, const Roll& roll) {
  // c10d looks ten times a second what is complete on the device; before that nobody waits.
  return make_guard(roll, options, std::chrono::milliseconds(300));
}

HostBackends make_host_backends(const c10::intrusive_ptr<c10d::Store>& store,
                                const GroupOptions& options, const Roll& roll) {
  // First, because Gloo would wait for a rank that does not come without a word about it.
  const auto common = agree(roll, options);
  const auto guard = make_guard(roll, options);
  const auto gloo = make_guarded_gloo(store, options, guard);
  return {.cpu = make_cpu(store, options, roll, common, gloo, guard), .gloo = gloo};
}

}  // namespace accelerate::detail
