#include "launch/checks.h"

#include <gtest/gtest.h>

#include "launch/planning.h"

namespace accelerate::detail::launch {
namespace {

TEST(AgentFlags, TakeAnAgentForOneProcessThatIsToBeRestartedOrLogged) {
  for (const auto* flags :
       {"--max_restarts 2", "--tee 3", "--redirects 1", "--log_dir logs", "--local_ranks_filter 0",
        "--signals_to_handle SIGTERM", "--shutdown_timeout 5"}) {
    for (const auto* start : {"--cpu --num_processes 1 ", "--num_processes 1 "}) {
      const auto plan = plan_of(std::string(start) + flags + " x", {{}, {}, gpus(1)});
      EXPECT_EQ(plan.mode, LaunchMode::kAgent) << flags;
      EXPECT_EQ(plan.agent.nproc_per_node, 1) << flags;
      EXPECT_FALSE(has(warnings(plan), "no effect")) << flags;
    }
  }
  // What is the default anyway asks for nothing.
  const auto plan = plan_of("--cpu --max_restarts 0 --tee 0 --shutdown_timeout 30 x");
  EXPECT_EQ(plan.mode, LaunchMode::kSimple);
  EXPECT_FALSE(has(warnings(plan), "no effect"));
}

TEST(IdleFlags, AreThoseOfAnEngineThatIsNotUsed) {
  EXPECT_TRUE(has(warnings(plan_of("--fsdp_version 2 --num_processes 1 x")),
                  "--fsdp_version has no effect here"));
}

struct IdleCase {
  std::string line;
  Variables environment;
  std::string idle;
};
const Variables kMpiJob{{"OMPI_COMM_WORLD_SIZE", "2"},
                        {"OMPI_COMM_WORLD_RANK", "0"},
                        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                        {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}};
const std::vector<IdleCase> kIdleCases{
    {"--num_processes 2 --main_process_ip h x", {}, "--main_process_ip has"},
    {"--num_processes 2 --machine_rank 5 x", {}, "--machine_rank has"},
    {"--num_processes 2 --same_network --rdzv_conf timeout=5 --local_addr a x",
     {},
     "--same_network, --rdzv_conf, --local_addr have"},
    {"--num_processes 1 --main_process_ip h --main_process_port 7 x",
     {},
     "--main_process_ip, --main_process_port have"},
    {"--num_processes 1 --rdzv_id a --role b --monitor_interval 1 x",
     {},
     "--rdzv_id, --monitor_interval, --role have"},
    {"--multi_gpu --num_processes 2 --mpirun_hostfile h --mpirun_bind_to core x",
     {},
     "--mpirun_hostfile, --mpirun_bind_to have"},
    {"--cpu --num_processes 2 --max_restarts 2 --tee 3 x", kMpiJob, "--max_restarts, --tee have"},
    {"--use_deepspeed --dynamo_backend inductor x", {}, "--dynamo_backend has"},
    {"--num_processes 2 --num_machines 2 --machine_rank 1 --rdzv_backend c10d "
     "--main_process_ip h x",
     {},
     "--machine_rank has"},
};

TEST(IdleFlags, AreAllThatAreTypedAndHaveNoUse) {
  for (const auto& [line, environment, idle] : kIdleCases) {
    EXPECT_TRUE(has(warnings(plan_of(line, {environment, {}, gpus(2)})),
                    idle + " no effect here: this run does not use "))
        << line;
  }
  for (const auto* line :
       {"--num_processes 2 --machine_rank 0 --main_process_port 7 --rdzv_id a --role b x",
        "--num_processes 2 --num_machines 2 --machine_rank 1 --main_process_ip h --same_network "
        "--rdzv_conf timeout=5 --local_addr a x",
        "--num_processes 1 --no_same_network --role default x"}) {
    EXPECT_FALSE(has(warnings(plan_of(line, {{}, {}, gpus(2)})), "no effect")) << line;
  }
}

TEST(IdleFlags, AreShownAsTheyAre) {
  const Around around{{}, {}, gpus(2)};
  const auto mpi = plan_of("--multi_gpu --num_processes 2 --mpirun_hostfile h x", around);
  EXPECT_EQ(setting(mpi, "mpirun_hostfile"), "h (flag)");
  EXPECT_EQ(setting(mpi, "mpirun_bind_to"), "not there");
}

TEST(IdleFlags, AreNumbersOfProcessesInsideOfAJob) {
  EXPECT_TRUE(has(warnings(plan_of("--cpu --num_processes 8 x", {kMpiJob})),
                  "--num_processes 8 starts no more processes here: this launcher is one of 2 in "
                  "an MPI job"));
  const Variables torchrun{{"WORLD_SIZE", "2"}, {"RANK", "1"}, {"LOCAL_RANK", "1"}};
  EXPECT_TRUE(has(warnings(plan_of("--cpu --num_processes 8 x", {torchrun})),
                  "one of 2 in a torchrun job"));
  EXPECT_FALSE(has(warnings(plan_of("--cpu --num_processes 2 x", {torchrun})), "starts no more"));
}

TEST(IdleFlags, AreSettingsOfTorchrunsMeeting) {
  const auto plan = plan_of(
      "--num_processes 4 --num_machines 2 --machine_rank 0 --main_process_ip h "
      "--rdzv_conf read_timeout=60,timeout=5 x",
      {{}, {}, gpus(2)});
  EXPECT_TRUE(has(warnings(plan), "--rdzv_conf read_timeout has no effect here"));
  EXPECT_EQ(plan.agent.rdzv_configs, (Variables{{"timeout", "5"}}));
  EXPECT_TRUE(has(refusal_of("--rdzv_conf reed_timeout=60 x"), "no setting 'reed_timeout'"));
}

TEST(LocalRank, IsThatOfTheLauncherWhichBecomesAWorker) {
  const auto command = [](const Variables& environment) {
    return plan_of("--cpu x ${local_rank}", {environment}).argv;
  };
  EXPECT_EQ(command({}), (Words{"x", "0"}));
  EXPECT_EQ(command({{"LOCAL_RANK", "3"}}), (Words{"x", "0"})) << "no job, a left-over";
  EXPECT_EQ(command(kMpiJob), (Words{"x", "1"}));
  EXPECT_EQ(command({{"WORLD_SIZE", "2"}, {"RANK", "1"}, {"LOCAL_RANK", "1"}}), (Words{"x", "1"}));
}

}  // namespace
}  // namespace accelerate::detail::launch
