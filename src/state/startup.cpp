// How a process finds its place: who started it, which device and backend it takes, who the others
// are.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <fstream>
#include <limits>

#include "accelerate/checks.h"
#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "core/backend_choice.h"
#include "core/log.h"
#include "core/ports.h"
#include "core/process_variables.h"
#include "core/text.h"
#include "core/uncaught.h"
#include "state/accelerator_backend.h"
#include "state/partial_facts.h"
#include "state/process_group.h"
#include "state/roster.h"
#include "state/startup_watch.h"

namespace accelerate::detail::state {
namespace {

constexpr const char* kDefaultInitMethod = "env://";

struct Accelerator {
  std::string name = {};  // Python's word, "" for none
  int count = 0;
};

// Python's order: of two, the first is taken.
Accelerator find_accelerator() {
  const auto counted = [](const char* name, c10::DeviceType type) -> Accelerator {
    const auto& hooks = at::globalContext().getAcceleratorHooksInterface(type);
    return {name, static_cast<int>(hooks.deviceCount())};
  };
  const auto registered = [&](const char* name) { return counted(name, c10::kPrivateUse1); };
  if (is_available("mlu")) return registered("mlu");
  if (is_available("sdaa")) return registered("sdaa");
  if (is_available("musa")) return registered("musa");
  if (is_npu_available()) return registered("npu");
  if (is_available("hpu")) return registered("hpu");
  if (auto* backend = accelerator_backend()) return {"cuda", backend->device_count()};
  if (is_xpu_available()) return counted("xpu", c10::kXPU);
  if (is_available("neuron")) return registered("neuron");
  return {};
}

void check_told(const PartialStateOptions& options) {
  if (options.rank.has_value() != options.world_size.has_value()) {
    throw ConfigError(str(options.rank ? "rank" : "world_size", " is given without ",
                          options.rank ? "world_size" : "rank", ". Give both or neither."));
  }
  if (options.timeout && *options.timeout <= std::chrono::milliseconds(0)) {
    throw ConfigError(
        str("timeout is ", options.timeout->count(), " ms, but it must be positive."));
  }
  if (options.store && !options.rank) {
    throw ConfigError("a store is given without rank and world_size. Give all three.");
  }
  if (options.rank && (*options.rank < 0 || *options.rank >= *options.world_size)) {
    throw ConfigError(str("rank is ", *options.rank, " and world_size is ", *options.world_size,
                          ": ranks go from 0 to world_size - 1."));
  }
  if (options.local_rank && *options.local_rank < 0) {
    throw ConfigError(str("local_rank is ", *options.local_rank, ". It begins at 0."));
  }
  if (options.local_world_size && *options.local_world_size < 1) {
    throw ConfigError(str("local_world_size is ", *options.local_world_size,
                          ". A host has at least one process."));
  }
}

// The same of numbers from several sources, put together.
void check_place(const World& world) {
  if (world.master_port > 65535) {
    throw ConfigError(str("MASTER_PORT is ", world.master_port, ". Ports go from 0 to 65535."));
  }
  if (world.local_rank && world.local_size && *world.local_rank >= *world.local_size) {
    throw ConfigError(str("local_rank (or LOCAL_RANK) is ", *world.local_rank,
                          ", but local_world_size (or LOCAL_WORLD_SIZE) is ", *world.local_size,
                          ": local ranks go from 0 to local_world_size - 1."));
  }
}

// What the program itself says about its place, by numbers or by lending a group.
World told_world(const PartialStateOptions& options, const Environment& environment) {
  World world{.source = WorldSource::kTorchrun};
  const auto& lent = options.process_group;
  world.rank = lent ? lent.get()->getRank() : *options.rank;
  world.size = lent ? lent.get()->getSize() : *options.world_size;
  const auto known = [&](const char* name) -> std::optional<int> {
    const std::int64_t value = environment.integer({std::string(name)}, -1);
    if (value > std::numeric_limits<int>::max()) {
      throw ConfigError(str(name, " is ", value, ", which is more than any run has."));
    }
    return value < 0 ? std::nullopt : std::optional<int>(static_cast<int>(value));
  };
  world.local_rank = known("LOCAL_RANK");
  world.local_size = known("LOCAL_WORLD_SIZE");
  world.master_addr = environment.get("MASTER_ADDR").value_or("");
  world.master_port = known("MASTER_PORT").value_or(world.master_port);
  return world;
}

bool is_told(const PartialStateOptions& options) { return options.process_group || options.rank; }

World find_world(const PartialStateOptions& options, const Environment& environment) {
  check_told(options);
  World world = is_told(options) ? told_world(options, environment) : detect_world(environment);
  if (options.local_rank) world.local_rank = options.local_rank;
  if (options.local_world_size) world.local_size = options.local_world_size;
  check_place(world);
  return world;
}

// Two hosts may have one name (containers), but not the same boot.
std::string host_and_boot() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  std::getline(file, boot);
  return str(this_host_name(), "/", boot);
}

Roster roster_of(const DefaultGroup& group) {
  return {group.store, group.world.rank, group.world.size, group.timeout};
}

// Said also by a process that knows its own place: another one may ask.
void say_host(const DefaultGroup& group) {
  if (!group.store || group.world.size == 1) return;
  roster_of(group).publish(str("host/", group.world.rank), host_and_boot());
}

// Fills in a place on the host that no variable gives, by comparing hosts.
void find_locality(DefaultGroup& group) {
  World& world = group.world;
  say_host(group);
  if (world.local_rank && world.local_size) return;
  if (world.size == 1 || !group.store) {
    if (!world.local_rank) world.local_rank = 0;
    if (world.size == 1) world.local_size = 1;
    return;
  }
  const Locality locality = locality_of(world.rank, roster_of(group).read_all("host"));
  if (!world.local_rank) world.local_rank = locality.local_rank;
  if (!world.local_size) world.local_size = locality.local_size;
  if (!world.num_nodes) world.num_nodes = locality.num_nodes;
  if (!world.node_rank) world.node_rank = locality.node_rank;
}

bool fsdp_touches_the_cpu(const Environment& environment) {
  return environment.flag("ACCELERATE_USE_FSDP") &&
         (environment.flag("FSDP_OFFLOAD_PARAMS") ||
          environment.get("FSDP_STATE_DICT_TYPE") == "FULL_STATE_DICT");
}

void refuse_sagemaker(const Environment& environment) {
  if (!environment.flag("ACCELERATE_USE_SAGEMAKER")) return;
  if (environment.get("ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE") == "NO") return;
  throw UnsupportedError(
      "ACCELERATE_USE_SAGEMAKER asks for SageMaker's data parallelism, which exists for Python "
      "only. Unset it and start the program with `accelerate launch`, torchrun, mpirun or srun.");
}

c10::Device parse_device(const std::string& text) {
  try {
    return c10::Device(text);
  } catch (const c10::Error& error) {
    throw ConfigError(str("ACCELERATE_TORCH_DEVICE is '", text,
                          "', which is not a device. Examples: cpu, cuda, cuda:1."));
  }
}

c10::Device device_of(DistributedType type, int index) {
  const auto at_index = [&](c10::DeviceType kind) {
    return c10::Device(kind, static_cast<c10::DeviceIndex>(index));
  };
  if (type == DistributedType::kMultiCpu) return at_index(c10::kCPU);
  if (type == DistributedType::kMultiGpu) return at_index(c10::kCUDA);
  if (type == DistributedType::kMultiXpu) return at_index(c10::kXPU);
  return at_index(c10::kPrivateUse1);
}

void choose_device(PartialFacts& facts, const BackendChoice& choice,
                   const Environment& environment) {
  if (const auto text = environment.get("ACCELERATE_TORCH_DEVICE")) {
    facts.device = parse_device(*text);
    return;
  }
  if (facts.type == DistributedType::kNo) {
    facts.device = choice.cpu ? c10::Device(c10::kCPU) : choose_default_device();
    return;
  }
  facts.device = device_of(facts.type, choice.device_index);
  auto* backend = accelerator_backend();
  if (backend != nullptr && facts.device.type() == backend->type()) {
    backend->set_device(facts.device.index());
  }
}

void require_direct_links_or_none(const PartialFacts& facts, const Environment& environment) {
  if (!facts.device.is_cuda() || check_cuda_p2p_ib_support()) return;
  if (environment.contains("NCCL_P2P_DISABLE") && environment.contains("NCCL_IB_DISABLE")) return;
  throw UnsupportedError(
      "GPUs of the RTX 40 family with this driver cannot talk to one another directly. Set "
      "NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1, start with `accelerate launch`, which does, or "
      "install driver 550.40.07 or newer.");
}

// The address by which the peers reach this host; "" lets Gloo choose.
std::string own_address(const DefaultGroup& group) {
  const World& world = group.world;
  if (world.local_size == world.size || is_loopback(world.master_addr)) return "127.0.0.1";
  if (!world.master_addr.empty()) {
    if (auto own = address_towards(world.master_addr); !own.empty()) return own;
    // On the host of rank 0 its name may lead to 127.0.1.1, by which other hosts do not find it.
    const auto addresses = interface_addresses();
    return addresses.empty() ? "" : addresses.front();
  }
  // The program brought its own meeting point: take the way to a host of rank 0.
  const Roster roster = roster_of(group);
  if (world.rank == 0) roster.publish("addresses", join(interface_addresses(), " "));
  for (const auto& address : detail::split(roster.read("addresses", 0), ' ')) {
    if (auto own = address_towards(address); !own.empty()) return own;
  }
  return "";
}

// Python's: a rank that hangs in NCCL keeps a GPU busy, so it is given up earlier.
std::chrono::milliseconds default_timeout(const std::string& backend) {
  return uses_nccl(backend) ? std::chrono::minutes(10) : std::chrono::minutes(30);
}

// Until the backend is known.
std::chrono::milliseconds timeout_of_meeting(const PartialStateOptions& options) {
  return options.timeout.value_or(meeting_timeout().value_or(default_timeout("")));
}

c10::intrusive_ptr<c10d::Store> meet_the_others(const PartialStateOptions& options,
                                                const World& world,
                                                const Environment& environment) {
  handle_uncaught_exceptions();
  Rendezvous rendezvous{.rank = world.rank,
                        .world_size = world.size,
                        .timeout = timeout_of_meeting(options),
                        .attempt = world.restarts,
                        .listen_fd = environment.get(kListenFdVariable).value_or("")};
  if (options.store) return meet_at(options.store.get(), rendezvous);
  rendezvous.init_method = options.init_method.value_or(kDefaultInitMethod);
  if (rendezvous.init_method == kDefaultInitMethod) {
    if (const auto file = environment.get("ACCELERATE_DEBUG_RDV_FILE")) {
      rendezvous.init_method = str("file://", *file);
    } else {
      if (world.master_addr.empty()) {
        throw ConfigError(
            "MASTER_ADDR is missing: rank and world_size say who this process is, but not where "
            "the others are. Set it, or give init_method or store.");
      }
      const bool is_ipv6 = world.master_addr.find(':') != std::string::npos;
      rendezvous.init_method = str("tcp://", is_ipv6 ? "[" : "", world.master_addr,
                                   is_ipv6 ? "]" : "", ":", world.master_port);
      rendezvous.served_elsewhere = world.agent_store;
    }
  }
  return meet(rendezvous);
}

// A store with no keys of earlier states in it. All processes make their states in the same order,
// so they agree on the number.
c10::intrusive_ptr<c10d::Store> fresh(c10::intrusive_ptr<c10d::Store> store) {
  static int states = 0;  // under the lock of the slot
  return c10::make_intrusive<c10d::PrefixStore>(str("state_", ++states), std::move(store));
}

DefaultGroup adopt(const PartialStateOptions& options, const World& world) {
  const auto& group = options.process_group.get();
  DefaultGroup adopted{
      .group = group, .lent = true, .world = world, .timeout = timeout_of_meeting(options)};
  if (auto store = group->getStore()) {
    adopted.store =
        fresh(c10::make_intrusive<c10d::PrefixStore>("accelerate/lent", std::move(store)));
  }
  adopted.backend = group->getBackendName();
  return adopted;
}

// For Python programs and our own children, which look for these names, with every launcher.
void export_world(const World& world) {
  set_process_variable("RANK", str(world.rank));
  set_process_variable("WORLD_SIZE", str(world.size));
  if (world.local_rank) set_process_variable("LOCAL_RANK", str(*world.local_rank));
  if (world.local_size) set_process_variable("LOCAL_WORLD_SIZE", str(*world.local_size));
  set_process_variable("MASTER_ADDR", world.master_addr);
  set_process_variable("MASTER_PORT", str(world.master_port));
}

// One process per core would be one process per host's worth of threads each: share them out.
void share_out_threads(const World& world, std::vector<std::string>& warnings) {
  if (!world.local_size) return;
  const int threads = threads_per_process(physical_core_count(), *world.local_size);
  at::set_num_threads(threads);
  warnings.push_back(str("OMP_NUM_THREADS is not set: each process computes with ", threads,
                         threads == 1 ? " thread" : " threads",
                         ", its share of the cores. Set it "
                         "to choose another number."));
}

// Debug mode adds collectives: all processes must be in it, or none.
bool agree_on_debug(bool wanted, const DefaultGroup& group, std::vector<std::string>& warnings) {
  const World& world = group.world;
  if (world.size == 1 || !group.store) return wanted;
  const auto word = [](bool on) { return on ? "on" : "off"; };
  const Roster roster = roster_of(group).under("debug");
  roster.publish(str("wanted/", world.rank), word(wanted));
  if (world.rank != 0) {
    const bool agreed = roster.read("agreed", 0) == word(true);
    roster.publish(str("seen/", world.rank), word(agreed));
    return agreed;
  }
  std::vector<int> without;
  const auto wishes = roster.read_all("wanted");
  for (int rank = 0; rank < world.size; ++rank) {
    if (wishes[rank] != word(true)) without.push_back(rank);
  }
  const bool any = without.size() < wishes.size();
  if (any && !without.empty()) {
    warnings.push_back(str("ACCELERATE_DEBUG_MODE is on for some processes but not for rank ",
                           join(without, ", rank "), ": it is now on for all."));
  }
  roster.publish("agreed", word(any));
  // This rank may serve the store, and its program may end right after: the others must have read
  // what they need.
  roster.await_each("seen", 1);
  return any;
}

// Where the group comes from: an earlier state, the host program, or (still without `group`) the
// variables of a launcher. `watch` is set before other processes are waited for.
DefaultGroup find_group(const PartialStateOptions& options, const Environment& environment,
                        std::optional<StartupWatch>& watch) {
  if (default_group().group && !options.process_group) {
    default_group().owner.refuse_forked_copy("a new state in the same process group");
    DefaultGroup found = default_group();
    if (found.store) found.store = fresh(found.store);
    return found;
  }
  const World world = find_world(options, environment);
  if (options.process_group) return adopt(options, world);
  if (world.size > 1) watch.emplace(world.rank, world.size);
  DefaultGroup group{.world = world,
                     .timeout = timeout_of_meeting(options),
                     .init_method = options.init_method.value_or(kDefaultInitMethod),
                     .told_store = options.store ? options.store.get().get() : nullptr};
  // Who shares this host has to be known before device and backend are chosen.
  if (world.size > 1 && !(world.local_rank && world.local_size)) {
    group.store = meet_the_others(options, world, environment);
  }
  return group;
}

BackendChoice choose(const PartialStateOptions& options, const DefaultGroup& group,
                     const Environment& environment) {
  const World& world = group.world;
  const Accelerator accelerator = find_accelerator();
  BackendChoice choice =
      choose_backend({.launched = world.source != WorldSource::kAlone,
                      .num_processes = world.size,
                      .local_rank = world.local_rank.value_or(0),
                      .local_size = world.local_size,
                      .cpu = options.cpu || environment.flag("ACCELERATE_USE_CPU"),
                      .accelerator = accelerator.name,
                      .device_count = accelerator.count,
                      .backend = group.group ? std::nullopt : options.backend,
                      .collectives_on_cpu_too = fsdp_touches_the_cpu(environment)});
  if (group.group && choice.type != DistributedType::kNo) {
    // The group is there and has its backend; only the device was to be chosen.
    choice.backend = group.backend;
    choice.warning.clear();
  }
  return choice;
}

void join_group(DefaultGroup& group, const PartialStateOptions& options, PartialFacts& facts,
                const Environment& environment) {
  group.timeout = facts.timeout;
  if (group.group) return;
  group.backend = *facts.backend;
  if (!group.store) {
    group.store = meet_the_others(options, group.world, environment);
    say_host(group);
  }
  // Before the group starts threads of its own, which may read the environment.
  if (!is_told(options)) export_world(group.world);
  group.group = make_process_group(group.store, {.backend = group.backend,
                                                 .rank = group.world.rank,
                                                 .world_size = group.world.size,
                                                 .timeout = facts.timeout,
                                                 .device = facts.device,
                                                 .address = own_address(group)});
}

void place(PartialFacts& facts, const World& world) {
  facts.num_processes = world.size;
  facts.process_index = world.rank;
  facts.local_process_index = world.local_rank.value_or(0);
  facts.local_num_processes = world.local_size;
  facts.num_machines = world.num_nodes;
  if (!facts.num_machines && world.local_size && world.size % *world.local_size == 0) {
    facts.num_machines = world.size / *world.local_size;
  }
}

}  // namespace

