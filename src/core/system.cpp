#include "core/system.h"

#include <sched.h>
#include <sys/utsname.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <iterator>
#include <set>
#include <system_error>
#include <thread>

#include "accelerate/checks.h"
#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "core/log.h"
#include "core/numbers.h"
#include "core/nvml.h"
#include "core/text.h"
#include "core/version.h"

namespace accelerate {
namespace detail::inline core {
namespace {

namespace fs = std::filesystem;

constexpr std::array<int, 3> kLeastKernel = {5, 5, 0};
// More CPUs than any kernel is built for: a range beyond it is a damaged text, not a machine.
constexpr int kMostCpus = 1 << 16;

constexpr std::string_view kDigits = "0123456789";

std::optional<std::string> read_line(const fs::path& file) {
  std::ifstream in(file);
  std::string line;
  if (!std::getline(in, line)) return std::nullopt;
  return line;
}

std::vector<int> read_cpulist(const fs::path& file) {
  const auto line = read_line(file);
  return line ? parse_cpulist(*line).value_or(std::vector<int>{}) : std::vector<int>{};
}

/// A kernel's CPU set of any size, as words of 64 bits; the fixed cpu_set_t ends at 1024.
using CpuWords = std::vector<std::uint64_t>;
cpu_set_t* as_set(CpuWords& words) { return reinterpret_cast<cpu_set_t*>(words.data()); }

std::optional<double> read_number(const fs::path& file) {
  const auto line = read_line(file);
  return line ? parse_number<double>(trim(*line)) : std::nullopt;  // "max" is no number
}

/// CPUs' worth of time; -1 is no limit.
std::optional<double> quotient(std::optional<double> quota, std::optional<double> period) {
  if (quota.value_or(0) <= 0 || period.value_or(0) <= 0) return std::nullopt;
  return *quota / *period;
}

std::optional<double> quota_of_v2(const fs::path& folder) {
  const auto line = read_line(folder / "cpu.max");  // "max 100000" or "150000 100000"
  const auto parts = split(trim(line.value_or("")), ' ');
  if (parts.size() != 2) return std::nullopt;
  return quotient(parse_number<double>(parts[0]), parse_number<double>(parts[1]));
}

std::optional<double> quota_of_v1(const fs::path& folder) {
  return quotient(read_number(folder / "cpu.cfs_quota_us"),
                  read_number(folder / "cpu.cfs_period_us"));
}

/// Up to three numbers with dots between them, at the start of a text that begins with a digit.
struct DottedNumbers {
  std::array<int, 3> numbers{};
  std::size_t count = 0;
};

DottedNumbers dotted_numbers(std::string_view text) {
  DottedNumbers result;
  while (result.count < 3 && !text.empty() &&
         kDigits.find(text.front()) != std::string_view::npos) {
    const auto length = std::min(text.find_first_not_of(kDigits), text.size());
    result.numbers[result.count++] = parse_number<int>(text.substr(0, length)).value_or(0);
    text.remove_prefix(length);
    if (!text.starts_with('.')) break;
    text.remove_prefix(1);
  }
  return result;
}

/// The least quota from `group` up to the root of the hierarchy mounted at `mount`. A container
/// often sees its own group mounted as the root under a path that does not exist: the way up finds
/// it.
template <class Read>
std::optional<double> least_quota(const fs::path& mount, std::string_view group, Read read) {
  std::optional<double> least;
  fs::path inner = fs::path(group).relative_path();
  for (;;) {
    if (const auto quota = read(mount / inner)) least = std::min(least.value_or(*quota), *quota);
    if (inner.empty()) return least;
    inner = inner.parent_path();
  }
}

/// The least that `read_v2` or `read_v1` gives for the cgroups of this process that a controller
/// has.
template <class ReadV2, class ReadV1>
std::optional<double> least_of_cgroups(const SystemRoot& root, std::string_view controller,
                                       ReadV2 read_v2, ReadV1 read_v1) {
  std::optional<double> least;
  const auto take = [&](std::optional<double> quota) {
    if (quota) least = std::min(least.value_or(*quota), *quota);
  };
  std::ifstream in(root.proc / "self/cgroup");  // "0::/a/b", "4:cpu,cpuacct:/a/b"
  for (std::string line; std::getline(in, line);) {
    const auto first = line.find(':');
    const auto second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const auto controllers = line.substr(first + 1, second - first - 1);
    const auto group = std::string_view(line).substr(second + 1);
    const auto mount = root.sys / "fs/cgroup";
    if (controllers.empty()) {
      take(least_quota(mount, group, read_v2));
    } else if (std::ranges::count(split(controllers, ','), controller) > 0) {
      take(least_quota(mount / controllers, group, read_v1));
      if (controllers != controller) take(least_quota(mount / controller, group, read_v1));
    }
  }
  return least;
}

/// Bytes below a limit. What the kernel can drop from the page cache at once is not in use.
std::optional<double> memory_below(const fs::path& folder, const char* limit_file,
                                   const char* usage_file) {
  const auto limit = read_number(folder / limit_file);
  const auto usage = read_number(folder / usage_file);
  if (!limit || !usage) return std::nullopt;
  double reclaimable = 0;
  std::ifstream stat(folder / "memory.stat");
  for (std::string line; std::getline(stat, line);) {
    const auto parts = split(line, ' ');
    if (parts.size() != 2 || !parts[0].ends_with("inactive_file")) continue;
    reclaimable = std::max(reclaimable, parse_number<double>(parts[1]).value_or(0));
  }
  return std::max(0.0, *limit - *usage + reclaimable);
}

}  // namespace

std::optional<std::vector<int>> parse_cpulist(std::string_view text) {
  std::vector<int> cpus;
  text = trim(text);
  if (text.empty()) return cpus;
  for (const auto& part : split(text, ',')) {
    const auto dash = part.find('-');
    const auto first = parse_number<int>(std::string_view(part).substr(0, dash));
    const auto last = dash == std::string::npos
                          ? first
                          : parse_number<int>(std::string_view(part).substr(dash + 1));
    if (!first || !last || *first < 0 || *last < *first || *last >= kMostCpus) return std::nullopt;
    for (int cpu = *first; cpu <= *last; ++cpu) cpus.push_back(cpu);
  }
  std::ranges::sort(cpus);
  cpus.erase(std::ranges::unique(cpus).begin(), cpus.end());
  return cpus;
}

std::string format_cpulist(std::span<const int> cpus, std::string_view separator) {
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < cpus.size();) {
    std::size_t last = i;
    while (last + 1 < cpus.size() && cpus[last + 1] == cpus[last] + 1) ++last;
    parts.push_back(last == i ? str(cpus[i]) : str(cpus[i], "-", cpus[last]));
    i = last + 1;
  }
  return join(parts, separator);
}

std::vector<int> cpus_of_words(std::span<const std::uint64_t> words) {
  std::vector<int> cpus;
  for (std::size_t word = 0; word < words.size(); ++word) {
    for (unsigned bit = 0; bit < 64; ++bit) {
      if ((words[word] >> bit & 1) != 0) cpus.push_back(static_cast<int>(word * 64 + bit));
    }
  }
  return cpus;
}

std::vector<int> intersection(std::span<const int> a, std::span<const int> b) {
  std::vector<int> both;
  std::ranges::set_intersection(a, b, std::back_inserter(both));
  return both;
}

std::vector<int> allowed_cpus() {
  // The kernel refuses a set smaller than its own, whatever this process may use: grow until it
  // fits.
  for (int most = 1024; most <= kMostCpus; most *= 2) {
    CpuWords words(static_cast<std::size_t>(most) / 64);
    if (::sched_getaffinity(0, words.size() * 8, as_set(words)) == 0) return cpus_of_words(words);
  }
  return {};
}

std::optional<std::string> restrict_to_cpus(std::span<const int> cpus) {
  if (cpus.empty()) return "there is no CPU among them";
  CpuWords words(static_cast<std::size_t>(cpus.back()) / 64 + 1);
  for (const int cpu : cpus)
    words[static_cast<std::size_t>(cpu) / 64] |= std::uint64_t{1} << cpu % 64;
  if (::sched_setaffinity(0, words.size() * 8, as_set(words)) == 0) return std::nullopt;
  return std::generic_category().message(errno);
}

std::vector<NumaNode> numa_nodes(const SystemRoot& root) {
  std::vector<NumaNode> nodes;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(root.sys / "devices/system/node", error)) {
    const auto name = entry.path().filename().string();
    if (!name.starts_with("node")) continue;
    const auto id = parse_number<int>(std::string_view(name).substr(4));
    if (!id) continue;
    auto cpus = read_cpulist(entry.path() / "cpulist");
    if (!cpus.empty()) nodes.push_back({*id, std::move(cpus)});  // memory-only nodes have none
  }
  std::ranges::sort(nodes, {}, &NumaNode::id);
  return nodes;
}

