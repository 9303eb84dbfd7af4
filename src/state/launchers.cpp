#include "accelerate/launchers.h"

#include <ATen/Parallel.h>
#include <sys/mman.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <optional>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "accelerate/checks.h"
#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "accelerate/state.h"
#include "core/launch_children.h"
#include "core/log.h"
#include "core/ports.h"
#include "core/process_variables.h"
#include "core/text.h"
#include "core/world.h"
#include "state/process_group.h"

namespace accelerate::detail::state {
namespace {

// The file that the ranks of a debug launch meet at. It has no name on any disk, so that nothing is
// left of it however the launch ends; the processes open it through the descriptor they inherit.
class MeetingFile {
 public:
  MeetingFile() : fd_(::memfd_create("accelerate-store", MFD_CLOEXEC)) {
    if (fd_ >= 0) return;
    throw Error(
        str("debug_launcher: no file could be made in memory for the processes to meet at: ",
            std::generic_category().message(errno), "."));
  }
  ~MeetingFile() { ::close(fd_); }
  MeetingFile(const MeetingFile&) = delete;
  MeetingFile& operator=(const MeetingFile&) = delete;

  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] std::string path() const { return str("/proc/self/fd/", fd_); }

 private:
  int fd_;
};

// Divides the cores among the processes, unless the user has set OMP_NUM_THREADS.
std::optional<int> threads_for(int num_processes) {
  if (threads_are_chosen(Environment::process())) return std::nullopt;
  return threads_per_process(physical_core_count(), num_processes);
}

struct WorldShape {
  int num_nodes = 1;
  int processes_per_node = 1;

