#include "launch/plan.h"

#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "core/text.h"
#include "launch/messages.h"
#include "launch/planning.h"

namespace accelerate::detail::launch {
namespace {

MachineFacts with_mpi(bool open_mpi) {
  auto facts = cores(8);
  facts.find_mpi = [open_mpi] { return MpiProgram{.program = "mpirun", .open_mpi = open_mpi}; };
  return facts;
}

std::string command(const std::string& line, const Around& around = {}) {
  return join(plan_of(line, around).argv, " ");
}

TEST(Command, IsTheProgramItself) {
  EXPECT_EQ(command("--num_processes 1 ./train --epochs 3"), "./train --epochs 3");
  EXPECT_EQ(command("--cpu --num_processes 2 ./train"), "./train");
}

TEST(Command, IsPythonForScriptsAndModules) {
  EXPECT_EQ(command("--num_processes 1 train.py -u"), "python3 train.py -u");
  EXPECT_EQ(command("--num_processes 1 -m package.train"), "python3 -m package.train");
  EXPECT_EQ(command("--cpu --num_processes 2 train.py"), "python3 -u train.py");
  EXPECT_EQ(command("--cpu --num_processes 2 --module a.b"), "python3 -u -m a.b");
  EXPECT_EQ(command("--no_python train.py"), "train.py");
  EXPECT_EQ(command("train.py", {{{"PYTHON_EXEC", "/opt/python"}}}), "/opt/python train.py");
}

TEST(Command, KeepsTheNameOfTheProgramForReports) {
  EXPECT_EQ(plan_of("--cpu --num_processes 2 dir/train.py a").program, "dir/train.py");
  EXPECT_EQ(plan_of("--cpu --num_processes 2 -m a.b").program, "a.b");
  EXPECT_EQ(plan_of("--cpu --num_processes 2 ./train").program, "./train");
}

TEST(Command, IsThatOfIntelMpiWithAHostfile) {
  EXPECT_EQ(command("--cpu --num_processes 16 --num_machines 4 --mpirun_hostfile "
                    "/home/user/hostfile --main_process_ip h --main_process_port 5 prog --cpu",
                    {{}, {}, with_mpi(false)}),
            "mpirun -f /home/user/hostfile -ppn 4 -n 16 prog --cpu");
}

TEST(Command, GivesOpenMpiTheNamesOfTheVariables) {
  const auto plan =
      plan_of("--cpu --num_processes 4 --mpirun_hostfile hosts train.py", {{}, {}, with_mpi(true)});
  EXPECT_EQ(plan.mode, LaunchMode::kCommand);
  const auto text = join(plan.argv, " ");
  EXPECT_TRUE(
      starts(text, "mpirun --hostfile hosts --npernode 4 -n 4 --bind-to socket -x ACCELERATE_"));
  for (const auto& [name, value] : plan.variables) EXPECT_TRUE(has(text, "-x " + name + " "));
  EXPECT_TRUE(text.ends_with(" python3 train.py"));
}

TEST(Command, BindsAsTheFlagSays) {
  EXPECT_TRUE(has(command("--cpu --num_processes 2 --mpirun_hostfile h --mpirun_bind_to core x",
                          {{}, {}, with_mpi(true)}),
                  "--bind-to core"));
}

TEST(Command, TakesTheHostfileOfTheConfiguration) {
  const std::string file = config("MULTI_CPU",
                                  "num_processes: 2\nuse_cpu: true\nmpirun_config:\n"
                                  "  mpirun_hostfile: hosts\n  mpirun_ccl: '4'\n");
  const auto plan = plan_of("./train", {{}, file, with_mpi(false)});
  EXPECT_EQ(join(plan.argv, " "), "mpirun -f hosts -ppn 2 -n 2 ./train");
  EXPECT_EQ(plan.argv.at(plan.program_at), "./train");
  EXPECT_EQ(variable(plan, "CCL_WORKER_COUNT"), "4");
}

TEST(Command, NeedsAnMpirun) {
  EXPECT_TRUE(has(refusal_of("--cpu --num_processes 2 --mpirun_hostfile h x"),
                  "Install Open MPI, Intel MPI or MVAPICH"));
}

TEST(Command, NeedsAddressAndPortWithMpiOnSeveralMachines) {
  const Around around{{}, {}, with_mpi(true)};
  EXPECT_TRUE(
      has(refusal_of("--cpu --num_processes 2 --num_machines 2 --mpirun_hostfile h x", around),
          "--main_process_ip is missing"));
  EXPECT_TRUE(has(refusal_of("--cpu --num_processes 2 --num_machines 2 --mpirun_hostfile h "
                             "--main_process_ip a x",
                             around),
                  "--main_process_port is missing"));
}

TEST(Command, IsDeepSpeedsOwnOnSeveralMachines) {
  const std::string line =
      "--use_deepspeed --num_processes 8 --num_machines 2 --main_process_ip a "
      "--deepspeed_hostfile hosts ";
  const Around around{{}, {}, gpus(4)};
  EXPECT_EQ(command(line + "train.py --x", around),
            "deepspeed --hostfile hosts --no_local_rank --launcher pdsh --num_gpus 4 "
            "--master_addr a --master_port 29500 train.py --x");
  EXPECT_EQ(command(line + "--deepspeed_multinode_launcher nossh --machine_rank 1 "
                           "--deepspeed_exclusion_filter b@c ./native",
                    around),
            "deepspeed --hostfile hosts --node_rank 1 --no_ssh --exclude b@c --master_addr a "
            "--master_port 29500 --no_python ./native");
  EXPECT_TRUE(has(command(line + "--deepspeed_inclusion_filter b@c -m pkg", around),
                  "--include b@c --master_addr a --master_port 29500 --module pkg"));
}

TEST(Command, TellsDeepSpeedsLauncherTheVariablesForOtherMachines) {
  const auto plan =
      plan_of("--use_deepspeed --num_processes 8 --num_machines 2 --zero_stage 3 train.py",
              {{}, {}, gpus(4)});
  EXPECT_TRUE(has(join(plan.deepspeed_environment, ""), "ACCELERATE_DEEPSPEED_ZERO_STAGE=3\n"));
  EXPECT_EQ(variable(plan, "OMP_NUM_THREADS"), "not set");
}

TEST(Command, LeavesSeveralMachinesToOurAgentsWithTheStandardLauncher) {
  const auto plan = plan_of(
      "--use_deepspeed --num_processes 8 --num_machines 2 --machine_rank 1 "
      "--main_process_ip a --deepspeed_multinode_launcher standard train.py",
      {{}, {}, gpus(4)});
  EXPECT_EQ(plan.mode, LaunchMode::kAgent);
  EXPECT_EQ(plan.agent.node_rank, 1);
  EXPECT_EQ(plan.agent.nproc_per_node, 4);
}

TEST(AgentSettings, ComeFromTheFlags) {
  const auto plan = plan_of(
      "--multi_gpu --num_processes 4 --num_machines 2 --machine_rank 1 --main_process_ip head "
      "--main_process_port 5000 --rdzv_conf timeout=60,last_call_timeout=5 --rdzv_id run7 "
      "--max_restarts 3 --monitor_interval 0.5 --role worker --tee 3 --redirects 0:1 "
      "--log_dir /logs --local_ranks_filter 0,1 --log_line_prefix_template ${rank} "
      "--signals_to_handle SIGTERM,SIGUSR1 --shutdown_timeout 7 --local_addr 10.0.0.2 x",
      {{}, {}, gpus(2)});
  const LaunchConfig& agent = plan.agent;
  EXPECT_EQ(agent.min_nodes, 2);
  EXPECT_EQ(agent.max_nodes, 2);
  EXPECT_EQ(agent.nproc_per_node, 2);
  EXPECT_EQ(agent.node_rank, 1);
  EXPECT_EQ(agent.master_addr, "head");
  EXPECT_EQ(agent.master_port, 5000);
  EXPECT_EQ(agent.rdzv_backend, "static");
  EXPECT_EQ(agent.rdzv_configs.at("timeout"), "60");
  EXPECT_EQ(agent.run_id, "run7");
  EXPECT_EQ(agent.max_restarts, 3);
  EXPECT_EQ(agent.monitor_interval, 0.5);
  EXPECT_EQ(agent.role, "worker");
  EXPECT_EQ(agent.logs.tee.all, Streams::kBoth);
  EXPECT_EQ(agent.logs.redirects.of(0), Streams::kOutput);
  EXPECT_EQ(agent.logs.log_dir, "/logs");
  EXPECT_EQ(agent.logs.local_ranks_filter, (std::vector<int>{0, 1}));
  EXPECT_EQ(agent.log_line_prefix_template, "${rank}");
  EXPECT_EQ(agent.signals_to_handle, (std::vector<int>{SIGTERM, SIGUSR1}));
  EXPECT_EQ(agent.shutdown_timeout, std::chrono::seconds(7));
  EXPECT_EQ(agent.local_addr, "10.0.0.2");
}

TEST(AgentSettings, ComeFromTheVariablesOfTorchrun) {
  const auto plan =
      plan_of("--cpu --num_processes 2 x", {{{"PET_RDZV_ID", "job"},
                                             {"PET_REDIRECTS", "3"},
                                             {"PET_LOCAL_ADDR", "10.1.1.1"},
                                             {"PET_LOCAL_RANKS_FILTER", "1"},
                                             {"PET_SIGNALS_TO_HANDLE", "SIGUSR2"},
                                             {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${rank}]"},
                                             {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5"}}});
  EXPECT_EQ(plan.agent.run_id, "job");
  EXPECT_EQ(plan.agent.logs.redirects.all, Streams::kBoth);
  EXPECT_EQ(plan.agent.local_addr, "10.1.1.1");
  EXPECT_EQ(plan.agent.logs.local_ranks_filter, std::vector<int>{1});
  EXPECT_EQ(plan.agent.signals_to_handle, std::vector<int>{SIGUSR2});
  EXPECT_EQ(plan.agent.log_line_prefix_template, "[${rank}]");
  EXPECT_EQ(plan.agent.shutdown_timeout, std::chrono::seconds(5));
}

TEST(AgentSettings, StayOnThisMachineWhenThereIsOneOnly) {
  const auto plan = plan_of("--cpu --num_processes 2 x", {{{"MASTER_ADDR", "far.away"}}});
  EXPECT_EQ(plan.agent.master_addr, "127.0.0.1");
  EXPECT_EQ(plan.agent.master_port, 29500);
  EXPECT_EQ(plan_of("--cpu --num_processes 2 --main_process_port 0 x").agent.master_port, 0);
}

TEST(AgentSettings, NeedNoRankWhereMachinesComeAndGo) {
  const auto plan =
      plan_of("--cpu --num_processes 4 --num_machines 2 --rdzv_backend c10d --main_process_ip h x");
  EXPECT_TRUE(plan.agent.elastic());
  EXPECT_EQ(plan.agent.nproc_per_node, 2);
}

TEST(WorkerVariables, SayWhereAWorkerIs) {
  // The second of three workers on the second of two machines.
  const LaunchConfig agent{.nproc_per_node = 3,
                           .run_id = "run",
                           .role = "trainer",
                           .master_addr = "head",
                           .master_port = 5000,
                           .max_restarts = 3};
  const LaunchRound round{
      .restart_count = 2, .node_rank = 1, .nodes = 2, .first_rank = 3, .world_size = 6};
  EXPECT_EQ(worker_variables(agent, round, 1, /*agent_store=*/true, Environment()),
            (Variables{{"LOCAL_RANK", "1"},
                       {"RANK", "4"},
                       {"GROUP_RANK", "1"},
                       {"ROLE_RANK", "4"},
                       {"ROLE_NAME", "trainer"},
                       {"LOCAL_WORLD_SIZE", "3"},
                       {"WORLD_SIZE", "6"},
                       {"GROUP_WORLD_SIZE", "2"},
                       {"ROLE_WORLD_SIZE", "6"},
                       {"MASTER_ADDR", "head"},
                       {"MASTER_PORT", "5000"},
                       {"TORCHELASTIC_RESTART_COUNT", "2"},
                       {"TORCHELASTIC_MAX_RESTARTS", "3"},
                       {"TORCHELASTIC_RUN_ID", "run"},
                       {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                       {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"}}));
}

TEST(WorkerVariables, KeepTheErrorHandlingOfNccl) {
  const Environment outer(Variables{{"TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"}});
  const auto variables = worker_variables({}, {}, 0, /*agent_store=*/false, outer);
  EXPECT_EQ(variables.at("TORCH_NCCL_ASYNC_ERROR_HANDLING"), "0");
  EXPECT_EQ(variables.at("TORCHELASTIC_USE_AGENT_STORE"), "False");
}

TEST(WorkerArguments, HaveTheLocalRankPutIn) {
  EXPECT_EQ(
      worker_arguments({"x", "--gpu=${local_rank}", "${local_rank}${local_rank}", "$rank"}, 3),
      (Words{"x", "--gpu=3", "33", "$rank"}));
}

TEST(MachineFactsTest, CountTheDevicesThatTheDriverWouldShow) {
  EXPECT_EQ(count_visible_devices("", 8), 0);
  EXPECT_EQ(count_visible_devices("0,1", 8), 2);
  EXPECT_EQ(count_visible_devices("-1", 8), 0);
  EXPECT_EQ(count_visible_devices("0,-1,2", 8), 1);
  EXPECT_EQ(count_visible_devices("0,9,2", 8), 1);
  EXPECT_EQ(count_visible_devices("1,1", 8), 0);
  EXPECT_EQ(count_visible_devices("GPU-1a2b, MIG-3c", 1), 2);
}

TEST(MachineFactsTest, FindGpusInTheFilesOfTheKernel) {
  const std::filesystem::path root = testing::TempDir() + "/launch_facts";
  std::filesystem::remove_all(root);
  const auto write = [&](const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text;
  };
  for (const auto* name : {"nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"}) {
    write(std::string("dev/") + name, "");
  }
  const std::string information = "Model: \t\t NVIDIA GeForce RTX 4090\nIRQ: 7\n";
  write("proc/driver/nvidia/gpus/0000:01:00.0/information", information);
  write("proc/driver/nvidia/gpus/0000:02:00.0/information", information);
  write("proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\nGCC version: "
        "12.2\n");
  const auto facts = nvidia_facts(root / "dev", {.sys = root / "sys", .proc = root / "proc"});
  EXPECT_EQ(facts.device_count, 2);
  EXPECT_EQ(facts.names, (Words{"NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"}));
  EXPECT_EQ(facts.driver_version, "535.104.05");
  EXPECT_EQ(nvidia_facts(root / "no", {.sys = root / "sys", .proc = root / "proc"}).device_count,
            0);
}

TEST(MachineFactsTest, TellOpenMpiFromOthers) {
  EXPECT_TRUE(is_open_mpi("mpirun (Open MPI) 4.1.4\n"));
  EXPECT_FALSE(is_open_mpi("Intel(R) MPI Library for Linux* OS, Version 2021.6\n"));
}

TEST(MachineFactsTest, AreGatheredHere) {
  const auto facts = gather_machine_facts(Environment::process());
  EXPECT_FALSE(facts.host_name.empty());
  EXPECT_GE(facts.physical_cores(), 1);
  EXPECT_LE(facts.visible_count, facts.device_count);
}

}  // namespace
}  // namespace accelerate::detail::launch
