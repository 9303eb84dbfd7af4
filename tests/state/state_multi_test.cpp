#include <fcntl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "accelerate/checks.h"
#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "accelerate/kwargs/plugins.h"
#include "accelerate/state.h"
#include "support/listening_socket.h"
#include "support/message_of.h"
#include "support/on_processes.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

using test::ListeningSocket;
using test::message_of;

// Ranks that meet at a free port instead of the harness's file.
OnProcessesOptions on_a_port() {
  return {.environment = {{"MASTER_PORT", std::to_string(get_free_port())}}, .rendezvous = false};
}

// Ranks that meet at a port which the test has bound. (In the ranks themselves `socket` is another
// one, which nobody uses.)
OnProcessesOptions on_socket(const ListeningSocket& socket) {
  return {.environment = {{"MASTER_PORT", std::to_string(socket.port())}},
          .rendezvous = false,
          .listen_fd = socket.fd()};
}

// The same path in the test and in its ranks.
std::string scratch_file(const std::string& name) {
  const auto id = in_child_process() ? ::getppid() : ::getpid();
  return (std::filesystem::temp_directory_path() / (name + "_" + std::to_string(id))).string();
}

// In a rank: as if it had been started by hand.
void forget_launcher() {
  for (const char* name :
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    ::unsetenv(name);
  }
}

// Inside a rank: what the harness said, before the test changes the names.
int rank_from_harness() { return static_cast<int>(get_int_from_env({"RANK"}, -1)); }

void rename(std::initializer_list<std::pair<std::string, std::string>> names) {
  for (const auto& [from, to] : names) {
    const char* value = std::getenv(from.c_str());
    ASSERT_NE(value, nullptr) << from;
    ::setenv(to.c_str(), value, 1);
    ::unsetenv(from.c_str());
  }
}

void expect_a_working_group(const PartialState& state) {
  auto ones = torch::ones({1});
  std::vector<torch::Tensor> tensors{ones};
  state.process_group()->allreduce(tensors)->wait();
  EXPECT_EQ(ones.item<float>(), static_cast<float>(state.num_processes()));
}

TEST(StateOnProcesses, KnowsEveryRankAndPrintsWhatPythonPrints) {
  on_processes(2, [](PartialState& state) {
    EXPECT_EQ(state.num_processes(), 2);
    EXPECT_EQ(state.process_index(), rank_from_harness());
    EXPECT_EQ(state.local_process_index(), rank_from_harness());
    EXPECT_EQ(state.distributed_type(), DistributedType::kMultiCpu);
    EXPECT_TRUE(state.use_distributed());
    EXPECT_EQ(state.is_main_process(), rank_from_harness() == 0);
    EXPECT_EQ(state.is_last_process(), rank_from_harness() == 1);
    EXPECT_EQ(state.num_machines(), 1);
    expect_a_working_group(state);
    if (rank_from_harness() == 1) {
      std::ifstream file(test::reference_path("state/state.json"));
      std::ostringstream out;
      out << state;
      EXPECT_EQ(
          out.str(),
          nlohmann::json::parse(file).at("printed").at("partial_rank_1_of_2").get<std::string>());
    }
  });
}

TEST(StateOnProcesses, FindsTheLocalMainOfEachHost) {
  on_processes(4, {.processes_per_host = 2}, [](PartialState& state) {
    EXPECT_EQ(state.local_process_index(), state.process_index() % 2);
    EXPECT_EQ(state.is_local_main_process(), state.process_index() % 2 == 0);
    EXPECT_EQ(state.local_num_processes(), 2);
    EXPECT_EQ(state.num_machines(), 2);
  });
}

TEST(StateOnProcesses, SplitsListsMapsAndTensors) {
  on_processes(3, [](PartialState& state) {
    const std::vector<std::vector<std::string>> expected{
        {"A", "B", "C"}, {"D", "E", "E"}, {"F", "G", "G"}};
    const std::vector<std::string> letters{"A", "B", "C", "D", "E", "F", "G"};
    const auto mine = state.split_between_processes(letters, {.apply_padding = true});
    EXPECT_EQ(mine, expected[static_cast<std::size_t>(state.process_index())]);
    const auto rows = state.split_between_processes(torch::arange(7), {.apply_padding = true});
    EXPECT_EQ(rows.size(0), 3);
    EXPECT_EQ(rows[2].item<int>(), state.process_index() == 0 ? 2 : 6);
    EXPECT_EQ(rows.device(), torch::zeros({1}).to(state.device()).device());
  });
}