c10::Device choose_default_device() {
  if (is_mps_available()) {
    set_process_variable("PYTORCH_ENABLE_MPS_FALLBACK", "1");
    return c10::Device(c10::kMPS);
  }
  const std::string name = find_accelerator().name;
  if (name.empty()) return c10::Device(c10::kCPU);
  if (name == "cuda") return c10::Device(c10::kCUDA);
  return c10::Device(name == "xpu" ? c10::kXPU : c10::kPrivateUse1);
}

void shut_down(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  try {
    group->shutdown();
  } catch (const c10::Error& error) {
    warn(str("the process group did not end well: ", error.what_without_backtrace()));
  }
}

Startup start_up(const PartialStateOptions& options) {
  const Environment environment = Environment::process();
  refuse_sagemaker(environment);
  const bool debug = environment.flag("ACCELERATE_DEBUG_MODE");
  const bool near_the_device = environment.flag("ACCELERATE_CPU_AFFINITY");
  std::optional<StartupWatch> watch;
  DefaultGroup group = find_group(options, environment, watch);
  find_locality(group);
  const BackendChoice choice = choose(options, group, environment);

  Startup startup{.facts = std::make_unique<PartialFacts>(), .warnings = {}};
  PartialFacts& facts = *startup.facts;
  if (!choice.warning.empty()) startup.warnings.push_back(choice.warning);
  facts.cpu = choice.cpu;
  facts.base_type = choice.type;
  facts.type = choice.type;
  facts.backend = choice.backend;
  facts.host_name = this_host_name();
  // A group that is there keeps the time it was made with.
  const bool kept = group.group && !group.lent;
  facts.timeout =
      options.timeout.value_or(kept ? group.timeout : default_timeout(choice.backend.value_or("")));
  facts.debug = debug;
  choose_device(facts, choice, environment);
  require_direct_links_or_none(facts, environment);
  // Read before the others wait for us: a wrong value is an error.
  const bool share_threads = choice.type == DistributedType::kMultiCpu && !default_group().group &&
                             !threads_are_chosen(environment);
  if (choice.type != DistributedType::kNo) {
    place(facts, group.world);
    join_group(group, options, facts, environment);
    facts.debug = agree_on_debug(debug, group, startup.warnings);
    if (share_threads) share_out_threads(group.world, startup.warnings);
  }
  if (near_the_device) set_numa_affinity(facts.local_process_index);
  // Nothing throws from here on.
  if (choice.type != DistributedType::kNo) default_group() = std::move(group);
  return startup;
}

}  // namespace accelerate::detail::state
