#include "core/world.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "accelerate/errors.h"

namespace accelerate::detail::inline core {
namespace {

using Variables = std::map<std::string, std::string>;

// No resolver, no scontrol: whoever needs them has to say so.
World detect(const Variables& variables, const WorldLookups& lookups = {}) {
  return detect_world(Environment(variables), lookups);
}

std::string error_of(const Variables& variables, const WorldLookups& lookups = {}) {
  try {
    (void)detect(variables, lookups);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

Variables with(Variables base, const Variables& more) {
  for (const auto& [name, value] : more) base[name] = value;
  return base;
}

const Variables kTorchrun{{"RANK", "5"},           {"WORLD_SIZE", "8"},
                          {"LOCAL_RANK", "1"},     {"LOCAL_WORLD_SIZE", "4"},
                          {"MASTER_ADDR", "head"}, {"MASTER_PORT", "1234"}};
const Variables kOpenMpi{{"OMPI_COMM_WORLD_RANK", "1"},
                         {"OMPI_COMM_WORLD_SIZE", "2"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
const Variables kSlurm{{"SLURM_JOB_ID", "4711"},
                       {"SLURM_STEP_ID", "0"},
                       {"SLURM_PROCID", "3"},
                       {"SLURM_STEP_NUM_TASKS", "4"},
                       {"SLURM_LOCALID", "1"},
                       {"SLURM_NODEID", "1"},
                       {"SLURM_STEP_NUM_NODES", "2"},
                       {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"},
                       {"SLURM_STEP_NODELIST", "gpu[07-08]"}};

const WorldLookups kEverythingResolves{.resolves = [](const std::string&) { return true; }};

TEST(DetectWorld, FindsAProgramWithoutLauncherAlone) {
  EXPECT_EQ(detect({}), World{});
  EXPECT_EQ(detect({{"PATH", "/bin"}, {"MASTER_ADDR", "head"}, {"MASTER_PORT", "1"}}), World{});
}

TEST(DetectWorld, ReadsTheVariablesOfTorchrun) {
  const World world = detect(with(kTorchrun, {{"GROUP_RANK", "1"}, {"GROUP_WORLD_SIZE", "2"}}));
  EXPECT_EQ(world, (World{.source = WorldSource::kTorchrun,
                          .rank = 5,
                          .size = 8,
                          .local_rank = 1,
                          .local_size = 4,
                          .num_nodes = 2,
                          .node_rank = 1,
                          .master_addr = "head",
                          .master_port = 1234}));
}

TEST(DetectWorld, TellsWhenTheAgentOfTorchrunServesTheStore) {
  const World world = detect(with(
      kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"TORCHELASTIC_RESTART_COUNT", "2"}}));
  EXPECT_TRUE(world.agent_store);
  EXPECT_EQ(world.restarts, 2);
  EXPECT_FALSE(detect(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}})).agent_store);
}

TEST(DetectWorld, ReadsOpenMpi) {
  EXPECT_EQ(detect(kOpenMpi), (World{.source = WorldSource::kOpenMpi,
                                     .rank = 1,
                                     .size = 2,
                                     .local_rank = 1,
                                     .local_size = 2,
                                     .num_nodes = 1}));
}

TEST(DetectWorld, ReadsMpichAndIntelMpi) {
  const World world = detect({{"PMI_RANK", "2"},
                              {"PMI_SIZE", "4"},
                              {"MPI_LOCALRANKID", "0"},
                              {"MPI_LOCALNRANKS", "2"},
                              {"MASTER_ADDR", "n1"}});
  EXPECT_EQ(world, (World{.source = WorldSource::kMpich,
                          .rank = 2,
                          .size = 4,
                          .local_rank = 0,
                          .local_size = 2,
                          .num_nodes = 2,
                          .master_addr = "n1"}));
}

TEST(DetectWorld, ReadsMvapich) {
  const World world = detect({{"MV2_COMM_WORLD_RANK", "0"},
                              {"MV2_COMM_WORLD_SIZE", "2"},
                              {"MV2_COMM_WORLD_LOCAL_RANK", "0"},
                              {"MV2_COMM_WORLD_LOCAL_SIZE", "2"}});
  EXPECT_EQ(world.source, WorldSource::kMvapich);
  EXPECT_EQ(world.size, 2);
  EXPECT_EQ(world.master_addr, "127.0.0.1");
  EXPECT_EQ(world.master_port, 29500);
}

TEST(DetectWorld, ReadsAStepOfSlurmWithoutAnyFlag) {
  const World world = detect(kSlurm, kEverythingResolves);
  EXPECT_EQ(world, (World{.source = WorldSource::kSlurm,
                          .rank = 3,
                          .size = 4,
                          .local_rank = 1,
                          .local_size = 2,
                          .num_nodes = 2,
                          .node_rank = 1,
                          .master_addr = "gpu07",
                          .master_port = port_for_step(4711, 0)}));
}

TEST(DetectWorld, AsksTheSlurmControllerForAHostThatDoesNotResolve) {
  std::string asked;
  const WorldLookups lookups{.resolves = [](const std::string&) { return false; },
                             .node_address =
                                 [&](const std::string& node) {
                                   asked = node;
                                   return std::optional<std::string>("10.0.0.7");
                                 }};
  EXPECT_EQ(detect(kSlurm, lookups).master_addr, "10.0.0.7");
  EXPECT_EQ(asked, "gpu07");
}

TEST(DetectWorld, TellsWhatToSetWhenNobodyKnowsTheFirstHost) {
  EXPECT_EQ(error_of(kSlurm),
            "The first host of SLURM_STEP_NODELIST=gpu[07-08] is 'gpu07', which has no address "
            "here, and `scontrol show node gpu07` gives none. Set MASTER_ADDR to an address of "
            "that host.");
}

TEST(DetectWorld, NeedsNoAddressForAStepOnOneHost) {
  const World world = detect(with(kSlurm, {{"SLURM_STEP_NUM_NODES", "1"},
                                           {"SLURM_NODEID", "0"},
                                           {"SLURM_LOCALID", "3"},
                                           {"SLURM_STEP_TASKS_PER_NODE", "4"}}));
  EXPECT_EQ(world.master_addr, "127.0.0.1");
  EXPECT_EQ(world.local_size, 4);
}

TEST(DetectWorld, TakesTheShellOfASlurmJobForNoStep) {
  EXPECT_EQ(detect(with(kSlurm, {{"SLURM_STEP_ID", "batch"}})), World{});
  EXPECT_EQ(detect(with(kSlurm, {{"SLURM_STEP_ID", "4294967291"}})), World{});
  EXPECT_EQ(detect(with(kSlurm, {{"SLURM_STEP_ID", ""}})), World{});
}

TEST(DetectWorld, FindsTheOnlyTaskOfASlurmStepAlone) {
  EXPECT_EQ(detect(with(kSlurm, {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}})), World{});
}

TEST(DetectWorld, TrustsTorchrunMoreThanMpiAndMpiMoreThanSlurm) {
  EXPECT_EQ(detect(with(with(kSlurm, kOpenMpi), kTorchrun)).rank, 5);
  // mpirun starts its daemons as Slurm tasks: their numbers are not ours.
  const World world = detect(with(kSlurm, kOpenMpi));
  EXPECT_EQ(world.source, WorldSource::kOpenMpi);
  EXPECT_EQ(world.rank, 1);
  EXPECT_EQ(world.local_size, 2);
  EXPECT_EQ(world.master_port, 29500);
}

TEST(DetectWorld, CompletesPmiByWhatSlurmSaysAboutTheSameTask) {
  const World world =
      detect(with(kSlurm, {{"PMI_RANK", "3"}, {"PMI_SIZE", "4"}}), kEverythingResolves);
  EXPECT_EQ(world.source, WorldSource::kMpich);
  EXPECT_EQ(world.local_rank, 1);
  EXPECT_EQ(world.local_size, 2);
  EXPECT_EQ(world.master_addr, "gpu07");
  EXPECT_EQ(world.master_port, port_for_step(4711, 0));
}

TEST(DetectWorld, TakesAMissingTorchrunVariableFromMpi) {
  const World world = detect(with(kOpenMpi, {{"WORLD_SIZE", "2"}}));
  EXPECT_EQ(world.rank, 1);
  EXPECT_EQ(world.local_rank, 1);
}

TEST(DetectWorld, NamesTheVariableThatIsMissing) {
  EXPECT_EQ(error_of({{"WORLD_SIZE", "2"}}),
            "RANK is missing beside WORLD_SIZE=2. Set it as well (accelerate launch or torchrun "
            "does), or remove its companions to run alone.");
  EXPECT_EQ(error_of({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}),
            "RANK is -1 beside WORLD_SIZE=2, and must be 0 or more. Set it right (accelerate "
            "launch or torchrun does), or remove its companions to run alone.");
  EXPECT_EQ(error_of({{"LOCAL_RANK", "0"}}),
            "RANK is missing beside LOCAL_RANK=0. Set it as well (accelerate launch or torchrun "
            "does), or remove its companions to run alone.");
  EXPECT_EQ(error_of({{"RANK", "0"}}),
            "WORLD_SIZE is missing beside RANK=0. Set it as well (accelerate launch or torchrun "
            "does), or remove its companions to run alone.");
  EXPECT_EQ(error_of({{"OMPI_COMM_WORLD_RANK", "1"}}),
            "OMPI_COMM_WORLD_SIZE is missing beside OMPI_COMM_WORLD_RANK=1. Set it as well (Open "
            "MPI does), or remove its companions to run alone.");
  EXPECT_EQ(error_of({{"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "4"}}),
            "SLURM_PROCID is missing beside SLURM_STEP_NUM_TASKS=4. Set it as well (srun does), or "
            "remove its companions to run alone.");
  Variables no_list = kSlurm;
  no_list.erase("SLURM_STEP_NODELIST");
  EXPECT_EQ(error_of(no_list),
            "SLURM_STEP_NODELIST is missing beside SLURM_PROCID=3: it tells where rank 0 is. Start "
            "with srun, or set MASTER_ADDR.");
}

TEST(DetectWorld, TellsToExportTheAddressOfRankZeroOnSeveralHosts) {
  Variables variables = kTorchrun;
  variables.erase("MASTER_ADDR");
  EXPECT_EQ(error_of(variables),
            "MASTER_ADDR is missing, and 8 processes cannot be known to run on one host (this one "
            "has 4). Export the host name of rank 0 as MASTER_ADDR, or LOCAL_WORLD_SIZE for a "
            "single host.");
}

TEST(DetectWorld, MeetsAtTheLoopbackAddressOnOneHost) {
  const World world =
      detect({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}});
  EXPECT_EQ(world.master_addr, "127.0.0.1");
  EXPECT_EQ(world.master_port, 29500);
}

TEST(DetectWorld, LeavesThePlaceOnTheHostOpenWhenNobodyTellsIt) {
  const World world = detect({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "head"}});
  EXPECT_EQ(world.local_rank, std::nullopt);
  EXPECT_EQ(world.local_size, std::nullopt);
}

TEST(DetectWorld, TakesASingleProcessForAloneUnlessItHasALocalRank) {
  EXPECT_EQ(detect({{"RANK", "0"}, {"WORLD_SIZE", "1"}}), World{});
  EXPECT_EQ(detect({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}), World{});
  EXPECT_EQ(detect({{"OMPI_COMM_WORLD_RANK", "0"},
                    {"OMPI_COMM_WORLD_SIZE", "1"},
                    {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}}),
            World{});
  const World launched = detect({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}});
  EXPECT_EQ(launched.source, WorldSource::kTorchrun);
  EXPECT_EQ(launched.local_rank, 0);
}

TEST(ThreadsAreChosen, ByANumberOfOneAtLeast) {
  const auto chosen = [](const std::string& text) {
    return threads_are_chosen(Environment({{"OMP_NUM_THREADS", text}}));
  };
  EXPECT_TRUE(chosen("3"));
  EXPECT_TRUE(chosen("4,2"));
  EXPECT_TRUE(chosen(" 8 "));
  EXPECT_FALSE(chosen("0"));
  EXPECT_FALSE(chosen("0,2"));
  EXPECT_FALSE(chosen("-3"));
  EXPECT_FALSE(chosen(""));
}

TEST(ThreadsAreChosen, SaysWhatIsNoNumber) {
  const auto message = [](const std::string& text) -> std::string {
    try {
      (void)threads_are_chosen(Environment({{"OMP_NUM_THREADS", text}}));
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(message("abc"), "OMP_NUM_THREADS is 'abc', which is not a whole number.");
  EXPECT_EQ(message("4x,2"), "OMP_NUM_THREADS is '4x', which is not a whole number.");
}

TEST(DetectWorld, NamesBothVariablesThatContradictEachOther) {
  EXPECT_EQ(error_of(with(kTorchrun, {{"RANK", "8"}})),
            "RANK is 8, but WORLD_SIZE is 8: ranks go from 0 to 7.");
  EXPECT_EQ(error_of(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "9"}})),
            "LOCAL_WORLD_SIZE is 9, but WORLD_SIZE is 8: a host has at least one and at most all "
            "processes.");
  EXPECT_EQ(error_of(with(kTorchrun, {{"LOCAL_RANK", "4"}})),
            "LOCAL_RANK is 4, but there are 4 processes on this host: local ranks go from 0 to 3.");
  EXPECT_EQ(error_of(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "2"}})),
            "OMPI_COMM_WORLD_RANK is 2, but OMPI_COMM_WORLD_SIZE is 2: ranks go from 0 to 1.");
  EXPECT_EQ(error_of({{"RANK", "0"}, {"WORLD_SIZE", "0"}}),
            "WORLD_SIZE is 0. A run has at least one process.");
  EXPECT_EQ(error_of(with(kTorchrun, {{"MASTER_PORT", "65536"}})),
            "MASTER_PORT is 65536. Ports go from 0 to 65535.");
}

