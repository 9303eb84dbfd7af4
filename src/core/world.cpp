#include "core/world.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <climits>
#include <limits>
#include <map>

#include "accelerate/errors.h"
#include "core/subprocess.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

// The names under which one launcher tells a process its place.
struct Family {
  WorldSource source;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};

constexpr Family kTorchrunFamily{WorldSource::kTorchrun, "RANK", "WORLD_SIZE", "LOCAL_RANK",
                                 "LOCAL_WORLD_SIZE"};
constexpr std::array<Family, 3> kMpiFamilies{{
    {WorldSource::kMpich, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {WorldSource::kOpenMpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {WorldSource::kMvapich, "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
     "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"},
}};
constexpr Family kSlurmFamily{WorldSource::kSlurm, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS",
                              "SLURM_LOCALID", nullptr};

// Slurm numbers what is no step of srun (the batch script, the interactive shell) from the end.
constexpr std::int64_t kFirstSpecialStep = 0xFFFFFFF0;

// A number and the variable it came from, for messages.
struct Known {
  int value = 0;
  std::string name;
};

class Detector {
 public:
  Detector(const Environment& environment, const WorldLookups& lookups)
      : env_(environment), lookups_(lookups) {}

  World run() {
    const auto families = present_families();
    if (families.empty()) return {};
    World world;
    world.source = families.front().source;
    place(world, families);
    // One process needs no rendezvous, unless LOCAL_RANK shows that a launcher made a group.
    if (world.size == 1 && !number("LOCAL_RANK")) return {};
    meeting_point(world);
    locality(world, families);
    world.agent_store = env_.get("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
    world.restarts = number("TORCHELASTIC_RESTART_COUNT").value_or(Known{}).value;
    return world;
  }

 private:
  // Negative counts as absent: LOCAL_RANK=-1 is how programs say "not distributed".
  std::optional<Known> number(const char* name) const {
    if (name == nullptr) return std::nullopt;
    const std::int64_t value = env_.integer({std::string(name)}, -1);
    if (value < 0) return std::nullopt;
    if (value > std::numeric_limits<int>::max()) {
      throw ConfigError(str(name, " is ", value, ", which is more than any run has."));
    }
    return Known{static_cast<int>(value), name};
  }

  // The launchers that left variables here, the one to trust most first.
  std::vector<Family> present_families() const {
    std::vector<Family> present;
    if (torchrun_is_present()) present.push_back(kTorchrunFamily);
    for (const Family& family : kMpiFamilies) {
      if (number(family.rank) || number(family.size)) present.push_back(family);
    }
    if (slurm_step()) present.push_back(kSlurmFamily);
    return present;
  }

  bool torchrun_is_present() const {
    if (number("RANK") || number("LOCAL_RANK")) return true;
    // Containers often set WORLD_SIZE=1, which is no launch.
    const auto size = number("WORLD_SIZE");
    return size && size->value > 1;
  }

  std::optional<std::int64_t> slurm_step() const {
    const auto step = env_.get("SLURM_STEP_ID");
    // "batch", "extern", "interactive": the shell of a job, which starts its tasks itself.
    if (!step || !std::ranges::all_of(*step, [](char c) { return c >= '0' && c <= '9'; })) {
      return std::nullopt;
    }
    const std::int64_t id = env_.integer({std::string("SLURM_STEP_ID")}, -1);
    if (id < 0 || id >= kFirstSpecialStep) return std::nullopt;
    return id;
  }

  std::optional<Known> first(const std::vector<Family>& families,
                             const char* Family::* member) const {
    for (const Family& family : families) {
      if (auto known = number(family.*member)) return known;
    }
    return std::nullopt;
  }

  Known required(const std::vector<Family>& families, const char* Family::* member,
                 const char* Family::* found) const {
    if (auto known = first(families, member)) return *known;
    const Family& family = families.front();
    const auto other = first(families, found);
    const auto text = env_.get(family.*member);
    throw ConfigError(str(family.*member, text ? str(" is ", *text) : " is missing",
                          other ? str(" beside ", other->name, "=", other->value) : "",
                          text ? ", and must be 0 or more. Set it right (" : ". Set it as well (",
                          to_string(family.source),
                          " does), or remove its companions to run alone."));
  }

  void place(World& world, const std::vector<Family>& families) const {
    const Known rank =
        required(families, &Family::rank,
                 first(families, &Family::size) ? &Family::size : &Family::local_rank);
    const Known size = required(families, &Family::size, &Family::rank);
    if (size.value < 1) throw ConfigError(str(size.name, " is 0. A run has at least one process."));
    if (rank.value >= size.value) {
      throw ConfigError(str(rank.name, " is ", rank.value, ", but ", size.name, " is ", size.value,
                            ": ranks go from 0 to ", size.value - 1, "."));
    }
    world.rank = rank.value;
    world.size = size.value;
    if (const auto local_size = first(families, &Family::local_size)) {
      check_local_size(*local_size, size);
      world.local_size = local_size->value;
    }
    if (const auto node = number("GROUP_RANK")) world.node_rank = node->value;
    if (const auto nodes = number("GROUP_WORLD_SIZE")) world.num_nodes = nodes->value;
    if (placed_by_slurm(world)) slurm_place(world);
  }

  static void check_local_size(const Known& local_size, const Known& size) {
    if (local_size.value >= 1 && local_size.value <= size.value) return;
    throw ConfigError(str(local_size.name, " is ", local_size.value, ", but ", size.name, " is ",
                          size.value, ": a host has at least one and at most all processes."));
  }

  // mpirun inside a job runs its daemons, not our processes, as Slurm tasks. srun with PMI sets
  // both, with the same numbers.
  bool placed_by_slurm(const World& world) const {
    if (!slurm_step()) return false;
    const auto rank = number(kSlurmFamily.rank);
    const auto size = number(kSlurmFamily.size);
    return rank && size && rank->value == world.rank && size->value == world.size;
  }

  void slurm_place(World& world) const {
    if (const auto node = number("SLURM_NODEID"); node && !world.node_rank) {
      world.node_rank = node->value;
    }
    if (const auto nodes = number("SLURM_STEP_NUM_NODES"); nodes && !world.num_nodes) {
      world.num_nodes = nodes->value;
    }
    const auto counts = env_.get("SLURM_STEP_TASKS_PER_NODE");
    if (!world.local_size && world.node_rank && counts) {
      world.local_size = tasks_on_node(*counts, *world.node_rank);
    }
  }

  void meeting_point(World& world) const {
    if (const auto port = number("MASTER_PORT")) {
      if (port->value > 65535) {
        throw ConfigError(str("MASTER_PORT is ", port->value, ". Ports go from 0 to 65535."));
      }
      world.master_port = port->value;
    } else if (placed_by_slurm(world)) {
      const std::int64_t job = env_.integer({"SLURM_JOB_ID", "SLURM_JOBID"}, 0);
      world.master_port = port_for_step(job, slurm_step().value_or(0));
    }
    if (const auto address = env_.get("MASTER_ADDR")) {
      world.master_addr = *address;
    } else if (world.size > 1 && world.local_size != world.size && world.num_nodes != 1) {
      world.master_addr = placed_by_slurm(world) ? slurm_address(world) : no_address(world);
    }
  }

  [[noreturn]] static std::string no_address(const World& world) {
    throw ConfigError(str(
        "MASTER_ADDR is missing, and ", world.size, " processes cannot be known to run on one ",
        "host", world.local_size ? str(" (this one has ", *world.local_size, ")") : std::string(),
        ". Export the host name of rank 0 as MASTER_ADDR",
        world.source == WorldSource::kTorchrun ? ", or LOCAL_WORLD_SIZE for a single host." : "."));
  }

  std::string slurm_address(const World& world) const {
    const auto list = env_.get("SLURM_STEP_NODELIST");
    if (!list) {
      throw ConfigError(str("SLURM_STEP_NODELIST is missing beside SLURM_PROCID=", world.rank,
                            ": it tells where rank 0 is. Start with srun, or set MASTER_ADDR."));
    }
    std::string host = expand_hostlist(*list).front();
    if (lookups_.resolves && lookups_.resolves(host)) return host;
    if (lookups_.node_address) {
      if (const auto address = lookups_.node_address(host)) return *address;
    }
    throw ConfigError(str("The first host of SLURM_STEP_NODELIST=", *list, " is '", host,
                          "', which has no address here, and `scontrol show node ", host,
                          "` gives none. Set MASTER_ADDR to an address of that host."));
  }

  void locality(World& world, const std::vector<Family>& families) const {
    if (const auto local_rank = first(families, &Family::local_rank)) {
      check_local_rank(*local_rank, world);
      world.local_rank = local_rank->value;
    }
    if (!world.num_nodes && world.local_size && world.size % *world.local_size == 0) {
      world.num_nodes = world.size / *world.local_size;
    }
  }

  static void check_local_rank(const Known& local_rank, const World& world) {
    const int limit = world.local_size.value_or(world.size);
    if (local_rank.value < limit) return;
    throw ConfigError(str(local_rank.name, " is ", local_rank.value, ", but there are ", limit,
                          world.local_size ? " processes on this host" : " processes in all",
                          ": local ranks go from 0 to ", limit - 1, "."));
  }

  const Environment& env_;
  const WorldLookups& lookups_;
};

bool host_resolves(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return false;
  ::freeaddrinfo(found);
  return true;
}

std::optional<std::string> ask_slurm(const std::string& node) {
  const auto output = output_of({"scontrol", "--oneliner", "show", "node", node},
                                StreamTarget::kNull, std::chrono::seconds(30));
  return node_addr_from(output.value_or(""));  // "" without scontrol
}

}  // namespace

std::string to_string(WorldSource source) {
  static constexpr auto kNames =
      std::to_array<const char*>({"no launcher", "accelerate launch or torchrun", "Open MPI",
                                  "MPICH or Intel MPI", "MVAPICH", "srun"});
  return kNames.at(static_cast<std::size_t>(source));
}

WorldLookups WorldLookups::system() {
  return {.resolves = host_resolves, .node_address = ask_slurm};
}

World detect_world(const Environment& environment, const WorldLookups& lookups) {
  return Detector(environment, lookups).run();
}

int port_for_step(std::int64_t job_id, std::int64_t step_id) {
  // Linux takes ports for outgoing connections from 32768 on.
  constexpr std::uint64_t kFirst = 10000;
  constexpr std::uint64_t kCount = 32768 - kFirst;
  const auto mixed =
      static_cast<std::uint64_t>(job_id) * 7919U + static_cast<std::uint64_t>(step_id);
  return static_cast<int>(kFirst + mixed % kCount);
}

Locality locality_of(int rank, const std::vector<std::string>& host_of_rank) {
  const std::string& own = host_of_rank[static_cast<std::size_t>(rank)];
  Locality locality{.local_size = 0};
  std::vector<std::string> hosts;  // in the order of their first rank
  for (std::size_t i = 0; i < host_of_rank.size(); ++i) {
    const std::string& host = host_of_rank[i];
    if (std::ranges::find(hosts, host) == hosts.end()) hosts.push_back(host);
    if (host != own) continue;
    ++locality.local_size;
    if (i < static_cast<std::size_t>(rank)) ++locality.local_rank;
  }
  locality.num_nodes = static_cast<int>(hosts.size());
  locality.node_rank = static_cast<int>(std::ranges::find(hosts, own) - hosts.begin());
  return locality;
}

std::string this_host_name() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

bool is_loopback(std::string_view address) {
  return address == "localhost" || address == "::1" || address.starts_with("127.");
}

bool threads_are_chosen(const Environment& environment) {
  const std::string name = "OMP_NUM_THREADS";
  const auto text = environment.get(name);
  if (!text) return false;
  // Of a number per level, the outermost counts.
  const std::map<std::string, std::string> outermost{{name, split(*text, ',').front()}};
  return Environment(outermost).integer({name}, 0) >= 1;
}

int threads_per_process(int cores, int local_size) {
  return std::max(1, cores / std::max(1, local_size));
}

}  // namespace accelerate::detail::inline core