TEST(MainProcessFirst, LetsTheOthersWaitUntilTheMainProcessIsDone) {
  const auto path = scratch_file("main_first");
  on_processes(3, [&](PartialState& state) {
    state.main_process_first([&] {
      std::ofstream(path, std::ios::app) << state.process_index() << "\n" << std::flush;
    });
    state.wait_for_everyone();
    std::ifstream file(path);
    std::string line;
    std::vector<std::string> lines;
    while (std::getline(file, line)) lines.push_back(line);
    EXPECT_EQ(lines.size(), 3U);
    EXPECT_EQ(lines.at(0), "0");
    state.wait_for_everyone();
    if (state.is_main_process()) std::filesystem::remove(path);
  });
}

TEST(MainProcessFirst, LetsTheOthersThrowTheMessageWhenTheMainProcessFails) {
  on_processes(3, [](PartialState& state) {
    bool ran = false;
    const auto section = [&] {
      ran = true;
      if (state.is_main_process()) throw std::runtime_error("the disk is full");
    };
    if (state.is_main_process()) {
      EXPECT_THROW(state.main_process_first(section), std::runtime_error);
    } else {
      try {
        state.main_process_first(section);
        ADD_FAILURE() << "rank " << state.process_index() << " went on";
      } catch (const CommError& error) {
        EXPECT_EQ(error.rank(), 0);
        const std::string text = error.what();
        EXPECT_NE(text.find("rank 0, which goes first at "), std::string::npos) << text;
        EXPECT_NE(text.find("state_multi_test.cpp:"), std::string::npos) << text;
        EXPECT_NE(text.find("failed there: the disk is full"), std::string::npos) << text;
      }
      EXPECT_FALSE(ran);
    }
    // The next section is not hurt by the last.
    EXPECT_EQ(state.main_process_first([] { return 5; }), 5);
  });
}

TEST(LocalMainProcessFirst, LetsTheFirstOfEachHostGoFirst) {
  on_processes(4, {.processes_per_host = 2}, [](PartialState& state) {
    // Each process counts in the shared store; the first ones of the hosts are 1 and 2.
    const auto place = state.local_main_process_first([&] { return state.store()->add("n", 1); });
    EXPECT_EQ(place <= 2, state.is_local_main_process());
  });
}

TEST(LocalMainProcessFirst, LetsThoseThatWaitThrowWhenTheFirstOfAnotherHostFails) {
  on_processes(4, {.processes_per_host = 2}, [](PartialState& state) {
    const auto section = [&] {
      if (state.process_index() == 2) throw std::runtime_error("no disk here");
    };
    if (state.process_index() == 0) {
      EXPECT_NO_THROW(state.local_main_process_first(section));
    } else if (state.process_index() == 2) {
      EXPECT_THROW(state.local_main_process_first(section), std::runtime_error);
    }
    if (state.is_local_main_process()) return;
    try {
      state.local_main_process_first(section);
      ADD_FAILURE() << "rank " << state.process_index() << " went on";
    } catch (const CommError& error) {
      EXPECT_EQ(error.rank(), 2);
      EXPECT_TRUE(std::string(error.what()).ends_with("failed there: no disk here"))
          << error.what();
    }
  });
}

TEST(MainProcessFirst, MayBeTheLastThingThatProcess0Does) {
  // Rank 0 takes the store with it when it ends.
  on_processes(3, on_a_port(), [](PartialState& state) {
    EXPECT_EQ(state.main_process_first([] { return 1; }), 1);
  });
}