TEST(DetectWorld, NamesAVariableThatIsNoNumber) {
  EXPECT_NE(error_of(with(kTorchrun, {{"RANK", "first"}})).find("RANK"), std::string::npos);
  EXPECT_NE(error_of(with(kTorchrun, {{"RANK", "first"}})).find("first"), std::string::npos);
  EXPECT_EQ(error_of(with(kTorchrun, {{"RANK", "3000000000"}})),
            "RANK is 3000000000, which is more than any run has.");
}

TEST(DetectWorld, TakesANegativeOrEmptyValueForAbsent) {
  EXPECT_EQ(detect({{"LOCAL_RANK", "-1"}}), World{});
  EXPECT_EQ(detect({{"RANK", ""}, {"WORLD_SIZE", ""}}), World{});
  EXPECT_EQ(detect({{"WORLD_SIZE", "1"}}), World{});
}

TEST(ExpandHostlist, WritesOutRangesAndKeepsLeadingZeros) {
  using Hosts = std::vector<std::string>;
  EXPECT_EQ(expand_hostlist("n1"), (Hosts{"n1"}));
  EXPECT_EQ(expand_hostlist("n[1-3,07],gpu-a"), (Hosts{"n1", "n2", "n3", "n07", "gpu-a"}));
  EXPECT_EQ(expand_hostlist("n[08-11]"), (Hosts{"n08", "n09", "n10", "n11"}));
  EXPECT_EQ(expand_hostlist("rack[1-2]n[01-02]x,login"),
            (Hosts{"rack1n01x", "rack1n02x", "rack2n01x", "rack2n02x", "login"}));
}

