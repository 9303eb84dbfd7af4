#include "launch/dry_run.h"

#include <gtest/gtest.h>

#include "core/json.h"
#include "launch/planning.h"

namespace accelerate::detail::launch {
namespace {

std::string text_of(const std::string& line, const Around& around = {}) {
  const auto plan = plan_of(line, around);
  return dry_run_text(plan, planned_processes(plan, Environment(around.environment), true));
}

Value json_of(const std::string& line, const Around& around = {}) {
  const auto plan = plan_of(line, around);
  return json_loads(
      dry_run_json(plan, planned_processes(plan, Environment(around.environment), false)));
}

TEST(DryRun, ShowsEverySettingWithItsSource) {
  const auto text =
      text_of("--num_processes 2 x",
              {{{"MASTER_PORT", "77"}}, config("MULTI_GPU", "mixed_precision: bf16\n"), gpus(2)});
  EXPECT_TRUE(has(text, "num_processes = 2  (flag)\n"));
  EXPECT_TRUE(has(text, "main_process_port = 77  (environment MASTER_PORT)\n"));
  EXPECT_TRUE(has(text, "mixed_precision = bf16  (config team.yaml)\n"));
  EXPECT_TRUE(has(text, "num_machines = 1  (default)\n"));
}

TEST(DryRun, ShowsEachProcessWithItsRankAndVariables) {
  const auto text = text_of(
      "--num_processes 6 --num_machines 2 --machine_rank 1 --main_process_ip h x ${local_rank}",
      {{}, {}, gpus(3)});
  EXPECT_TRUE(has(text, "agent: 3 processes here, 2 machines\n"));
  EXPECT_TRUE(has(text, "\nrank 3: x 0\n"));
  EXPECT_TRUE(has(text, "\nrank 5: x 2\n"));
  EXPECT_TRUE(has(text, "  RANK=5\n"));
  EXPECT_TRUE(has(text, "  MASTER_ADDR=h\n"));
  EXPECT_FALSE(has(text, "rank 0:"));
}

TEST(DryRun, ShowsASimpleRunWithoutRank) {
  const auto text = text_of("--num_processes 1 ./a 'b'", {{}, {}, gpus(1)});
  EXPECT_TRUE(has(text, "simple: this process becomes the program"));
  EXPECT_TRUE(has(text, "process: ./a"));
  EXPECT_FALSE(has(text, "RANK="));
}

TEST(DryRun, LeavesRanksOpenWhereMachinesComeAndGo) {
  const auto text =
      text_of("--num_processes 4 --num_machines 1:2 --rdzv_backend c10d --main_process_ip h x");
  EXPECT_TRUE(has(text, "1 to 2 machines"));
  EXPECT_TRUE(has(text, "local rank 1 (ranks are given when the machines meet): x"));
  EXPECT_FALSE(has(text, "  RANK="));
  EXPECT_FALSE(has(text, "  WORLD_SIZE="));
}

TEST(DryRun, SaysThatAPortIsStillToBeChosen) {
  EXPECT_TRUE(has(text_of("--cpu --num_processes 2 --main_process_port 0 x"),
                  "MASTER_PORT=0  (a free one is taken)"));
}

TEST(DryRun, DoesNotShowItself) { EXPECT_FALSE(has(text_of("--dry_run --cpu x"), "dry_run")); }

TEST(DryRun, IsTheSameAsJson) {
  const auto json = json_of("--cpu --num_processes 2 --max_restarts 1 train.py a");
  EXPECT_EQ(json.at("mode"), "agent");
  EXPECT_EQ(json.at("command"), Value::list({"python3", "-u", "train.py", "a"}));
  EXPECT_EQ(json.at("variables").at("ACCELERATE_USE_CPU"), "True");
  EXPECT_EQ(json.at("agent").at("nproc_per_node"), 2);
  EXPECT_EQ(json.at("agent").at("max_restarts"), 1);
  const auto& processes = json.at("processes").as_list();
  ASSERT_EQ(processes.size(), 2U);
  EXPECT_EQ(processes[1].at("rank"), 1);
  EXPECT_EQ(processes[1].at("local_rank"), 1);
  EXPECT_EQ(processes[1].at("command"), Value::list({"python3", "-u", "train.py", "a"}));
  EXPECT_EQ(processes[1].at("environment").at("RANK"), "1");
  EXPECT_EQ(processes[1].at("environment").at("TORCHELASTIC_USE_AGENT_STORE"), "False");
  EXPECT_EQ(processes[1].as_dict().size(), 4U);
  EXPECT_TRUE(json.at("warnings").as_list().empty());
  EXPECT_EQ(json_of("--cpu train.py").at("warnings").as_list().size(), 1U);
}

TEST(DryRun, HasSourcesInJson) {
  const auto json = json_of("--cpu x", {{{"MASTER_PORT", "7"}}});
  const auto& settings = json.at("settings");
  EXPECT_EQ(settings.at("cpu"),
            Value(Value::Dict{{"value", "true"}, {"source", "flag"}, {"from", Value()}}));
  EXPECT_EQ(settings.at("main_process_port"),
            Value(Value::Dict{{"value", "7"}, {"source", "environment"}, {"from", "MASTER_PORT"}}));
  EXPECT_EQ(settings.at("num_machines").at("source"), "default");
  const auto from_file = json_of("x", {{}, config("'NO'", "mixed_precision: bf16\n"), gpus(1)});
  EXPECT_EQ(from_file.at("settings").at("mixed_precision"),
            Value(Value::Dict{{"value", "bf16"}, {"source", "config"}, {"from", "team.yaml"}}));
  EXPECT_EQ(json.at("mode"), "simple");
  EXPECT_TRUE(json.at("agent").is_none());
  EXPECT_TRUE(json.at("processes").as_list().front().at("rank").is_none());
}

TEST(ShellLine, QuotesWhatAShellWouldTakeApart) {
  EXPECT_EQ(shell_line({"./a", "b c", "it's", "", "--x=1"}), R"(./a 'b c' 'it'\''s' '' --x=1)");
}

}  // namespace
}  // namespace accelerate::detail::launch