TEST(GatedFunctions, RunOnTheirProcessOnly) {
  on_processes(3, {.processes_per_host = 3}, [](PartialState& state) {
    const int rank = state.process_index();
    const auto where = [&](auto gated) { return gated().has_value(); };
    const auto f = [] { return 1; };
    EXPECT_EQ(where(state.on_main_process(f)), rank == 0);
    EXPECT_EQ(where(state.on_local_main_process(f)), rank == 0);
    EXPECT_EQ(where(state.on_last_process(f)), rank == 2);
    EXPECT_EQ(where(state.on_process(f, 1)), rank == 1);
    EXPECT_EQ(where(state.on_process(1)(f)), rank == 1);
    EXPECT_EQ(where(state.on_local_process(f, 2)), rank == 2);
    EXPECT_EQ(where(state.on_local_process(2)(f)), rank == 2);
  });
}

TEST(Worlds, FollowOneAnotherAfterAResetAndADestroyedGroup) {
  on_processes(2, [] {
    for (int world = 0; world < 3; ++world) {
      PartialState state;
      expect_a_working_group(state);
      EXPECT_EQ(state.main_process_first([&] { return world; }), world);
      state.wait_for_everyone();
      state.destroy_process_group();
      EXPECT_FALSE(state.process_group());
      EXPECT_THROW(state.wait_for_everyone(), StateError);
      PartialState::_reset_state();
    }
  });
}

TEST(Worlds, AdoptTheGroupThatOutlivedAReset) {
  on_processes(2, [] {
    PartialState state;
    const auto* group = state.process_group().get();
    PartialState::_reset_state();
    PartialState again;
    EXPECT_EQ(again.process_group().get(), group);
    EXPECT_EQ(again.num_processes(), 2);
    EXPECT_EQ(again.backend(), "gloo");
    again.wait_for_everyone();
    expect_a_working_group(again);
  });
}

TEST(Worlds, LeaveTheGroupOfAForkedProcessToItsLauncher) {
  on_processes(2, {.environment = {{"FORK_LAUNCHED", "1"}}}, [](PartialState& state) {
    state.destroy_process_group();
    EXPECT_TRUE(state.process_group());
    state.destroy_process_group(state.process_group());
    EXPECT_FALSE(state.process_group());
  });
}

TEST(Worlds, TakeAGroupThatTheProgramLendsAndOnlyLetGoOfIt) {
  on_processes(2, [] {
    const auto group = PartialState().process_group();
    PartialState::_reset_state();
    PartialState state({.process_group = group});
    EXPECT_EQ(state.num_processes(), 2);
    EXPECT_EQ(state.process_index(), rank_from_harness());
    EXPECT_EQ(state.backend(), "gloo");
    EXPECT_EQ(state.process_group(), group);
    // Failures are told through the group's own store.
    const auto fail_on_main = [&] {
      if (state.is_main_process()) throw ArgumentError("no");
    };
    EXPECT_THROW(state.main_process_first(fail_on_main), Error);
    state.wait_for_everyone();
    state.destroy_process_group();
    EXPECT_FALSE(state.process_group());
    group->barrier()->wait();
  });
}

TEST(Worlds, MeetAtAStoreThatTheProgramBringsAndFindTheirPlaceOnTheHost) {
  const auto path = scratch_file("store");
  on_processes(3, {.rendezvous = false}, [&] {
    const int rank = rank_from_harness();
    forget_launcher();
    const auto store = c10::make_intrusive<c10d::FileStore>(path, 3);
    PartialState state(
        {.store = c10::intrusive_ptr<c10d::Store>(store), .rank = rank, .world_size = 3});
    EXPECT_EQ(state.local_process_index(), rank);
    EXPECT_EQ(state.local_num_processes(), 3);
    EXPECT_EQ(state.num_machines(), 1);
    expect_a_working_group(state);
    state.wait_for_everyone();
  });
  std::filesystem::remove(path);
}

TEST(Worlds, CanBeSplitMoreThanOnce) {
  on_processes(3, [](PartialState& state) {
    const auto world = state.process_group();
    if (state.process_index() == 1) return;
    for (int round = 0; round < 2; ++round) {
      const auto pair =
          world->splitGroup({0, 2}, std::nullopt, std::nullopt, std::nullopt, std::nullopt);
      std::vector<at::Tensor> sum{torch::full({1}, 1 + state.process_index())};
      pair->allreduce(sum)->wait();
      EXPECT_EQ(pair->getSize(), 2);
      EXPECT_EQ(sum.front().item<int>(), 4);
    }
    const auto others = std::vector{1};
    EXPECT_THROW(
        (void)world->splitGroup(others, std::nullopt, std::nullopt, std::nullopt, std::nullopt),
        ArgumentError);
  });
}