std::optional<std::vector<int>> cpus_of_turn(int local_process_index,
                                             std::span<const NumaNode> nodes,
                                             std::span<const int> allowed) {
  std::vector<std::vector<int>> usable;
  for (const auto& node : nodes) {
    if (auto cpus = intersection(node.cpus, allowed); !cpus.empty())
      usable.push_back(std::move(cpus));
  }
  if (usable.size() < 2 || local_process_index < 0) return std::nullopt;
  return usable[static_cast<std::size_t>(local_process_index) % usable.size()];
}

std::optional<std::string> pci_address(std::string_view text) {
  // domain:bus:device.function in hexadecimal digits.
  const auto parts = split(to_lower(trim(text)), ':');
  if (parts.size() != 3) return std::nullopt;
  const auto ends = split(parts[2], '.');
  if (ends.size() != 2) return std::nullopt;
  const auto is_hex = [](std::string_view digits, std::size_t least, std::size_t most) {
    return digits.size() >= least && digits.size() <= most &&
           digits.find_first_not_of("0123456789abcdef") == std::string_view::npos;
  };
  if (!is_hex(parts[0], 4, 8) || !is_hex(parts[1], 2, 2) || !is_hex(ends[0], 2, 2) ||
      !is_hex(ends[1], 1, 1)) {
    return std::nullopt;
  }
  // NVML pads the domain to eight digits, the kernel to four.
  auto domain = std::string_view(parts[0]);
  while (domain.size() > 4 && domain.front() == '0') domain.remove_prefix(1);
  return str(domain, ":", parts[1], ":", parts[2]);
}

