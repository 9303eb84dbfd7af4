// Chooses the backend for CPU tensors: shared memory if all ranks of a group are on one host,
// shared memory and Gloo if they are on several, or Gloo alone.
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
#include "state/roster.h"

namespace accelerate::detail::comm {
namespace {

constexpr const char* kVariable = "ACCELERATE_HOST_BACKEND";

enum class HostBackendChoice : std::uint8_t { kAny, kGloo, kShm };

HostBackendChoice choice_of(const Environment& environment) {
  const auto text = environment.get(kVariable);
  if (!text) return HostBackendChoice::kAny;
  const auto word = to_lower(*text);
  if (word == "gloo") return HostBackendChoice::kGloo;
  if (word == "shm") return HostBackendChoice::kShm;
  throw ConfigError(str(kVariable, " is '", *text, "'. Choose gloo, or shm for shared memory."));
}

std::shared_ptr<GroupGuard> make_guard(
    const state::Roster& roster, const state::ProcessGroupOptions& options,
    std::chrono::milliseconds stall = SideChannelOptions{}.stall) {
  const Blackboard blackboard{
      .set = [&](const auto& key, const auto& value) { roster.publish(key, value); },
      .get = [&](const auto& key) { return roster.read(key, 0); }};
  return std::make_shared<GroupGuard>(SideChannelOptions{.rank = options.rank,
                                                         .size = options.world_size,
                                                         .global_ranks = options.global_ranks,
                                                         .address = options.address,
                                                         .times = {.timeout = options.timeout},
                                                         .stall = stall,
                                                         .timeout = options.timeout},
                                      blackboard);
}

/// The choice of all ranks and the hosts they are on; the same on all ranks.
struct Common {
  RanksByHost hosts;
  HostBackendChoice choice = HostBackendChoice::kAny;
};

Common agree(const state::Roster& roster, const state::ProcessGroupOptions& options) {
  const auto choice = choice_of(Environment::process());
  const auto own = str(static_cast<int>(choice), " ", host_identity(), "/", this_host_name());
  roster.publish(str("host/", options.rank), own);
  Common common{.hosts = {}, .choice = choice};
  const auto all = roster.read_all("host");
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

ShmOptions shm_options(const state::ProcessGroupOptions& options) {
  ShmOptions shm{.timeout = options.timeout};
  shm.meeting_timeout = std::min(shm.meeting_timeout, options.timeout);
  return shm;
}

// Returns null if Gloo alone is to serve the CPU.
c10::intrusive_ptr<c10d::Backend> make_cpu(const c10::intrusive_ptr<c10d::Store>& store,
                                           const state::ProcessGroupOptions& options,
                                           const state::Roster& roster, const Common& common,
                                           const c10::intrusive_ptr<c10d::Backend>& gloo,
                                           const std::shared_ptr<GroupGuard>& guard) {
  if (common.choice == HostBackendChoice::kGloo) return nullptr;
  const bool several = common.hosts.size() > 1;
  std::string why_not;
  c10::intrusive_ptr<c10d::Backend> cpu;
  if (several && common.choice == HostBackendChoice::kShm) {
    why_not = "the ranks are on several hosts";
  } else if (several && common.hosts.size() == static_cast<std::size_t>(options.world_size)) {
    why_not = "each is on a host of its own";
  } else if (several) {
    cpu = TwoLevelBackend::try_make(store, options, roster, common.hosts, shm_options(options),
                                    gloo, guard, why_not);
  } else {
    cpu = ShmBackend::try_make(c10::make_intrusive<c10d::PrefixStore>("shm", store), options.rank,
                               options.world_size, shm_options(options), guard, why_not);
  }
  if (!cpu && common.choice == HostBackendChoice::kShm) {
    throw ConfigError(str(kVariable, " is shm, which is not possible here: ", why_not,
                          ". Leave it unset, and gloo is taken."));
  }
  if (!cpu) info(str("the processes talk through gloo alone: ", why_not));
  return cpu;
}

}  // namespace
}  // namespace accelerate::detail::comm

// Declared in state/process_group.h.
namespace accelerate::detail::state {

std::shared_ptr<comm::DeviceCallGuard> make_device_guard(const ProcessGroupOptions& options,
                                                         const Roster& roster) {
  // c10d checks ten times a second which calls are complete on the device.
  return comm::make_guard(roster, options, std::chrono::milliseconds(300));
}

HostBackends make_host_backends(const c10::intrusive_ptr<c10d::Store>& store,
                                const ProcessGroupOptions& options, const Roster& roster) {
  // First, because Gloo would wait for a missing rank without naming it.
  const auto common = comm::agree(roster, options);
  const auto guard = comm::make_guard(roster, options);
  const auto gloo = comm::make_guarded_gloo(store, options, guard);
  return {.cpu = comm::make_cpu(store, options, roster, common, gloo, guard), .gloo = gloo};
}

}  // namespace accelerate::detail::state