TEST(Worlds, MeetAtAFile) {
  const auto path = scratch_file("file");
  on_processes(2, {.rendezvous = false}, [&] {
    const int rank = rank_from_harness();
    forget_launcher();
    PartialState state({.init_method = "file://" + path, .rank = rank, .world_size = 2});
    expect_a_working_group(state);
    state.wait_for_everyone();
  });
  std::filesystem::remove(path);
}

TEST(Worlds, MeetAtAnAddress) {
  on_processes(2, on_a_port(), [] {
    const int rank = rank_from_harness();
    const auto address = "tcp://127.0.0.1:" + Environment::process().get("MASTER_PORT").value();
    forget_launcher();
    PartialState state({.init_method = address, .rank = rank, .world_size = 2});
    expect_a_working_group(state);
    state.wait_for_everyone();
  });
}

TEST(Launchers, TorchrunIsUnderstood) {
  on_processes(2, on_a_port(), [](PartialState& state) {
    EXPECT_EQ(state.process_index(), rank_from_harness());
    expect_a_working_group(state);
    state.wait_for_everyone();
  });
}

TEST(HandedSocket, IsServedByRank0) {
  const ListeningSocket socket;
  on_processes(2, on_socket(socket), [] {
    const int fd = static_cast<int>(get_int_from_env({"ACCELERATE_MASTER_LISTEN_FD"}, -1));
    PartialState state;
    expect_a_working_group(state);
    // Nothing that this process starts looks for it, or keeps the port open.
    EXPECT_EQ(std::getenv("ACCELERATE_MASTER_LISTEN_FD"), nullptr);
    if (state.process_index() == 0) {
      EXPECT_EQ(::fcntl(fd, F_GETFD), FD_CLOEXEC);
    }
    state.wait_for_everyone();
  });
}

TEST(HandedSocket, IsServedByTheOnlyProcess) {
  const ListeningSocket socket;
  on_processes(1, on_socket(socket), [](PartialState& state) {
    EXPECT_EQ(state.num_processes(), 1);
    expect_a_working_group(state);
  });
}

TEST(HandedSocket, TakesAnIpv6Address) {
  if (!ListeningSocket::has_ipv6()) GTEST_SKIP() << "this machine has no IPv6";
  const ListeningSocket socket(AF_INET6);
  auto options = on_socket(socket);
  options.environment.emplace_back("MASTER_ADDR", "::1");
  on_processes(2, options, [](PartialState& state) { expect_a_working_group(state); });
}

TEST(HandedSocket, ServesOneWorldAfterAnother) {
  const ListeningSocket socket;
  on_processes(2, on_socket(socket), [] {
    for (int world = 0; world < 3; ++world) {
      PartialState state;
      expect_a_working_group(state);
      state.wait_for_everyone();
      state.destroy_process_group();
      PartialState::_reset_state();
    }
  });
}

TEST(HandedSocket, ServesTheNextWorldWhenTheFirstCouldNotBeMade) {
  const ListeningSocket socket;
  on_processes(2, on_socket(socket), [] {
    EXPECT_THROW(PartialState({.backend = "no_such_backend"}), Error);
    PartialState state;
    expect_a_working_group(state);
    state.wait_for_everyone();
  });
}

TEST(HandedSocket, IsServedAtTheAddressThatTheProgramNames) {
  const ListeningSocket socket;
  on_processes(2, on_socket(socket), [] {
    const auto address = "tcp://127.0.0.1:" + Environment::process().get("MASTER_PORT").value();
    PartialState state({.init_method = address, .rank = rank_from_harness(), .world_size = 2});
    expect_a_working_group(state);
    state.wait_for_everyone();
  });
}

TEST(HandedSocket, MayBeOfNoUse) {
  // A number that means nothing here, and a free port.
  auto options = on_a_port();
  options.environment.emplace_back("ACCELERATE_MASTER_LISTEN_FD", "7777");
  on_processes(2, options, [](PartialState& state) { expect_a_working_group(state); });
}

