#include "launch/command.h"

#include <gtest/gtest.h>

#include <set>

#include "core/config.h"
#include "launch/flags.h"
#include "launch/planning.h"

namespace accelerate::detail::launch {
namespace {

std::string error_of(const std::string& line) {
  try {
    (void)parsed(line);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(LaunchArgumentsTest, TakeUnderscoresAndHyphensAlike) {
  for (const auto* line : {"--num_processes 2 x", "--num-processes 2 x", "--num_processes=2 x",
                           "--num-processes=2 x"}) {
    EXPECT_EQ(parsed(line).values.at("num_processes"), "2") << line;
  }
  const auto mixed = parsed("--num-processes 2 --num_machines 1 --main-process-port=5 x");
  EXPECT_EQ(mixed.values.size(), 3U);
}

TEST(LaunchArgumentsTest, RefuseAMixtureOfBothInOneFlag) {
  EXPECT_TRUE(has(error_of("--num-cpu_threads_per_process 2 x"),
                  "did you mean --num_cpu_threads_per_process?"));
}

TEST(LaunchArgumentsTest, GiveEveryWordBehindTheProgramToIt) {
  const auto arguments = parsed("--cpu ./train --cpu --num_processes 7 -m x");
  EXPECT_EQ(arguments.operands, (Words{"./train", "--cpu", "--num_processes", "7", "-m", "x"}));
  EXPECT_FALSE(arguments.typed("num_processes"));
}

TEST(LaunchArgumentsTest, EndTheFlagsAtTwoDashes) {
  const auto arguments = parsed("--cpu -- --odd-name a");
  EXPECT_EQ(arguments.operands, (Words{"--odd-name", "a"}));
}

TEST(LaunchArgumentsTest, KnowShortForms) {
  const auto arguments = parsed("-q -m -t 3 -r1 module");
  EXPECT_TRUE(arguments.on("quiet"));
  EXPECT_TRUE(arguments.on("module"));
  EXPECT_EQ(arguments.values.at("tee"), "3");
  EXPECT_EQ(arguments.values.at("redirects"), "1");
  EXPECT_TRUE(parsed("-qm module").on("module"));
}

TEST(LaunchArgumentsTest, RememberOnlyWhatWasTyped) {
  const auto arguments = parsed("--mixed_precision no x");
  EXPECT_TRUE(arguments.typed("mixed_precision"));
  EXPECT_FALSE(arguments.typed("dynamo_mode"));
}

TEST(LaunchArgumentsTest, SwitchOffWithNoInFront) {
  EXPECT_EQ(parsed("--no_same_network x").values.at("same_network"), "false");
  EXPECT_EQ(parsed("--no-tpu-cluster x").values.at("tpu_cluster"), "false");
  EXPECT_EQ(parsed("--cpu=false x").values.at("cpu"), "false");
  EXPECT_EQ(parsed("--no_python x").values.at("no_python"), "true");
  EXPECT_TRUE(has(error_of("--no_num_processes x"), "not a flag"));
}

TEST(LaunchArgumentsTest, TakeNoAbbreviations) {
  EXPECT_TRUE(has(error_of("--num_proc 2 x"), "--num_proc is not a flag"));
}

TEST(LaunchArgumentsTest, GuessWhatAWrongFlagMeans) {
  EXPECT_EQ(error_of("--num_procesess 2 x"),
            "--num_procesess is not a flag of accelerate launch; did you mean --num_processes?");
  EXPECT_TRUE(has(error_of("--mixed-precison bf16 x"), "did you mean --mixed_precision?"));
  EXPECT_TRUE(has(error_of("--something_else x"), "--help"));
}

TEST(LaunchArgumentsTest, TranslateTheFlagsOfTorchrun) {
  EXPECT_TRUE(has(error_of("--nnodes 2 x"), "did you mean --num_machines?"));
  EXPECT_TRUE(has(error_of("--master-addr h x"), "did you mean --main_process_ip?"));
}

TEST(LaunchArgumentsTest, ListTheChoicesForAWrongOne) {
  EXPECT_EQ(error_of("--mixed_precision bf61 x"),
            "--mixed_precision is 'bf61'. Choose one of: no, fp16, bf16, fp8.");
  EXPECT_TRUE(has(error_of("--deepspeed_multinode_launcher pdhs x"), "Choose one of: pdsh"));
}

TEST(LaunchArgumentsTest, NameAWrongNumberWithItsFlag) {
  EXPECT_EQ(error_of("--num_processes two x"),
            "--num_processes is 'two', expected a whole number.");
  EXPECT_EQ(error_of("--num_processes 2.5 x"),
            "--num_processes is '2.5', expected a whole number.");
  EXPECT_EQ(error_of("--monitor-interval soon x"),
            "--monitor-interval is 'soon', expected a number.");
  EXPECT_TRUE(has(error_of("--num_machines 3:2 x"), "MIN not above MAX"));
  EXPECT_TRUE(has(error_of("--num_machines 0 x"), "at least one machine"));
  EXPECT_TRUE(has(error_of("--num_machines 1:2:3 x"), "MIN:MAX"));
}

TEST(LaunchArgumentsTest, NameTheFlagThatMissesItsValue) {
  EXPECT_EQ(error_of("--num_processes"), "--num_processes needs a value.");
  EXPECT_EQ(error_of("--main_process_ip --cpu x"),
            "--main_process_ip needs a value, but --cpu follows.");
  EXPECT_EQ(parsed("--machine_rank -1 x").values.at("machine_rank"), "-1");
}

TEST(LaunchArgumentsTest, ReadTruthValuesInAllTheirWords) {
  for (const auto* word : {"true", "True", "YES", "on", "1", "t", "y"}) {
    EXPECT_EQ(parsed(std::string("--fsdp_offload_params ") + word + " x")
                  .values.at("fsdp_offload_params"),
              "true");
  }
  // Python takes any text for true here.
  EXPECT_EQ(parsed("--megatron_lm_no_load_optim False x").values.at("megatron_lm_no_load_optim"),
            "false");
  EXPECT_TRUE(has(error_of("--fsdp_offload_params maybe x"),
                  "--fsdp_offload_params is 'maybe', expected true or false"));
  const auto reshard = [](const std::string& word) {
    return parsed("--fsdp_reshard_after_forward " + word + " x")
        .values.at("fsdp_reshard_after_forward");
  };
  EXPECT_EQ(reshard("no"), "false");
  EXPECT_EQ(reshard("1"), "true");
  EXPECT_EQ(reshard("shard_grad_op"), "shard_grad_op");
  EXPECT_TRUE(has(error_of("--fsdp_reshard_after_forward banana x"),
                  "is 'banana'. Choose one of: true, false, FULL_SHARD"));
}

TEST(LaunchArgumentsTest, ReadTheTripleOfPrecisions) {
  EXPECT_EQ(parsed("--fp8_override_linear_precision true,no,1 x")
                .values.at("fp8_override_linear_precision"),
            "true,false,true");
  EXPECT_TRUE(has(error_of("--fp8_override_linear_precision true x"), "three truth values"));
}

TEST(LaunchArgumentsTest, TakeTheFormOfADryRunBehindTheSignOnly) {
  EXPECT_EQ(parsed("--dry_run x").values.at("dry_run"), "text");
  EXPECT_EQ(parsed("--dry-run=json x").values.at("dry_run"), "json");
  EXPECT_EQ(parsed("--dry_run json").operands, Words{"json"});
  EXPECT_TRUE(has(error_of("--dry_run=xml x"), "text, json"));
}

TEST(LaunchArgumentsTest, SayWhatIsMissingWithoutAProgram) {
  EXPECT_TRUE(has(error_of("--cpu"), "accelerate launch --num_processes 2 ./train"));
  EXPECT_TRUE(parsed("--cpu --help").help);
}

TEST(Flags, AreKnownByOneNameEach) {
  std::set<std::string> names;
  std::set<char> letters;
  for (const Flag& flag : launch_flags()) {
    EXPECT_TRUE(names.emplace(flag.name).second) << flag.name;
    if (flag.short_name != '\0') {
      EXPECT_TRUE(letters.insert(flag.short_name).second) << flag.name;
    }
    EXPECT_EQ(find_flag(flag.name), &flag);
  }
}

TEST(Flags, HaveDefaultsThatTheyTake) {
  for (const Flag& flag : launch_flags()) {
    if (flag.fallback.empty()) continue;
    EXPECT_EQ(canonical_value(flag, flag.fallback, flag.name), flag.fallback) << flag.name;
  }
}

TEST(Flags, CoverEveryKeyOfTheSectionsOfAFile) {
  // Under another name: what the questionnaire of Python writes.
  const std::set<std::string> old{"fp8_amax_compute_algorithm", "fp8_amax_history_length",
                                  "fp8_optimization_level"};
  for (const auto* section : {"deepspeed_config", "dynamo_config", "fp8_config", "fsdp_config",
                              "megatron_lm_config", "mpirun_config", "parallelism_config"}) {
    for (const auto& key : known_section_keys(section)) {
      const Flag* flag = find_flag(key);
      if (old.contains(key)) continue;
      ASSERT_NE(flag, nullptr) << key;
      EXPECT_EQ(flag->key, section) << key;
    }
  }
}

TEST(Flags, TakeWholeNumbersAsFilesWriteThem) {
  const Flag& flag = *find_flag("fsdp_min_num_params");
  EXPECT_EQ(canonical_value(flag, "1e8", "x"), "100000000");
  EXPECT_EQ(canonical_value(flag, " 7 ", "x"), "7");
}

}  // namespace
}  // namespace accelerate::detail::launch