TEST(ExpandHostlist, RefusesWhatSlurmNeverWrites) {
  for (const char* text : {"", "n[1-3", "n1-3]", "n[]", "n[a-b]", "n[3-1]", "a,,b", "a,",
                           "n[1-99999999999999999999]", "n[0-4294967295]", "n[0-9999]m[0-9999]"}) {
    EXPECT_THROW((void)expand_hostlist(text), ConfigError) << text;
  }
  try {
    (void)expand_hostlist("n[3-1]");
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(),
                 "'n[3-1]' is not a list of hosts as Slurm writes them: the range '3-1' runs "
                 "backwards. Expected is something like n[1-3,07],gpu-a.");
  }
}

TEST(TasksOnNode, CountsThroughRepeats) {
  EXPECT_EQ(tasks_on_node("2(x3),1", 0), 2);
  EXPECT_EQ(tasks_on_node("2(x3),1", 2), 2);
  EXPECT_EQ(tasks_on_node("2(x3),1", 3), 1);
  EXPECT_EQ(tasks_on_node("2(x3),1", 4), std::nullopt);
  EXPECT_EQ(tasks_on_node("4", 0), 4);
  EXPECT_EQ(tasks_on_node("two", 0), std::nullopt);
  EXPECT_EQ(tasks_on_node("2(x3", 0), std::nullopt);
}