  [[nodiscard]] int size() const { return num_nodes * processes_per_node; }
};

// The variables of every child. A launcher may itself run below another one, whose variables are
// removed.
VariableChanges common_variables(const ChildPlace& place, const WorldShape& world,
                                 std::optional<int> threads) {
  VariableChanges variables = {
      {"RANK", str(place.rank)},
      {"WORLD_SIZE", str(world.size())},
      {"LOCAL_RANK", str(place.local_rank)},
      {"LOCAL_WORLD_SIZE", str(world.processes_per_node)},
      {"GROUP_RANK", str(place.rank / world.processes_per_node)},
      {"GROUP_WORLD_SIZE", str(world.num_nodes)},
      {"FORK_LAUNCHED", "1"},
      {"ACCELERATE_DEBUG_RDV_FILE", std::nullopt},
      {kListenFdVariable, std::nullopt},
      {"TORCHELASTIC_USE_AGENT_STORE", std::nullopt},
      {"TORCHELASTIC_RESTART_COUNT", std::nullopt},
  };
  if (threads) variables.emplace_back("OMP_NUM_THREADS", str(*threads));
  return variables;
}

// A forked copy has read OMP_NUM_THREADS already, so the threads are set in LibTorch. The group is
// ended here: `destroy_process_group` does not end it in processes of a launcher.
std::function<void()> in_child(const std::function<void()>& f, std::optional<int> threads) {
  return [&f, threads] {
    if (threads) at::set_num_threads(*threads);
    f();
    if (!PartialState::initialized()) return;
    PartialState state;
    if (state.process_group()) state.destroy_process_group(state.process_group());
  };
}

void refuse_existing_state(const std::string& launcher, StartMethod method) {
  if (method == StartMethod::kFork && PartialState::initialized()) {
    throw StateError(str(launcher,
                         ": this process has a PartialState already, and its copies would take "
                         "themselves for it. Make it inside the function, or use "
                         "StartMethod::kSpawn."));
  }
}

// Looks at device files only: NVML starts a thread and CUDA cannot be used after a fork, so a
// process that has asked either cannot be copied any more.
bool gpu_may_be_used() {
  if (parse_flag_from_env("ACCELERATE_USE_CPU")) return false;
  const Environment environment = Environment::process();
  const auto visible = environment.variables().find("CUDA_VISIBLE_DEVICES");
  if (visible != environment.variables().end()) {
    const auto text = trim(visible->second);
    if (text.empty() || text == "-1") return false;
  }
  std::error_code ignored;
  return std::filesystem::exists("/dev/nvidia0", ignored) ||
         std::filesystem::exists("/dev/nvidiactl", ignored) ||
         std::filesystem::exists("/dev/dxg", ignored);
}

// NCCL must not use direct paths between GPUs that have none. Checked in the child because NVML is
// needed.
void avoid_missing_peer_access() {
  if (check_cuda_p2p_ib_support()) return;
  set_process_variable("NCCL_P2P_DISABLE", "1");
  set_process_variable("NCCL_IB_DISABLE", "1");
}

// Where rank 0 serves the store. Its launcher holds the port from now on.
struct Endpoint {
  std::string host;
  int port = 0;
  std::optional<ReservedPort> reserved = std::nullopt;
};

int parse_port(const std::string& text, const std::string& source) {
  const bool digits = !text.empty() && text.size() <= 5 &&
                      text.find_first_not_of("0123456789") == std::string::npos;
  const int port = digits ? std::stoi(text) : -1;
  if (port < 0 || port > 65535) {
    throw ConfigError(str("notebook_launcher: ", source, " is '", text,
                          "', which is not a port. Give a number from 0 to 65535; 0 takes a free "
                          "one."));
  }
  return port;
}

// The name in "host", "host:port" and "[::1]:port", and the port behind it, 0 for none.
std::pair<std::string, int> parse_endpoint(const std::string& text) {
  const auto bracket = text.rfind(']');
  const auto colon = text.rfind(':');
  const bool has_port =
      colon != std::string::npos && (bracket == std::string::npos || colon > bracket);
  std::string host = has_port ? text.substr(0, colon) : text;
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  return {host, has_port ? parse_port(text.substr(colon + 1), "rdzv_endpoint's port") : 0};
}

// `c10d` lets the launchers agree on a port of their own, and there is only one of them.
Endpoint endpoint_of(const NotebookLaunchOptions& options) {
  Endpoint endpoint{.host = options.master_addr};
  if (!options.rdzv_endpoint.empty()) {
    std::tie(endpoint.host, endpoint.port) = parse_endpoint(options.rdzv_endpoint);
  } else if (options.rdzv_backend == "static") {
    endpoint.port = parse_port(options.use_port, "use_port");
  }
  if (options.num_nodes > 1 && endpoint.port == 0) {
    throw ConfigError(
        "notebook_launcher: a launch on several machines needs a port that all of them know. Give "
        "the same use_port, such as \"29500\", on each.");
  }
  if (options.node_rank != 0) return endpoint;
  endpoint.reserved.emplace(endpoint.port);  // throws if the port is in use
  endpoint.port = endpoint.reserved->port();
  return endpoint;
}

bool is_timeout(const std::string& key) { return key == "timeout" || key == "join_timeout"; }

// The others configure elastic rendezvous, which a static one does not need.
void check_rendezvous_keys(const NotebookLaunchOptions& options) {
  const std::vector<std::string> known = {"timeout",       "join_timeout", "last_call_timeout",
                                          "close_timeout", "read_timeout", "rank"};
  for (const auto& [key, text] : options.rdzv_conf) {
    if (std::ranges::find(known, key) == known.end()) {
      throw ConfigError(str("notebook_launcher: rdzv_conf has no setting '", key,
                            "'. There are: ", join(known), "."));
    }
    if (is_timeout(key)) continue;
    warn_once(str("notebook_launcher: rdzv_conf's ", key, " is '", text,
                  "', which has no effect: only timeout and join_timeout count here. Leave it "
                  "out."));
  }
}

// How long the processes wait for each other: by rdzv_conf, else torch's default for several
// machines, else that of the state.
std::optional<std::chrono::milliseconds> timeout_of(const NotebookLaunchOptions& options) {
  std::optional<std::chrono::milliseconds> timeout;
  if (options.num_nodes > 1) timeout = std::chrono::seconds(900);
  for (const auto& [key, text] : options.rdzv_conf) {
    if (!is_timeout(key)) continue;
    char* end = nullptr;
    const double seconds = std::strtod(text.c_str(), &end);
    if (text.empty() || *end != '\0' || !(seconds > 0) || seconds > 1e7) {
      throw ConfigError(str("notebook_launcher: rdzv_conf's ", key, " is '", text,
                            "', which is not a positive number of seconds."));
    }
    timeout = std::chrono::ceil<std::chrono::milliseconds>(std::chrono::duration<double>(seconds));
  }
  return timeout;
}

void check(const NotebookLaunchOptions& options) {
  if (!options.num_processes) {
    throw ConfigError(
        "notebook_launcher: num_processes is not given. Say how many processes shall run, such as "
        "{.num_processes = 2}.");
  }
  if (*options.num_processes < 1) {
    throw ConfigError(str("notebook_launcher: num_processes is ", *options.num_processes,
                          "; at least one process is needed."));
  }
  if (options.node_rank >= options.num_nodes || options.node_rank < 0) {
    throw ConfigError(str("notebook_launcher: node_rank is ", options.node_rank,
                          ", which must be less than the number of nodes (", options.num_nodes,
                          ") and not negative."));
  }
  if (options.rdzv_backend != "static" && options.rdzv_backend != "c10d") {
    throw ConfigError(str("notebook_launcher: rdzv_backend is '", options.rdzv_backend,
                          "'. Choose one of: static, c10d."));
  }
  if (!std::isfinite(options.monitor_interval) || options.monitor_interval <= 0) {
    throw ConfigError(str("notebook_launcher: monitor_interval is ", options.monitor_interval,
                          " seconds; it must be positive."));
  }
  if (options.max_restarts < 0) {
    throw ConfigError(str("notebook_launcher: max_restarts is ", options.max_restarts,
                          "; it must not be negative."));
  }
  check_rendezvous_keys(options);
  static_cast<void>(timeout_of(options));
  if (options.num_nodes == 1) return;
  if (options.rdzv_backend == "c10d") {
    throw UnsupportedError(
        "notebook_launcher: on several machines rdzv_backend must be 'static'. For 'c10d' start "
        "the program with `accelerate launch --rdzv_backend c10d` on each machine.");
  }
  if (options.max_restarts > 0) {
    throw UnsupportedError(
        str("notebook_launcher: max_restarts is ", options.max_restarts, " on ", options.num_nodes,
            " machines, whose launchers would have to restart together. Start the program with "
            "`accelerate launch --max_restarts ",
            options.max_restarts, "` on each machine."));
  }
}

VariableChanges notebook_variables(const NotebookLaunchOptions& options, const Endpoint& endpoint,
                                   const ChildPlace& place, VariableChanges variables) {
  const auto precision = to_string(options.mixed_precision);
  const VariableChanges own = {{"NPROC", str(*options.num_processes)},
                               {"NODE_RANK", str(options.node_rank)},
                               {"MASTER_ADDR", endpoint.host},
                               {"MASTER_PORT", str(endpoint.port)},
                               {"ACCELERATE_MIXED_PRECISION", precision},
                               {"MIXED_PRECISION", precision},
                               {"TORCHELASTIC_RUN_ID", options.rdzv_id},
                               {"TORCHELASTIC_RESTART_COUNT", str(place.attempt)},
                               {"TORCHELASTIC_MAX_RESTARTS", str(options.max_restarts)}};
  variables.insert(variables.end(), own.begin(), own.end());
  return variables;
}

void run_in_place(const NotebookLaunchOptions& options, const std::function<void()>& f) {
  const auto precision = to_string(options.mixed_precision);
  auto patched = patch_environment(
      {{"ACCELERATE_MIXED_PRECISION", precision}, {"MIXED_PRECISION", precision}});
  if (is_mps_available()) {
    set_process_variable("PYTORCH_ENABLE_MPS_FALLBACK", "1");
    std::cout << "Launching training on MPS." << std::endl;
  } else if (is_cuda_available()) {
    std::cout << "Launching training on one GPU." << std::endl;
  } else if (is_xpu_available()) {
    std::cout << "Launching training on one XPU." << std::endl;
  } else {
    std::cout << "Launching training on CPU." << std::endl;
  }
  f();
}

}  // namespace