std::vector<int> cpus_near_pci_device(std::string_view address, const SystemRoot& root) {
  const auto name = pci_address(address);
  if (!name) return {};
  return read_cpulist(root.sys / "bus/pci/devices" / *name / "local_cpulist");
}

std::optional<double> cgroup_cpu_quota(const SystemRoot& root) {
  return least_of_cgroups(root, "cpu", quota_of_v2, quota_of_v1);
}

std::int64_t available_memory(const SystemRoot& root) {
  double available = 0;
  std::ifstream in(root.proc / "meminfo");
  for (std::string line; std::getline(in, line);) {  // "MemAvailable:   123456 kB"
    if (!line.starts_with("MemAvailable:")) continue;
    const auto kib = split(trim(std::string_view(line).substr(13)), ' ').front();
    available = 1024 * parse_number<double>(kib).value_or(0);
  }
  const auto in_cgroups = least_of_cgroups(
      root, "memory",
      [](const fs::path& folder) { return memory_below(folder, "memory.max", "memory.current"); },
      [](const fs::path& folder) {
        return memory_below(folder, "memory.limit_in_bytes", "memory.usage_in_bytes");
      });
  return static_cast<std::int64_t>(std::min(available, in_cgroups.value_or(available)));
}

int count_physical_cores(std::span<const int> cpus, std::optional<double> quota,
                         const SystemRoot& root) {
  std::set<std::vector<int>> cores;
  for (const int cpu : cpus) {
    const auto topology = root.sys / "devices/system/cpu" / str("cpu", cpu) / "topology";
    auto threads = read_cpulist(topology / "core_cpus_list");
    if (threads.empty()) threads = read_cpulist(topology / "thread_siblings_list");  // before 5.3
    if (threads.empty()) threads = {cpu};
    cores.insert(std::move(threads));
  }
  double count = static_cast<double>(cores.size());
  if (quota) count = std::min(count, std::ceil(*quota));
  return std::max(1, static_cast<int>(count));
}