TEST(PortForStep, IsStableAndBelowThePortsOfOutgoingConnections) {
  EXPECT_EQ(port_for_step(4711, 0), port_for_step(4711, 0));
  EXPECT_NE(port_for_step(4711, 0), port_for_step(4711, 1));
  EXPECT_NE(port_for_step(4711, 0), port_for_step(4712, 0));
  for (std::int64_t job = 0; job < 5'000'000; job += 997) {
    ASSERT_GE(port_for_step(job, 3), 10000);
    ASSERT_LT(port_for_step(job, 3), 32768);
  }
}

TEST(NodeAddrFrom, ReadsWhatScontrolPrints) {
  EXPECT_EQ(node_addr_from("NodeName=n1 Arch=x86_64 NodeAddr=127.0.0.1 NodeHostName=box Port=1"),
            "127.0.0.1");
  EXPECT_EQ(node_addr_from("NodeName=n1\n   NodeAddr=n1.cluster NodeHostName=n1\n"), "n1.cluster");
  EXPECT_EQ(node_addr_from("Node n9 not found"), std::nullopt);
  EXPECT_EQ(node_addr_from("NodeAddr=(null)"), std::nullopt);
}

TEST(LocalityOf, CountsTheRanksThatShareAHost) {
  const std::vector<std::string> hosts{"a", "b", "a", "b", "a"};
  EXPECT_EQ(locality_of(0, hosts),
            (Locality{.local_rank = 0, .local_size = 3, .num_nodes = 2, .node_rank = 0}));
  EXPECT_EQ(locality_of(3, hosts),
            (Locality{.local_rank = 1, .local_size = 2, .num_nodes = 2, .node_rank = 1}));
  EXPECT_EQ(locality_of(4, hosts),
            (Locality{.local_rank = 2, .local_size = 3, .num_nodes = 2, .node_rank = 0}));
}

TEST(IsLoopback, KnowsTheAddressesThatStayOnThisHost) {
  EXPECT_TRUE(is_loopback("127.0.0.1"));
  EXPECT_TRUE(is_loopback("127.0.1.1"));
  EXPECT_TRUE(is_loopback("localhost"));
  EXPECT_TRUE(is_loopback("::1"));
  EXPECT_FALSE(is_loopback("10.0.0.1"));
  EXPECT_FALSE(is_loopback("head"));
}

TEST(ThreadsPerProcess, SharesTheCoresOutAndGivesAtLeastOne) {
  EXPECT_EQ(threads_per_process(16, 4), 4);
  EXPECT_EQ(threads_per_process(2, 4), 1);
  EXPECT_EQ(threads_per_process(8, 0), 8);
}

}  // namespace
}  // namespace accelerate::detail::inline core
