#include "commands/questionnaire.h"

#include <gtest/gtest.h>

#include <deque>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "accelerate/errors.h"
#include "commands/running.h"
#include "core/files.h"
#include "core/numbers.h"
#include "core/text.h"
#include "support/reference_path.h"

namespace accelerate::detail::commands {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// Answers from a list.
class ScriptedPrompter final : public Prompter {
 public:
  explicit ScriptedPrompter(const Words& answers) : answers_(answers.begin(), answers.end()) {}

  std::size_t choose(const std::string& question, const std::vector<std::string>& choices,
                     std::size_t preset) override {
    EXPECT_LT(preset, choices.size());
    const auto answer = line(question);
    const auto index = answer.empty() ? preset : parse_number<std::size_t>(answer).value_or(9999);
    EXPECT_LT(index, choices.size()) << question;
    return index;
  }
  std::string line(const std::string& question) override {
    questions.push_back(question);
    if (answers_.empty()) throw Error("no answer is left for: " + question);
    auto answer = answers_.front();
    answers_.pop_front();
    return answer;
  }
  void say(const std::string& text) override { said.push_back(text); }

  [[nodiscard]] Words left() const { return {answers_.begin(), answers_.end()}; }

  Words questions;
  Words said;

 private:
  std::deque<std::string> answers_;
};

const Environment& home() {
  static const Environment environment(std::map<std::string, std::string>{{"HOME", "/home/user"}});
  return environment;
}

json reference_cases() {
  std::ifstream file(test::reference_path("questionnaire/cases.json"));
  return json::parse(file);
}

TEST(Questionnaire, AsksPythonsQuestionsAndWritesPythonsFiles) {
  const fs::path folder = testing::TempDir() + "/questionnaire";
  fs::create_directories(folder);
  int written = 0;
  for (const auto& each : reference_cases()) {
    SCOPED_TRACE(each["name"]);
    ScriptedPrompter prompter(each["answers"].get<Words>());
    if (each.contains("error")) {
      EXPECT_THROW((void)ask_for_config(prompter, home()), ConfigError);
      EXPECT_EQ(prompter.left(), Words{});
      continue;
    }
    const auto config = ask_for_config(prompter, home());
    EXPECT_EQ(prompter.left(), Words{});
    config.to_yaml_file(folder / "config.yaml");
    config.to_json_file(folder / "config.json");
    EXPECT_EQ(read_whole_file(folder / "config.yaml"), each["yaml"].get<std::string>());
    EXPECT_EQ(read_whole_file(folder / "config.json"), each["json"].get<std::string>());
    EXPECT_EQ(ClusterConfig::from_yaml_file(folder / "config.yaml"), config);
    ++written;
  }
  EXPECT_GT(written, 60);
}

TEST(Questionnaire, RefusesSageMakerAndTpus) {
  ScriptedPrompter sagemaker({"1"});
  EXPECT_THROW((void)ask_for_config(sagemaker, home()), UnsupportedError);
  ScriptedPrompter tpu({"0", "10"});
  EXPECT_THROW((void)ask_for_config(tpu, home()), UnsupportedError);
}

TEST(Questions, RepeatUntilTheAnswerIsValid) {
  ScriptedPrompter prompter(
      {"y", "maybe", "YES", "x", "0", "70000", "80", "-1", "2.5", "", "word"});
  EXPECT_TRUE(ask_yes_no(prompter, "Really?", false));
  EXPECT_EQ(ask_integer(prompter, "Port?", std::nullopt, {.min = 1, .max = 65535}), 80);
  EXPECT_EQ(ask_number(prompter, "Norm?", 1.0), 2.5);
  EXPECT_EQ(ask_text(prompter, "Name?"), "word");
  EXPECT_EQ(prompter.said, (Words{"Please enter yes or no.", "Please enter yes or no.",
                                  "Please enter a whole number from 1 to 65535.",
                                  "Please enter a whole number from 1 to 65535.",
                                  "Please enter a whole number from 1 to 65535.",
                                  "Please enter a number, 0 or more.", "Please enter an answer."}));
  EXPECT_EQ(prompter.questions.front(), "Really? [yes/NO]: ");
}

TEST(Questions, TakeThePresetForAnEmptyAnswer) {
  ScriptedPrompter prompter({"", "", "", "", "1e8"});
  EXPECT_TRUE(ask_yes_no(prompter, "Really?", true));
  EXPECT_EQ(ask_integer(prompter, "How many?", 3), 3);
  EXPECT_EQ(ask_number(prompter, "Norm?", 0.5), 0.5);
  EXPECT_EQ(ask_text(prompter, "Name?", "all"), "all");
  EXPECT_EQ(ask_integer(prompter, "Size?", 3), 100'000'000);
  EXPECT_EQ(prompter.questions, (Words{"Really? [YES/no]: ", "How many? [3]: ", "Norm? [0.5]: ",
                                       "Name? [all]: ", "Size? [3]: "}));
}

// --- the command, with answers from a pipe

class ConfigCommand : public testing::Test {
 protected:
  ConfigCommand() {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  // The words of the command line go through a shell, which feeds it with `answers`.
  [[nodiscard]] Ran config(const std::string& answers, const std::string& words) const {
    std::ofstream(folder_ / "answers") << answers;
    return ran({"/bin/sh", "-c", kAccelerate + " config " + words + " < answers"},
               {.environment = {{"HOME", "/home/user"}, {"HF_HOME", (folder_ / "home").string()}},
                .folder = folder_});
  }

  const fs::path folder_ = testing::TempDir() + "/config_command";
};

TEST_F(ConfigCommand, TakesAnswersFromAPipe) {
  // Choices by number and by text; an empty line is the default, a wrong one is asked again.
  const auto answer = config("\nmulti-gpu\n\nno\nmaybe\nno\nno\nno\nno\n2\n\n\n7\nBF16\n",
                             "--config_file out.yaml");
  EXPECT_EQ(answer.code, 0) << answer.out << answer.err;
  EXPECT_TRUE(has(answer.out, "'7' is not a choice. Please enter a number from 0 to 3"));
  EXPECT_TRUE(has(answer.out, "accelerate configuration saved at out.yaml"));
  const auto config = ClusterConfig::from_yaml_file(folder_ / "out.yaml");
  EXPECT_EQ(config.distributed_type, DistributedType::kMultiGpu);
  EXPECT_EQ(config.num_processes, 2);
  EXPECT_EQ(config.mixed_precision, PrecisionType::kBf16);
}

TEST_F(ConfigCommand, WritesTheDefaultFileAndMakesItsFolder) {
  EXPECT_EQ(config("\n\n\n\n\n\n\n\n", "").code, 0);
  EXPECT_TRUE(fs::exists(folder_ / "home/accelerate/default_config.yaml"));
}

TEST_F(ConfigCommand, LeavesTheOldFileWhenTheInputEnds) {
  std::ofstream(folder_ / "out.yaml") << "old";
  const auto answer = config("\n0\n", "--config_file out.yaml");
  EXPECT_EQ(answer.code, 2);
  EXPECT_TRUE(has(answer.err,
                  "The input ended at the question 'Do you want to run your training on "
                  "CPU only"));
  EXPECT_EQ(read_whole_file(folder_ / "out.yaml"), "old");
}

TEST_F(ConfigCommand, RefusesAFileThatCannotBeWrittenBeforeItAsks) {
  for (const auto& [file, reason] : std::vector<std::pair<std::string, std::string>>{
           {"none/out.yaml", "there is no folder 'none'"}, {".", "a folder. Name a file"}}) {
    const auto answer = config("", "--config_file " + file);
    EXPECT_EQ(answer.code, 2);
    EXPECT_TRUE(has(answer.err, reason));
    EXPECT_EQ(answer.out, "");
  }
}

TEST_F(ConfigCommand, DefaultWritesOnceAndInJson) {
  const auto first = config("", "default --config_file deep/basic.yaml --mixed_precision bf16");
  EXPECT_EQ(first.code, 0) << first.err;
  EXPECT_EQ(first.out, "accelerate configuration saved at deep/basic.yaml\n");
  const auto text = read_whole_file(folder_ / "deep/basic.yaml");
  EXPECT_TRUE(has(text, "\"mixed_precision\": \"bf16\""));
  const auto again = config("", "default --config_file deep/basic.yaml --mixed_precision fp16");
  EXPECT_EQ(again.code, 0);
  EXPECT_TRUE(has(again.err, "There is a configuration at deep/basic.yaml already"));
  EXPECT_EQ(read_whole_file(folder_ / "deep/basic.yaml"), text);
}

TEST_F(ConfigCommand, UpdateBringsAnOldFileIntoTheNewForm) {
  for (const std::string name : {"fp16", "dynamo", "fsdp_0_x", "commented"}) {
    fs::copy_file(test::reference_path("config/legacy/" + name + ".yaml"), folder_ / "old.yaml",
                  fs::copy_options::overwrite_existing);
    const auto answer = config("", "update --config_file old.yaml");
    EXPECT_EQ(answer.code, 0) << answer.err;
    EXPECT_EQ(answer.out, "Successfully updated the configuration file at old.yaml.\n");
    EXPECT_EQ(read_whole_file(folder_ / "old.yaml"),
              read_whole_file(test::reference_path("config/legacy/" + name + ".expected.yaml")));
  }
  const auto missing = config("", "update");
  EXPECT_EQ(missing.code, 2);
  EXPECT_TRUE(has(missing.err, "default_config.yaml does not exist"));
}

TEST_F(ConfigCommand, RefusesAPrecisionThatItWouldNotUse) {
  const auto answer = config("", "update --mixed_precision bf16");
  EXPECT_EQ(answer.code, 2);
  EXPECT_TRUE(has(answer.err, "--mixed_precision is for `accelerate config default`"));
}

}  // namespace
}  // namespace accelerate::detail::commands