void Launch::debug(const DebugLaunchOptions& options, const std::function<void()>& f) {
  const int n = options.num_processes;
  if (n < 1) {
    throw ConfigError(
        str("debug_launcher: num_processes is ", n, "; at least one process is needed."));
  }
  refuse_existing_state("debug_launcher", options.start_method);
  const auto threads = threads_for(n);
  // Made by the launching process only, not by the processes it starts.
  std::optional<MeetingFile> file;
  if (!on_the_way_to_a_launcher()) file.emplace();
  ChildrenOptions children{.launcher = "debug_launcher",
                           .num_processes = n,
                           .start_method = options.start_method,
                           .where = options.where,
                           .variables = {}};
  if (file) children.inherit = {file->fd()};
  children.variables = [&](const ChildPlace& place) {
    auto variables = common_variables(place, {.processes_per_node = n}, threads);
    const VariableChanges own = {
        {"MASTER_ADDR", "127.0.0.1"},         {"MASTER_PORT", "29500"},
        {"ACCELERATE_MIXED_PRECISION", "no"}, {"ACCELERATE_DEBUG_RDV_FILE", file->path()},
        {"ACCELERATE_USE_CPU", "yes"},        {"GLOO_SOCKET_IFNAME", "lo"}};
    variables.insert(variables.end(), own.begin(), own.end());
    return variables;
  };
  launch_children(children, in_child(f, threads));
}

