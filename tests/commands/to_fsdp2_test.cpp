#include "commands/to_fsdp2.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "commands/running.h"
#include "core/files.h"
#include "core/yaml.h"

namespace accelerate::detail::commands {
namespace {

namespace fs = std::filesystem;

Value::Dict fsdp_of(const std::string& yaml) {
  return convert_to_fsdp2(yaml_loads(yaml).as_dict()).config.at("fsdp_config").as_dict();
}

TEST(ToFsdp2, TurnsAStrategyIntoReshardAfterForward) {
  for (const auto& [strategy, reshards] :
       std::vector<std::pair<std::string, Value>>{{"FULL_SHARD", true},
                                                  {"HYBRID_SHARD", true},
                                                  {"SHARD_GRAD_OP", false},
                                                  {"HYBRID_SHARD_ZERO2", false},
                                                  {"NO_SHARD", false},
                                                  {"'1'", "1"}}) {
    for (const std::string key : {"fsdp_sharding_strategy", "fsdp_reshard_after_forward"}) {
      EXPECT_EQ(fsdp_of("fsdp_config: {" + key + ": " + strategy + "}"),
                (Value::Dict{{"fsdp_reshard_after_forward", reshards}, {"fsdp_version", 2}}))
          << key << " " << strategy;
    }
  }
}

TEST(ToFsdp2, RemovesWhatVersion2DoesNotHaveAndSaysSo) {
  const auto conversion = convert_to_fsdp2(
      yaml_loads("fsdp_config: {fsdp_backward_prefetch: X, fsdp_sync_module_states: true, "
                 "fsdp_use_orig_params: true, fsdp_forward_prefetch: false, "
                 "fsdp_min_num_params: 7, own_key: 1}")
          .as_dict());
  EXPECT_EQ(conversion.config.at("fsdp_config"),
            (Value::Dict{{"fsdp_min_num_params", 7}, {"own_key", 1}, {"fsdp_version", 2}}));
  EXPECT_EQ(
      conversion.notices,
      (Words{"Argument fsdp_backward_prefetch has been removed in FSDP2, skipping this key...",
             "Argument fsdp_sync_module_states has been removed in FSDP2, skipping this key...",
             "Argument fsdp_use_orig_params has been removed in FSDP2, skipping this key...",
             "Argument fsdp_forward_prefetch is not yet implemented in FSDP2, skipping this "
             "key..."}));
}

TEST(ToFsdp2, LeavesAConfigurationOfVersion2OrWithoutFsdpAlone) {
  for (const auto* text : {"{a: 1}", "{fsdp_config: {}, a: null}",
                           "{fsdp_config: {fsdp_version: 2, fsdp_use_orig_params: true}}"}) {
    const auto config = yaml_loads(text).as_dict();
    const auto conversion = convert_to_fsdp2(config);
    EXPECT_EQ(conversion.config, config);
    EXPECT_EQ(conversion.notices.size(), 1U);
  }
}

TEST(ToFsdp2, TakesTheLaterOfTwoStrategies) {
  const auto conversion = convert_to_fsdp2(
      yaml_loads(
          "fsdp_config: {fsdp_reshard_after_forward: true, fsdp_sharding_strategy: NO_SHARD}")
          .as_dict());
  EXPECT_EQ(conversion.config.at("fsdp_config").at("fsdp_reshard_after_forward"), false);
  EXPECT_TRUE(has(conversion.notices.at(0), "the later one of them is taken"));
}

class ToFsdp2Command : public testing::Test {
 protected:
  ToFsdp2Command() {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    std::ofstream(old_) << "fsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\nnum_processes: 2\n";
  }
  Ran convert(const Words& flags) const {
    Words argv{kAccelerate, "to-fsdp2"};
    argv.insert(argv.end(), flags.begin(), flags.end());
    return ran(argv, {.folder = folder_});
  }

  const fs::path folder_ = testing::TempDir() + "/to_fsdp2";
  const fs::path old_ = folder_ / "old.yaml";
  const std::string converted_ =
      "fsdp_config:\n  fsdp_reshard_after_forward: true\n  fsdp_version: 2\nnum_processes: 2\n";
};

TEST_F(ToFsdp2Command, WritesANewFileOrOverTheOldOne) {
  EXPECT_EQ(convert({"--config_file", "old.yaml", "--output_file", "new.yaml"}).code, 0);
  EXPECT_EQ(read_whole_file(folder_ / "new.yaml"), converted_);
  EXPECT_EQ(convert({"--config_file", "old.yaml", "--overwrite"}).code, 0);
  EXPECT_EQ(read_whole_file(old_), converted_);
}

TEST_F(ToFsdp2Command, RefusesWithPythonsWords) {
  std::ofstream(folder_ / "empty.yaml") << "";
  std::ofstream(folder_ / "there.yaml") << "a: 1\n";
  for (const auto& [flags, message] : std::vector<std::pair<Words, std::string>>{
           {{}, "Name the file to convert with --config_file."},
           {{"--config_file", "none.yaml", "--overwrite"}, "Config file none.yaml not found"},
           {{"--config_file", "old.yaml"},
            "If --overwrite is not set, --output_file must be provided"},
           {{"--config_file", "old.yaml", "--output_file", "there.yaml"},
            "Output file there.yaml already exists and --overwrite is not set"},
           {{"--config_file", "empty.yaml", "--overwrite"}, "Config file empty.yaml is empty"}}) {
    const auto answer = convert(flags);
    EXPECT_EQ(answer.code, 2) << message;
    EXPECT_EQ(answer.err, "accelerate: " + message + "\n");
  }
  EXPECT_EQ(read_whole_file(folder_ / "there.yaml"), "a: 1\n");
}

}  // namespace
}  // namespace accelerate::detail::commands