TEST(HandedSocket, IsNamedWhenItIsOfNoUseAndThePortIsTaken) {
  const ListeningSocket taken;
  auto options = on_socket(taken);
  options.listen_fd.reset();
  const auto text_for = [&](const std::string& told) {
    auto with_number = options;
    with_number.environment.emplace_back("ACCELERATE_MASTER_LISTEN_FD", told);
    return run_processes(1, with_number, [] { PartialState state; })[0].output;
  };
  const auto with_a_word = text_for("socket");
  const auto with_a_file = text_for("0");
  if (in_child_process()) return;
  EXPECT_NE(with_a_word.find("(ACCELERATE_MASTER_LISTEN_FD is 'socket', which cannot be used "
                             "instead: it is not a number)"),
            std::string::npos)
      << with_a_word;
  EXPECT_NE(with_a_file.find("(ACCELERATE_MASTER_LISTEN_FD is '0', which cannot be used instead: "
                             "it is not a socket)"),
            std::string::npos)
      << with_a_file;
}

TEST(Launchers, TheNumberOfProcessesOnAHostIsFoundOutWhereItIsNotTold) {
  on_processes(3, on_a_port(), [] {
    // Rank 0 is told, the others are not.
    if (rank_from_harness() != 0) ::unsetenv("LOCAL_WORLD_SIZE");
    PartialState state;
    EXPECT_EQ(state.local_process_index(), rank_from_harness());
    EXPECT_EQ(state.local_num_processes(), 3);
    EXPECT_EQ(state.num_machines(), 1);
    EXPECT_EQ(Environment::process().get("LOCAL_WORLD_SIZE"), "3");
    expect_a_working_group(state);
    state.wait_for_everyone();
  });
}

