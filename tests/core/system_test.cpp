#include "core/system.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <thread>

#include "accelerate/checks.h"
#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "core/nvml.h"

namespace accelerate::detail::inline core {
namespace {

namespace fs = std::filesystem;
using Cpus = std::vector<int>;

/// A folder with the files of another machine's kernel.
class MadeUpMachine {
 public:
  MadeUpMachine() {
    auto name = (fs::temp_directory_path() / "machine-XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  ~MadeUpMachine() { fs::remove_all(folder_); }
  MadeUpMachine(const MadeUpMachine&) = delete;
  MadeUpMachine& operator=(const MadeUpMachine&) = delete;

  MadeUpMachine& file(const fs::path& path, const std::string& text) {
    fs::create_directories((folder_ / path).parent_path());
    std::ofstream(folder_ / path) << text;
    return *this;
  }
  MadeUpMachine& node(int id, const std::string& cpus) {
    return file("sys/devices/system/node/node" + std::to_string(id) + "/cpulist", cpus + "\n");
  }
  MadeUpMachine& core(int cpu, const std::string& threads) {
    return file("sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/core_cpus_list",
                threads + "\n");
  }
  [[nodiscard]] SystemRoot root() const {
    return {.sys = folder_ / "sys", .proc = folder_ / "proc"};
  }

 private:
  fs::path folder_;
};

TEST(ParseCpulist, ReadsNumbersAndRanges) {
  EXPECT_EQ(parse_cpulist("0-3,8,10-11\n"), (Cpus{0, 1, 2, 3, 8, 10, 11}));
  EXPECT_EQ(parse_cpulist(""), Cpus{});
}

TEST(ParseCpulist, SortsAndDropsRepeats) { EXPECT_EQ(parse_cpulist("5,1-2,2"), (Cpus{1, 2, 5})); }

TEST(ParseCpulist, RefusesWhatIsNoList) {
  for (const auto* text : {"a", "1-", "-1", "3-1", "1,,2", "0-999999999", "1 2"}) {
    EXPECT_EQ(parse_cpulist(text), std::nullopt) << text;
  }
}

TEST(FormatCpulist, WritesTheShortestRanges) {
  EXPECT_EQ(format_cpulist(Cpus{0, 1, 2, 3, 8, 10, 11}), "0-3,8,10-11");
  EXPECT_EQ(format_cpulist(Cpus{}), "");
}

TEST(CpusOfWords, CountsBitsAcrossWords) {
  const std::vector<std::uint64_t> words = {0b1001, 1ULL << 63, 1};
  EXPECT_EQ(cpus_of_words(words), (Cpus{0, 3, 127, 128}));
}

TEST(NumaNodes, ListsNodesByNumberAndLeavesOutThoseWithoutCpus) {
  MadeUpMachine machine;
  machine.node(10, "8-9").node(1, "4-7").node(0, "0-3").node(2, "");
  const auto nodes = numa_nodes(machine.root());
  ASSERT_EQ(nodes.size(), 3U);
  EXPECT_EQ(nodes[0].cpus, (Cpus{0, 1, 2, 3}));
  EXPECT_EQ(nodes[1].id, 1);
  EXPECT_EQ(nodes[2].id, 10);
}

TEST(NumaNodes, AreEmptyWhereTheKernelShowsNone) {
  EXPECT_TRUE(numa_nodes(MadeUpMachine().root()).empty());
}

TEST(CpusOfTurn, DealsLocalProcessesToNodesInTurn) {
  const std::vector<NumaNode> nodes = {{0, {0, 1}}, {1, {2, 3}}};
  const Cpus allowed = {0, 1, 2, 3};
  EXPECT_EQ(cpus_of_turn(0, nodes, allowed), (Cpus{0, 1}));
  EXPECT_EQ(cpus_of_turn(1, nodes, allowed), (Cpus{2, 3}));
  EXPECT_EQ(cpus_of_turn(2, nodes, allowed), (Cpus{0, 1}));
}

TEST(CpusOfTurn, NeverLeavesTheAllowedCpus) {
  const std::vector<NumaNode> nodes = {{0, {0, 1}}, {1, {2, 3}}, {2, {4, 5}}};
  EXPECT_EQ(cpus_of_turn(1, nodes, Cpus{1, 5}), Cpus{5});
}

TEST(CpusOfTurn, ChoosesNothingWhereOneNodeIsLeft) {
  const std::vector<NumaNode> nodes = {{0, {0, 1}}, {1, {2, 3}}};
  EXPECT_EQ(cpus_of_turn(0, nodes, Cpus{2, 3}), std::nullopt);
}

TEST(PciAddress, IsSpelledAsTheKernelDoes) {
  EXPECT_EQ(pci_address("00000000:3B:00.0"), "0000:3b:00.0");
  EXPECT_EQ(pci_address("0000:af:00.1"), "0000:af:00.1");
  EXPECT_EQ(pci_address("00010002:AF:00.0"), "10002:af:00.0");
}

TEST(PciAddress, RefusesTextsThatCouldLeaveTheFolder) {
  for (const auto* text : {"", "../..", "0000:../:00.0", "0000:3b:00", "0000:3b:0g.0", "3b:00.0"}) {
    EXPECT_EQ(pci_address(text), std::nullopt) << text;
  }
}

TEST(CpusNearPciDevice, ReadsTheKernelsList) {
  MadeUpMachine machine;
  machine.file("sys/bus/pci/devices/0000:3b:00.0/local_cpulist", "16-18\n");
  EXPECT_EQ(cpus_near_pci_device("00000000:3B:00.0", machine.root()), (Cpus{16, 17, 18}));
  EXPECT_TRUE(cpus_near_pci_device("0000:00:00.0", machine.root()).empty());
}

TEST(CgroupQuota, TakesTheTightestLimitOfVersion2OnTheWayUp) {
  MadeUpMachine machine;
  machine.file("proc/self/cgroup", "0::/jobs/mine\n")
      .file("sys/fs/cgroup/jobs/mine/cpu.max", "max 100000\n")
      .file("sys/fs/cgroup/jobs/cpu.max", "150000 100000\n")
      .file("sys/fs/cgroup/cpu.max", "400000 100000\n");
  EXPECT_EQ(cgroup_cpu_quota(machine.root()), 1.5);
}

TEST(CgroupQuota, FindsAContainersOwnGroupWhichIsMountedAsTheRoot) {
  MadeUpMachine machine;
  machine.file("proc/self/cgroup", "0::/docker/0123abcd\n")
      .file("sys/fs/cgroup/cpu.max", "200000 100000\n");
  EXPECT_EQ(cgroup_cpu_quota(machine.root()), 2.0);
}

TEST(CgroupQuota, ReadsVersion1) {
  MadeUpMachine machine;
  machine.file("proc/self/cgroup", "5:memory:/a\n4:cpu,cpuacct:/a\n")
      .file("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "250000\n")
      .file("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000\n")
      .file("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
      .file("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cgroup_cpu_quota(machine.root()), 2.5);
}

TEST(CgroupQuota, IsNothingWithoutALimitOrWithADamagedFile) {
  EXPECT_EQ(cgroup_cpu_quota(MadeUpMachine().root()), std::nullopt);
  MadeUpMachine machine;
  machine.file("proc/self/cgroup", "nonsense\n0::/a\n")
      .file("sys/fs/cgroup/a/cpu.max", "100000 0\n")
      .file("sys/fs/cgroup/cpu.max", "\n");
  EXPECT_EQ(cgroup_cpu_quota(machine.root()), std::nullopt);
}

TEST(AvailableMemory, IsWhatTheMachineAndTheTightestCgroupLeave) {
  MadeUpMachine machine;
  machine.file("proc/meminfo", "MemTotal:       8000 kB\nMemAvailable:   4000 kB\n");
  EXPECT_EQ(available_memory(machine.root()), 4000 * 1024);
  machine.file("proc/self/cgroup", "0::/jobs/mine\n")
      .file("sys/fs/cgroup/jobs/mine/memory.max", "max\n")
      .file("sys/fs/cgroup/jobs/mine/memory.current", "100000\n")
      .file("sys/fs/cgroup/jobs/memory.max", "1000000\n")
      .file("sys/fs/cgroup/jobs/memory.current", "600000\n")
      .file("sys/fs/cgroup/jobs/memory.stat", "anon 1\ninactive_file 50000\n");
  EXPECT_EQ(available_memory(machine.root()), 450000);
}

TEST(AvailableMemory, ReadsVersion1) {
  MadeUpMachine machine;
  machine.file("proc/meminfo", "MemAvailable:   4000 kB\n")
      .file("proc/self/cgroup", "4:memory:/a\n1:cpu:/\n")
      .file("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "300000\n")
      .file("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "400000\n")
      .file("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
      .file("sys/fs/cgroup/memory/memory.usage_in_bytes", "400000\n");
  EXPECT_EQ(available_memory(machine.root()), 0);
}

TEST(CountPhysicalCores, CountsHyperThreadsOnce) {
  MadeUpMachine machine;
  machine.core(0, "0,2").core(1, "1,3").core(2, "0,2").core(3, "1,3");
  EXPECT_EQ(count_physical_cores(Cpus{0, 1, 2, 3}, std::nullopt, machine.root()), 2);
  EXPECT_EQ(count_physical_cores(Cpus{0, 2}, std::nullopt, machine.root()), 1);
}

TEST(CountPhysicalCores, FallsBackToTheCpusWhereTheKernelIsSilent) {
  EXPECT_EQ(count_physical_cores(Cpus{0, 1, 5}, std::nullopt, MadeUpMachine().root()), 3);
}

TEST(CountPhysicalCores, StaysWithinTheQuotaAndAboveZero) {
  const MadeUpMachine machine;
  EXPECT_EQ(count_physical_cores(Cpus{0, 1, 2, 3}, 1.5, machine.root()), 2);
  EXPECT_EQ(count_physical_cores(Cpus{0, 1, 2, 3}, 0.2, machine.root()), 1);
  EXPECT_EQ(count_physical_cores(Cpus{0, 1}, 16.0, machine.root()), 2);
}

TEST(PhysicalCoreCount, IsAtLeastOneAndAtMostTheCpusOfThisProcess) {
  EXPECT_GE(physical_core_count(), 1);
  EXPECT_LE(physical_core_count(), static_cast<int>(allowed_cpus().size()));
}

TEST(RestrictToCpus, HoldsForTheThreadAndCanBeReadBack) {
  // In a thread of its own: the mask belongs to it and goes with it.
  std::thread([] {
    const auto allowed = allowed_cpus();
    const Cpus last = {allowed.back()};
    EXPECT_EQ(restrict_to_cpus(last), std::nullopt);
    EXPECT_EQ(allowed_cpus(), last);
  }).join();
}

TEST(RestrictToCpus, SaysWhyItCouldNot) {
  EXPECT_EQ(restrict_to_cpus(Cpus{}), "there is no CPU among them");
  EXPECT_EQ(restrict_to_cpus(Cpus{60000}), "Invalid argument");
}

TEST(KernelVersion, ReadsTheFirstThreePartNumber) {
  EXPECT_EQ(kernel_version("5.15.0-91-generic"), (std::array{5, 15, 0}));
  EXPECT_EQ(kernel_version("vendor2-6.1.7"), (std::array{6, 1, 7}));
}

TEST(KernelVersion, TakesMissingPartsAsZero) {
  EXPECT_EQ(kernel_version("6.1-rc3"), (std::array{6, 1, 0}));
  EXPECT_EQ(kernel_version("7"), (std::array{7, 0, 0}));
  EXPECT_EQ(kernel_version("unknown"), std::nullopt);
}

TEST(KernelWarning, NamesBothVersions) {
  EXPECT_EQ(kernel_warning("5.4.0-150-generic"),
            "The kernel of this machine has version 5.4.0. Before 5.5.0 runs of several processes "
            "have been seen to hang: upgrade the kernel to 5.5.0 or newer.");
}

TEST(KernelWarning, IsSilentFrom550OnAndForUnknownReleases) {
  EXPECT_EQ(kernel_warning("5.5.0"), std::nullopt);
  EXPECT_EQ(kernel_warning("5.15.0"), std::nullopt);
  EXPECT_EQ(kernel_warning("custom"), std::nullopt);
}

TEST(P2pIbSupported, IsFalseOnlyForSeveralRtx40WithAnOldDriver) {
  const std::vector<std::string> two = {"NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"};
  const std::vector<std::string> one = {"NVIDIA GeForce RTX 4090"};
  const std::vector<std::string> others = {"NVIDIA H200", "NVIDIA H200"};
  EXPECT_FALSE(p2p_ib_supported(two, "545.23.08"));
  EXPECT_TRUE(p2p_ib_supported(two, "550.40.07"));
  EXPECT_TRUE(p2p_ib_supported(one, "545.23.08"));
  EXPECT_TRUE(p2p_ib_supported(others, "545.23.08"));
}

// A driver with two GPUs, the second at 0000:3b:00.0 next to CPUs 1 and 65.
int g_started = 0;
NvmlFunctions made_up_driver() {
  using Device = NvmlFunctions::Device;
  return {
      .init = [] { return ++g_started, 0; },
      .shutdown = [] { return --g_started, 0; },
      .driver_version = [](char* text, unsigned) { return std::strcpy(text, "550.54.15"), 0; },
      .device_count = [](unsigned* count) { return *count = 2, 0; },
      .device_by_index =
          [](unsigned index, Device* device) {
            return *device = reinterpret_cast<Device>(index + 1UL), 0;
          },
      .device_by_pci =
          [](const char* address, Device* device) {
            if (std::string_view(address) != "0000:3b:00.0") return 6;
            return *device = reinterpret_cast<Device>(2UL), 0;
          },
      .device_name =
          [](Device device, char* text, unsigned) {
            return std::strcpy(text, device == reinterpret_cast<Device>(1UL) ? "first" : "second"),
                   0;
          },
      .cpu_affinity =
          [](Device, unsigned words, unsigned long* set) {
            for (unsigned i = 0; i < words; ++i) set[i] = 2;
            return 0;
          },
      .memory =
          [](Device, unsigned long long* bytes) {
            bytes[0] = 80;
            bytes[1] = 50;
            bytes[2] = 30;
            return 0;
          },
      .utilization = [](Device, unsigned* percent) { return percent[0] = 97, 0; },
  };
}

TEST(Nvml, AsksTheDriverForNamesAndVersion) {
  {
    const auto nvml = Nvml::start(made_up_driver());
    ASSERT_TRUE(nvml.has_value());
    EXPECT_EQ(nvml->driver_version(), "550.54.15");
    EXPECT_EQ(nvml->device_names(), (std::vector<std::string>{"first", "second"}));
    EXPECT_EQ(g_started, 1);
  }
  EXPECT_EQ(g_started, 0);
}

TEST(Nvml, FindsTheCpusOfAGpuByItsPciAddress) {
  const auto nvml = Nvml::start(made_up_driver());
  EXPECT_EQ(nvml->cpus_near("0000:3b:00.0", 128), (Cpus{1, 65}));
  EXPECT_EQ(nvml->cpus_near("0000:00:00.0", 128), std::nullopt);
}

TEST(Nvml, TellsHowAGpuIsUsed) {
  auto functions = made_up_driver();
  const auto usage = Nvml::start(functions)->usage("0000:3b:00.0");
  ASSERT_TRUE(usage.has_value());
  EXPECT_EQ(usage->used_bytes, 30);
  EXPECT_EQ(usage->total_bytes, 80);
  EXPECT_EQ(usage->busy_percent, 97);

  functions.utilization = [](NvmlFunctions::Device, unsigned*) { return 3; };  // not supported
  EXPECT_EQ(Nvml::start(functions)->usage("0000:3b:00.0")->busy_percent, std::nullopt);
  EXPECT_EQ(Nvml::start(functions)->usage("0000:00:00.0"), std::nullopt);
}

TEST(Nvml, IsNothingWhenTheDriverDoesNotStart) {
  auto functions = made_up_driver();
  functions.init = [] { return 9; };
  EXPECT_FALSE(Nvml::start(functions).has_value());
}

TEST(GetGpuInfo, TellsTheGpusOrThatThereIsNoDriver) {
  if (Nvml::system() != nullptr) {
    const auto info = get_gpu_info();
    EXPECT_EQ(info.count, static_cast<int>(info.names.size()));
    EXPECT_FALSE(get_driver_version().empty());
    return;
  }
  try {
    (void)get_gpu_info();
    FAIL() << "there is no driver, yet nothing was thrown";
  } catch (const UnsupportedError& error) {
    EXPECT_NE(std::string(error.what()).find("no NVIDIA driver"), std::string::npos);
  }
  EXPECT_THROW((void)get_driver_version(), UnsupportedError);
  EXPECT_TRUE(check_cuda_p2p_ib_support());
}

TEST(GetCpuDistributedInformation, ReadsTheFirstLauncherThatIsThere) {
  const auto cleared = clear_environment();
  EXPECT_EQ(get_cpu_distributed_information(), CPUInformation{});
  const auto patched = patch_environment({{"RANK", "-1"},
                                          {"PMI_RANK", "3"},
                                          {"OMPI_COMM_WORLD_RANK", "7"},
                                          {"OMPI_COMM_WORLD_SIZE", "8"},
                                          {"MPI_LOCALRANKID", "1"},
                                          {"LOCAL_WORLD_SIZE", "4"}});
  EXPECT_EQ(get_cpu_distributed_information(),
            (CPUInformation{.rank = 3, .world_size = 8, .local_rank = 1, .local_world_size = 4}));
}

}  // namespace
}  // namespace accelerate::detail::inline core