std::optional<std::array<int, 3>> kernel_version(std::string_view release) {
  // The first N.N.N counts, as in Python; where there is none, the first number and what follows
  // it.
  std::optional<std::array<int, 3>> shorter;
  for (auto start = release.find_first_of(kDigits); start != std::string_view::npos;) {
    const auto version = dotted_numbers(release.substr(start));
    if (version.count == 3) return version.numbers;
    if (!shorter) shorter = version.numbers;
    start = release.find_first_not_of(kDigits, start);
    start = release.find_first_of(kDigits, start);
  }
  return shorter;
}

std::optional<std::string> kernel_warning(std::string_view release) {
  const auto version = kernel_version(release);
  if (!version || *version >= kLeastKernel) return std::nullopt;
  return str("The kernel of this machine has version ", join(*version, "."), ". Before ",
             join(kLeastKernel, "."),
             " runs of several processes have been seen to hang: upgrade the kernel to ",
             join(kLeastKernel, "."), " or newer.");
}

bool p2p_ib_supported(std::span<const std::string> gpu_names, std::string_view driver_version) {
  const auto lacks_p2p = [](const std::string& name) {
    return name.find("RTX 40") != std::string::npos;
  };
  if (gpu_names.size() < 2 || std::ranges::none_of(gpu_names, lacks_p2p)) return true;
  return Version::parse(driver_version) >= Version::parse("550.40.07");
}

}  // namespace detail::inline core

namespace {

const detail::Nvml& nvml_of_this_machine() {
  if (const auto* nvml = detail::Nvml::system()) return *nvml;
  throw UnsupportedError(
      "This machine has no NVIDIA driver that works: libnvidia-ml.so.1 cannot be opened or does "
      "not start.");
}

}  // namespace

GpuInfo get_gpu_info() {
  auto names = nvml_of_this_machine().device_names();
  if (!names) throw UnsupportedError("The NVIDIA driver does not tell the names of the GPUs.");
  const int count = static_cast<int>(names->size());
  return {.names = std::move(*names), .count = count};
}

std::string get_driver_version() {
  const auto version = nvml_of_this_machine().driver_version();
  if (!version) throw UnsupportedError("The NVIDIA driver does not tell its version.");
  return *version;
}

bool check_cuda_p2p_ib_support() {
  try {
    return detail::p2p_ib_supported(get_gpu_info().names, get_driver_version());
  } catch (const Error&) {
    return true;  // as Python: what cannot be asked is not held against the machine
  }
}

void check_os_kernel() {
  utsname system{};
  if (::uname(&system) != 0 || std::string_view(system.sysname) != "Linux") return;
  if (const auto warning = detail::kernel_warning(system.release)) detail::warn_once(*warning);
}

int physical_core_count() {
  auto cpus = detail::allowed_cpus();
  if (cpus.empty()) {  // the mask cannot be read in every sandbox
    cpus.resize(std::max(1U, std::thread::hardware_concurrency()));
    for (std::size_t i = 0; i < cpus.size(); ++i) cpus[i] = static_cast<int>(i);
  }
  return detail::count_physical_cores(cpus, detail::cgroup_cpu_quota());
}

CPUInformation get_cpu_distributed_information() {
  const auto environment = Environment::process();
  const auto read = [&](std::initializer_list<std::string> names, int fallback) {
    return static_cast<int>(environment.integer(names, fallback));
  };
  return {
      .rank = read({"RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"}, 0),
      .world_size =
          read({"WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"}, 1),
      .local_rank = read({"LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK",
                          "MV2_COMM_WORLD_LOCAL_RANK"},
                         0),
      .local_world_size = read({"LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE",
                                "MV2_COMM_WORLD_LOCAL_SIZE"},
                               1),
  };
}

}  // namespace accelerate