TEST(Launchers, OpenMpiIsUnderstoodAndItsNumbersArePassedOn) {
  on_processes(2, on_a_port(), [] {
    rename({{"RANK", "OMPI_COMM_WORLD_RANK"},
            {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"},
            {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"},
            {"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"}});
    ::unsetenv("MASTER_ADDR");
    PartialState state;
    expect_a_working_group(state);
    EXPECT_EQ(rank_from_harness(), state.process_index());  // RANK is there again
    EXPECT_EQ(Environment::process().get("LOCAL_WORLD_SIZE"), "2");
    EXPECT_EQ(Environment::process().get("MASTER_ADDR"), "127.0.0.1");
    state.wait_for_everyone();
  });
}

TEST(Launchers, SrunNeedsNoFlags) {
  // Two steps of one job on "two hosts", of which the first is found by its name.
  const std::string job = std::to_string(::getpid());
  on_processes(2,
               {.environment = {{"SLURM_JOB_ID", job},
                                {"SLURM_STEP_ID", "0"},
                                {"SLURM_STEP_NUM_NODES", "2"},
                                {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"},
                                {"SLURM_STEP_NODELIST", "localhost,n2"}},
                .rendezvous = false},
               [] {
                 ::setenv("SLURM_NODEID", std::getenv("RANK"), 1);
                 ::setenv("SLURM_LOCALID", "0", 1);
                 rename({{"RANK", "SLURM_PROCID"}, {"WORLD_SIZE", "SLURM_STEP_NUM_TASKS"}});
                 forget_launcher();
                 PartialState state;
                 EXPECT_EQ(state.num_processes(), 2);
                 EXPECT_TRUE(state.is_local_main_process());
                 EXPECT_EQ(state.num_machines(), 2);
                 expect_a_working_group(state);
                 state.wait_for_everyone();
               });
}

TEST(Launchers, AMissingAddressIsNamed) {
  on_processes(2, {.rendezvous = false, .processes_per_host = 1}, [] {
    ::unsetenv("MASTER_ADDR");
    try {
      PartialState state;
      ADD_FAILURE() << "met without an address";
    } catch (const ConfigError& error) {
      EXPECT_STREQ(error.what(),
                   "MASTER_ADDR is missing, and 2 processes cannot be known to run on one host "
                   "(this one has 1). Export the host name of rank 0 as MASTER_ADDR, or "
                   "LOCAL_WORLD_SIZE for a single host.");
    }
    EXPECT_FALSE(PartialState::initialized());
  });
}

TEST(Launchers, ARankThatNeverArrivesIsNamed) {
  on_processes(2, on_a_port(), [] {
    if (rank_from_harness() == 1) return;
    try {
      PartialState state({.timeout = std::chrono::milliseconds(1500)});
      ADD_FAILURE() << "met without rank 1";
    } catch (const CommError& error) {
      EXPECT_EQ(error.rank(), 1);
      EXPECT_NE(std::string(error.what()).find("missing rank 1"), std::string::npos)
          << error.what();
    }
    EXPECT_FALSE(PartialState::initialized());
  });
}

TEST(DebugMode, IsOnForAllWhenOneProcessHasIt) {
  const auto outcomes = run_processes(2, {}, [] {
    if (rank_from_harness() == 1) ::setenv("ACCELERATE_DEBUG_MODE", "1", 1);
    EXPECT_TRUE(PartialState().debug());
  });
  if (in_child_process()) return;
  EXPECT_TRUE(outcomes[0].ok()) << outcomes[0].output;
  EXPECT_TRUE(outcomes[1].ok()) << outcomes[1].output;
  EXPECT_TRUE(outcomes[0].output_contains(
      "ACCELERATE_DEBUG_MODE is on for some processes but not for rank 0: it is now on for all."))
      << outcomes[0].output;
}

TEST(Warnings, TellTheMainProcessThatSeveralProcessesWorkOnTheCpu) {
  if (is_cuda_available()) GTEST_SKIP() << "this machine has a GPU";
  const auto outcomes = run_processes(
      2, {.environment = {{"ACCELERATE_USE_CPU", std::nullopt}}}, [](PartialState& state) {
        EXPECT_EQ(state.distributed_type(), DistributedType::kMultiCpu);
        state.wait_for_everyone();
      });
  if (in_child_process()) return;
  const std::string text = "2 processes were started on a machine without accelerator";
  EXPECT_TRUE(outcomes[0].ok()) << outcomes[0].output;
  EXPECT_TRUE(outcomes[0].output_contains(text)) << outcomes[0].output;
  EXPECT_FALSE(outcomes[1].output_contains(text)) << outcomes[1].output;
}

TEST(Threads, AreSharedOutWhenNobodySaysHowMany) {
  on_processes(2, {.environment = {{"OMP_NUM_THREADS", std::nullopt}}}, [](PartialState&) {
    EXPECT_EQ(at::get_num_threads(), std::max(1, physical_core_count() / 2));
  });
}

TEST(AcceleratorStateOnProcesses, RefusesShardingWithoutEngineAndLeavesNothingBehind) {
  on_processes(2, {.environment = {{"ACCELERATE_USE_FSDP", "true"}}}, [] {
    try {
      AcceleratorState state({}, detail::state::FromAccelerator{});
      ADD_FAILURE() << "sharded without engine";
    } catch (const UnsupportedError& error) {
      EXPECT_STREQ(error.what(),
                   "Fully sharded data parallelism is asked for by ACCELERATE_USE_FSDP, but this "
                   "version has no engine for it yet. Leave it out: data parallelism keeps a whole "
                   "model on each process.");
    }
    EXPECT_FALSE(is_initialized());
    EXPECT_FALSE(PartialState::initialized());
    const AcceleratorState state({}, {.fsdp = true});
    EXPECT_EQ(state.distributed_type(), DistributedType::kFsdp);
    EXPECT_EQ(PartialState().distributed_type(), DistributedType::kFsdp);
    PartialState::_reset_state();
    EXPECT_EQ(AcceleratorState().distributed_type(), DistributedType::kFsdp);  // not lost with it
    state.wait_for_everyone();
  });
}

TEST(AcceleratorStateOnProcesses, TakesNoEngineAfterTheFirstConstruction) {
  on_processes(2, [] {
    const auto options = [](std::int64_t version) {
      return AcceleratorStateOptions{
          .mixed_precision = PrecisionType::kBf16,
          .fsdp_plugin = std::make_shared<FullyShardedDataParallelPlugin>(
              FullyShardedDataParallelPlugin{.fsdp_version = version})};
    };
    const detail::state::FromAccelerator engines{.fsdp = true};
    const AcceleratorState state(options(2), engines);
    EXPECT_TRUE(state.is_fsdp2());
    EXPECT_NO_THROW(AcceleratorState(options(2), engines)) << "the same again";
    try {
      AcceleratorState other(options(1), engines);
      ADD_FAILURE() << "another plugin was taken, or dropped";
    } catch (const ConfigError& error) {
      EXPECT_STREQ(error.what(),
                   "The accelerator state is already set up without this fsdp_plugin and cannot be "
                   "changed. Pass it to the first `Accelerator`, or leave it out.");
    }
    EXPECT_TRUE(state.is_fsdp2());
    state.wait_for_everyone();
  });
}

TEST(AcceleratorStateOnProcesses, RefusesAnotherGroupThanThatOfThePartialState) {
  on_processes(2, [] {
    using namespace std::chrono_literals;
    const auto refusal = [](const PartialStateOptions& options) {
      return message_of<ConfigError>([&] {
        AcceleratorState state({.process_group = options}, detail::state::FromAccelerator{});
      });
    };
    const PartialState partial({.timeout = 40s});
    const std::string remedy =
        " and cannot be changed. Pass it to the first `PartialState` or `Accelerator`, or leave it "
        "out.";
    const std::string set_up = ", but the state of this process is already set up with ";
    const auto other = partial.process_group()->splitGroup({0, 1}, std::nullopt, std::nullopt,
                                                           std::nullopt, std::nullopt);
    EXPECT_EQ(refusal({.process_group = other}),
              "process_group is given" + set_up + "another group" + remedy);
    EXPECT_EQ(refusal({.store = partial.store(), .rank = 0, .world_size = 2}),
              "store is given" + set_up + "no store of the program" + remedy);
    EXPECT_EQ(refusal({.timeout = 50s}), "timeout is 50000 ms" + set_up + "40000 ms" + remedy);
    EXPECT_EQ(refusal({.backend = "nccl"}), "backend is 'nccl'" + set_up + "'gloo'" + remedy);
    EXPECT_EQ(refusal({.init_method = "tcp://127.0.0.1:1"}),
              "init_method is 'tcp://127.0.0.1:1'" + set_up + "'env://'" + remedy);
    EXPECT_FALSE(AcceleratorState::initialized());

    // What is there may be asked for, by the first one and by those after it.
    const AcceleratorStateOptions same{.process_group = {.backend = "gloo",
                                                         .init_method = "env://",
                                                         .timeout = 40s,
                                                         .process_group = partial.process_group()}};
    const AcceleratorState first(same, detail::state::FromAccelerator{});
    EXPECT_EQ(AcceleratorState(same).timeout(), 40s);
    EXPECT_EQ(refusal({.timeout = 50s}), "timeout is 50000 ms" + set_up + "40000 ms" + remedy);
    first.wait_for_everyone();
  });
}

TEST(AcceleratorStateOnProcesses, TakesTheGroupOfOneProcessAsOftenAsItIsGiven) {
  on_processes(1, {.environment = {{"ACCELERATE_USE_CPU", std::nullopt}}}, [] {
    const auto group = c10::make_intrusive<c10d::ProcessGroup>(
        c10::intrusive_ptr<c10d::Store>(c10::make_intrusive<c10d::HashStore>()), 0, 1);
    const AcceleratorStateOptions options{.process_group = {.process_group = group}};
    const AcceleratorState first(options, detail::state::FromAccelerator{});
    EXPECT_NO_THROW(AcceleratorState{options});
  });
}

TEST(AcceleratorStateOnProcesses, MakesTheLastProcessTheMainOneWithMegatron) {
  on_processes(2, {.environment = {{"ACCELERATE_USE_MEGATRON_LM", "true"}}}, [] {
    const AcceleratorState state({}, {.megatron_lm = true});
    EXPECT_EQ(state.is_main_process(), state.process_index() == 1);
    EXPECT_EQ(state.is_local_main_process(), state.process_index() == 1);
    state.wait_for_everyone();
  });
}

}  // namespace
}  // namespace accelerate