void Launch::notebook(const NotebookLaunchOptions& options, const std::function<void()>& f) {
  check(options);
  const WorldShape world{.num_nodes = options.num_nodes,
                         .processes_per_node = *options.num_processes};
  if (world.size() == 1) {
    // A process that was started for a later launcher skips this one.
    if (!on_the_way_to_a_launcher()) run_in_place(options, f);
    return;
  }
  if (AcceleratorState::initialized()) {
    throw StateError(
        "notebook_launcher: this process has an Accelerator already. To launch several processes, "
        "make it inside the function that is launched.");
  }
  refuse_existing_state("notebook_launcher", options.start_method);

  const bool gpu = gpu_may_be_used();
  const auto threads = gpu ? std::nullopt : threads_for(world.processes_per_node);
  // A process on its way to a launcher starts nothing: it must not look for a port either.
  const Endpoint endpoint = on_the_way_to_a_launcher() ? Endpoint{} : endpoint_of(options);
  ChildrenOptions children{
      .launcher = "notebook_launcher",
      .num_processes = world.processes_per_node,
      .first_rank = options.node_rank * world.processes_per_node,
      .start_method = options.start_method,
      .where = options.where,
      .variables = {},
      .log_line_prefix_template = options.log_line_prefix_template,
      .monitor_interval = std::chrono::ceil<std::chrono::milliseconds>(
          std::chrono::duration<double>(std::min(options.monitor_interval, 3600.0)))};
  if (endpoint.reserved) children.listen_fd = endpoint.reserved->fd();
  children.variables = [&](const ChildPlace& place) {
    auto variables = common_variables(place, world, threads);
    if (!gpu) variables.emplace_back("ACCELERATE_USE_CPU", "yes");
    return notebook_variables(options, endpoint, place, std::move(variables));
  };
  const auto prepare = [&] {
    meeting_timeout() = timeout_of(options);
    if (gpu) avoid_missing_peer_access();
  };
  if (Environment::process().flag("ACCELERATE_DEBUG_MODE")) {
    // A launch without work: a failure here is caused by the machine, not by the function.
    const std::function<void()> meet = [&] {
      prepare();
      PartialState state;
    };
    launch_children(children, in_child(meet, threads));
  }
  if (!on_the_way_to_a_launcher()) {
    const int n = world.processes_per_node;
    std::cout << "Launching training on " << n << (gpu ? " GPU" : " CPU process")
              << (n == 1 ? "."
                  : gpu  ? "s."
                         : "es.")
              << std::endl;
  }
  const std::function<void()> train = [&] {
    prepare();
    f();
  };
  children.max_restarts = options.max_restarts;
  launch_children(children, in_child(train, threads));
}

}  // namespace accelerate::detail::state
