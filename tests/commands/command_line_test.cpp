#include "commands/help.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>

#include "accelerate/version.h"
#include "commands/command_table.h"
#include "commands/environment_report.h"
#include "commands/running.h"
#include "core/json.h"
#include "core/text.h"
#include "launch/command.h"
#include "support/command.h"

namespace accelerate::detail::commands {
namespace {

bool there_is(const std::string& program) {
  return !find_in_path(program, Environment::process()).empty();
}

TEST(Help, NamesEveryFlagOfTheTableWithUnderscoresOnly) {
  const auto text = command_help(launch::launch_command());
  for (const launch::Flag& flag : launch::launch_flags()) {
    if (flag.file_only) continue;
    EXPECT_TRUE(has(text, "--" + std::string(flag.name)));
    EXPECT_FALSE(flag.help.empty()) << flag.name;
  }
  for (const auto& line : split(text, '\n')) {
    const auto at = line.find("--");
    if (!line.starts_with("      --")) continue;
    const auto name = line.substr(at + 2, line.find_first_of(" =[", at) - at - 2);
    EXPECT_FALSE(has(name, "-"));
  }
}

TEST(Help, IsGrouped) {
  const auto text = command_help(launch::launch_command());
  std::size_t at = 0;
  for (const auto* title : {"\nGeneral.", "\nHardware selection.", "\nResource selection.",
                            "\nTraining paradigm.", "\nProcesses and machines.", "\nDeepSpeed.",
                            "\nFSDP.", "\nMegatron-LM.", "\nFP8.", "\nParallelism.", "\nMPI."}) {
    const auto found = text.find(title);
    ASSERT_NE(found, std::string::npos) << title;
    EXPECT_GT(found, at) << title;
    at = found;
  }
}

TEST(Help, FitsTheTerminal) {
  for (const std::size_t width : {80, 100}) {
    for (const auto& line : split(command_help(launch::launch_command(), width), '\n')) {
      // A flag with its choices is not broken.
      if (line.starts_with("      --")) continue;
      // Nor is the name of a variable.
      if (trim(line).find(' ') == std::string_view::npos) continue;
      EXPECT_LE(line.size(), width) << line;
    }
  }
}

TEST(Help, OfEveryCommandNamesItsFlagsAndFitsTheTerminal) {
  for (const auto& command : command_table()) {
    EXPECT_FALSE(command.about.empty()) << command.name;
    const auto text = command_help(command, 80);
    EXPECT_TRUE(starts(text, str("usage: accelerate ", command.name, " ")));
    for (const launch::Flag& flag : command.flags()) {
      if (flag.file_only) continue;
      EXPECT_TRUE(has(text, str("--", flag.name))) << command.name;
      EXPECT_FALSE(flag.help.empty()) << flag.name;
    }
  }
}

TEST(Help, OfEveryCommandComesAtOnce) {
  using Clock = std::chrono::steady_clock;
  for (const auto& command : command_table()) {
    // The fastest of some runs: the machine may be busy.
    auto fastest = Clock::duration::max();
    for (int i = 0; i < 20 && fastest > std::chrono::milliseconds(20); ++i) {
      const auto start = Clock::now();
      const auto answer = ran({kAccelerate, std::string(command.name), "--help"});
      fastest = std::min(fastest, Clock::now() - start);
      EXPECT_EQ(answer.code, 0) << command.name;
      EXPECT_EQ(answer.out, command_help(command)) << command.name;
    }
    EXPECT_LT(fastest, test::patient(test::Seconds(0.020))) << command.name;
  }
}

TEST(ManPages, HaveEveryFlagAndNoLineThatIsARequestByAccident) {
  for (const auto& command : command_table()) {
    const auto page = command_man_page(command);
    EXPECT_TRUE(starts(page, str(".TH ACCELERATE-", to_upper(command.name), " 1 ")));
    for (const launch::Flag& flag : command.flags()) {
      if (flag.file_only) continue;
      EXPECT_TRUE(has(page, str("\\fB\\-\\-", flag.name, "\\fR")));
    }
    for (const auto& line : split(page, '\n')) {
      const bool request = line.starts_with(".TH ") || line.starts_with(".SH ") || line == ".TP" ||
                           line == ".nf" || line == ".fi" || line.starts_with(".BR ");
      EXPECT_TRUE(request || !(line.starts_with('.') || line.starts_with('\''))) << line;
    }
  }
}

TEST(CommandLine, ShowsHelpAndFailsWithoutACommand) {
  const auto none = ran({kAccelerate});
  EXPECT_EQ(none.code, 1);
  EXPECT_TRUE(has(none.out, "usage: accelerate <command>"));
  EXPECT_EQ(none.err, "");
  EXPECT_EQ(ran({kAccelerate, "--help"}).code, 0);
  EXPECT_EQ(ran({kAccelerate, "launch", "--help"}).code, 0);
  EXPECT_EQ(ran({kAccelerate, "launch", "-h"}).out, command_help(launch::launch_command()));
}

TEST(CommandLine, PrintsTheVersion) {
  const auto answer = ran({kAccelerate, "--version"});
  EXPECT_EQ(answer.code, 0);
  EXPECT_EQ(answer.out, str("accelerate ", kVersion, "\n"));
  EXPECT_EQ(answer.err, "");
}

TEST(CommandLine, GuessesAWrongCommand) {
  const auto wrong = ran({kAccelerate, "lauch"});
  EXPECT_EQ(wrong.code, 2);
  EXPECT_EQ(wrong.err, "accelerate: 'lauch' is not a command; did you mean launch?\n");
  EXPECT_EQ(ran({kAccelerate, "xyzzy"}).code, 2);
}

TEST(CommandLine, TakesTheCommandFromItsOwnName) {
  EXPECT_TRUE(
      has(ran({"accelerate-launch", "--help"}, {.program = kAccelerate}).out, "--num_processes"));
  EXPECT_TRUE(has(ran({"/usr/bin/accelerate-env", "--help"}, {.program = kAccelerate}).out,
                  "accelerate env"));
}

TEST(CommandLine, RefusesWrongInputWithCode2) {
  for (const auto& words :
       {Words{"launch"}, Words{"launch", "--num_process", "2", "x"},
        Words{"launch", "--tpu", "x.py"}, Words{"launch", "/no/such/program"}, Words{"completion"},
        Words{"completion", "tcsh"}, Words{"checkpoint"}, Words{"checkpoint", "show"},
        Words{"checkpoint", "shw", "a"}, Words{"checkpoint", "show", "a", "b"},
        Words{"checkpoint", "show", "--jsn", "a"}}) {
    Words argv{kAccelerate};
    argv.insert(argv.end(), words.begin(), words.end());
    const auto answer = ran(argv);
    EXPECT_EQ(answer.code, 2) << join(words, " ");
    EXPECT_TRUE(starts(answer.err, "accelerate: ")) << join(words, " ");
    EXPECT_EQ(answer.out, "") << join(words, " ");
  }
}

TEST(CommandLine, RefusesTpuConfigWhateverItsFlags) {
  const auto answer = ran({kAccelerate, "tpu-config", "--tpu_name", "x", "--command", "ls"});
  EXPECT_EQ(answer.code, 2);
  EXPECT_TRUE(has(answer.err, "XLA, which exists for Python only"));
}

TEST(Env, ShowsVersionsMachineAndConfiguration) {
  const std::filesystem::path folder = testing::TempDir() + "/env";
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "c.yaml")
      << "distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n";
  const auto plain = ran({kAccelerate, "env"});
  EXPECT_EQ(plain.code, 0) << plain.err;
  EXPECT_TRUE(starts(plain.out, str("\nCopy-and-paste the text below in your GitHub issue\n\n"
                                    "- `Accelerate` version: ",
                                    kVersion, "\n- Platform: Linux-")));
  for (const auto* name :
       {"Compiler", "LibTorch version", "PyTorch accelerator", "CPU", "System RAM"}) {
    EXPECT_TRUE(has(plain.out, str("\n- ", name, ": ")));
  }
  EXPECT_TRUE(has(plain.out, "- `Accelerate` default config:\n\tNot found\n"));
  const auto passed = ran({kAccelerate, "env", "--config_file", "c.yaml"}, {.folder = folder});
  EXPECT_TRUE(
      has(passed.out, "- `Accelerate` config passed:\n\t- compute_environment: LOCAL_MACHINE\n"));
  EXPECT_TRUE(has(passed.out, "\t- use_cpu: True\n"));
  const auto object =
      ran({kAccelerate, "env", "--json", "--config_file", "c.yaml"}, {.folder = folder});
  const auto value = json_loads(object.out);
  EXPECT_EQ(value.at("accelerate_version"), kVersion);
  EXPECT_EQ(value.at("config").at("num_processes"), 2);
  EXPECT_GT(value.at("memory_bytes").as_int(), 0);
  EXPECT_EQ(ran({kAccelerate, "env", "--config_file", "none.yaml"}).code, 2);
}

TEST(Env, ShowsGpusAndWhatTheLibraryRunsWith) {
  EnvironmentReport report{
      .accelerate_version = "1.2.3", .cpu = "Chip", .cpu_cores = 4, .cpu_threads = 8};
  report.libtorch =
      TorchVersions{.torch = "2.11.0", .path = "/opt/lib", .cuda = "13.0", .nccl = "2.28.9"};
  report.cuda = true;
  report.memory_bytes = std::int64_t{3} << 29;
  report.gpus = {"NVIDIA H200", "NVIDIA H200"};
  report.driver = "580.1";
  const auto text = report.text();
  for (const auto* line : {"- LibTorch version: 2.11.0 (/opt/lib)\n", "- CUDA version: 13.0\n",
                           "- NCCL version: 2.28.9\n", "- PyTorch accelerator: CUDA\n",
                           "- CPU: Chip, 4 cores, 8 threads usable\n", "- System RAM: 1.50 GB\n",
                           "- GPU type: 2 x NVIDIA H200\n", "- GPU driver: 580.1\n",
                           "- `accelerate` bash location: Not found\n"}) {
    EXPECT_TRUE(has(text, line));
  }
  EXPECT_EQ(Value(report.to_dict()).at("libtorch").at("nccl"), "2.28.9");
  EXPECT_EQ(Value(report.to_dict()).at("gpus"), (Value::List{"NVIDIA H200", "NVIDIA H200"}));
}

TEST(CommandLine, BecomesTheProgramOfASimpleRun) {
  const auto answer = ran({kAccelerate, "launch", "-q", "--num_processes", "1", "--mixed_precision",
                           "bf16", "/bin/sh", "-c", "echo $ACCELERATE_MIXED_PRECISION; exit 7"});
  EXPECT_EQ(answer.out, "bf16\n");
  EXPECT_EQ(answer.err, "");
  EXPECT_EQ(answer.code, 7);
}

TEST(CommandLine, ChangesNothingElseInTheEnvironment) {
  const auto answer = ran({kAccelerate, "launch", "-q", "--num_processes", "1", "/bin/sh", "-c",
                           "echo $http_proxy $HTTP_PROXY."},
                          {.environment = {{"http_proxy", "proxy"}}});
  EXPECT_EQ(answer.out, "proxy .\n");
}

TEST(CommandLine, TellsDeepSpeedsLauncherItsVariablesOnce) {
  const std::filesystem::path folder = testing::TempDir() + "/launch_deepspeed";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "deepspeed") << "#!/bin/sh\necho \"$@\"\n";
  std::filesystem::permissions(folder / "deepspeed", std::filesystem::perms::owner_all);
  std::ofstream(folder / ".deepspeed_env") << "MINE=1";
  const Where where{.environment = {{"PATH", folder.string() + ":/usr/bin:/bin"}},
                    .folder = folder};
  const Words argv{kAccelerate, "launch",         "-q", "--use_deepspeed", "--num_processes",
                   "4",         "--num_machines", "2",  "--zero_stage",    "2",
                   "train.py"};
  EXPECT_EQ(ran(argv, where).out,
            "--no_local_rank --launcher pdsh --num_gpus 2 --master_port 29500 train.py\n");
  EXPECT_EQ(ran(argv, where).code, 0);
  std::ifstream file(folder / ".deepspeed_env");
  Words lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  EXPECT_EQ(std::ranges::count(lines, "MINE=1"), 1);
  EXPECT_EQ(std::ranges::count(lines, "ACCELERATE_DEEPSPEED_ZERO_STAGE=2"), 1);
}

TEST(CommandLine, StartsNothingInADryRun) {
  const auto answer = ran({kAccelerate, "launch", "--dry_run", "-q", "--cpu", "--num_processes",
                           "2", "/bin/sh", "-c", "echo started >&2"});
  EXPECT_EQ(answer.code, 0);
  EXPECT_TRUE(has(answer.out, "num_processes = 2  (flag)"));
  EXPECT_FALSE(has(answer.err, "started"));
}

TEST(CommandLine, LooksAtFilesInADryRunAndBeforeItStarts) {
  const std::filesystem::path folder = testing::TempDir() + "/launch_files";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "file") << "";
  std::ofstream(folder / "mpirun") << "#!/bin/sh\necho mpirun\n";
  std::filesystem::permissions(folder / "mpirun", std::filesystem::perms::owner_all);
  const Where where{.environment = {{"PATH", folder.string() + ":/usr/bin:/bin"}},
                    .folder = folder};
  const Words logs{"--cpu", "--num_processes", "2", "--log_dir", "file", "/bin/true"};
  const Words hosts{"--cpu", "--num_processes", "2", "--mpirun_hostfile", "none", "/bin/true"};
  const Words deepspeed{"--use_deepspeed", "--num_processes", "2", "--num_machines", "2", "t.py"};
  for (const auto& [flags, word] : std::vector<std::pair<Words, std::string>>{
           {logs, "--log_dir is 'file', which is a file"},
           {hosts, "The file 'none' with the hosts (mpirun_hostfile) does not exist"},
           {deepspeed, "pip install deepspeed"}}) {
    Words argv{kAccelerate, "launch", "--dry_run"};
    argv.insert(argv.end(), flags.begin(), flags.end());
    const auto dry = ran(argv, where);
    EXPECT_EQ(dry.code, 0) << word;
    EXPECT_TRUE(has(dry.err, word));
    argv.erase(argv.begin() + 2);
    const auto real = ran(argv, where);
    EXPECT_EQ(real.code, 2) << word;
    EXPECT_TRUE(has(real.err, word));
  }
}

TEST(CommandLine, ShowsThePlanOfAProgramThatIsNotThereYet) {
  const auto answer = ran({kAccelerate, "launch", "--dry_run", "--cpu", "./not/there"});
  EXPECT_EQ(answer.code, 0);
  EXPECT_TRUE(has(answer.err, "'./not/there' does not exist"));
  EXPECT_TRUE(has(answer.out, "process: ./not/there"));
}

// --- completion

Words completed_by_bash(const Words& words) {
  std::string script = "source /dev/stdin <<< \"$(" + kAccelerate + " completion bash)\"\n";
  script += "COMP_WORDS=(" + join(words, " ") + ")\n";
  script += "COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))\n_accelerate\n";
  script += "printf '%s\\n' \"${COMPREPLY[@]}\"\n";
  const auto answer = ran({"bash", "-c", script});
  EXPECT_EQ(answer.err, "");
  return launch::words_of(answer.out);
}

TEST(BashCompletion, KnowsCommandsFlagsAndChoices) {
  if (!there_is("bash")) GTEST_SKIP() << "bash is not installed";
  EXPECT_EQ(completed_by_bash({"accelerate", "la"}), Words{"launch"});
  EXPECT_EQ(completed_by_bash({"accelerate", "completion", "f"}), Words{"fish"});
  EXPECT_EQ(completed_by_bash({"accelerate", "checkpoint", "s"}), Words{"show"});
  EXPECT_EQ(completed_by_bash({"accelerate", "checkpoint", "show", "--j"}), Words{"--json"});
  EXPECT_EQ(completed_by_bash({"accelerate", "merge-weights", "--u"}),
            Words{"--unsafe_serialization"});
  EXPECT_EQ(completed_by_bash({"accelerate", "launch", "--num_m"}), Words{"--num_machines"});
  EXPECT_EQ(completed_by_bash({"accelerate", "launch", "--cpu", "--mixed_precision", "b"}),
            Words{"bf16"});
  EXPECT_EQ(completed_by_bash({"accelerate", "launch", "--mixed-precision", "b"}), Words{"bf16"});
  EXPECT_EQ(completed_by_bash({"accelerate", "launch", "--mixed_precision", "=", "f"}),
            (Words{"fp16", "fp8"}));
  EXPECT_EQ(completed_by_bash({"accelerate", "launch", "--dry_run", "=", "j"}), Words{"json"});
  EXPECT_EQ(completed_by_bash({"accelerate-launch", "--quie"}), Words{"--quiet"});
  EXPECT_EQ(completed_by_bash({"accelerate", "config", "d"}), Words{"default"});
  EXPECT_EQ(completed_by_bash({"accelerate", "config", "default", "--mixed_precision", "b"}),
            Words{"bf16"});
  EXPECT_EQ(completed_by_bash({"accelerate", "config", "default", "u"}), Words{});
  EXPECT_EQ(completed_by_bash({"accelerate-estimate-memory", "--dt"}), Words{"--dtypes"});
  EXPECT_EQ(completed_by_bash({"accelerate", "checkpoint", "s"}), Words{"show"});
}

TEST(BashCompletion, LeavesTheProgramAndItsArgumentsAlone) {
  if (!there_is("bash")) GTEST_SKIP() << "bash is not installed";
  EXPECT_EQ(
      completed_by_bash({"accelerate", "launch", "--num_processes", "2", "./train", "--num_p"}),
      Words{});
  EXPECT_EQ(completed_by_bash({"accelerate", "launch", "--cpu", "./tr"}), Words{});
}

TEST(ZshCompletion, IsUnderstood) {
  if (!there_is("zsh")) GTEST_SKIP() << "zsh is not installed";
  // The completer runs inside an editor, so it gets one: a terminal of its own.
  const std::string script =
      "zmodload zsh/zpty\n"
      "zpty z PS1=ready zsh -f -i\n"
      "zpty -w z \"autoload -Uz compinit && compinit -u -D; source <(" +
      kAccelerate +
      " completion zsh); bindkey '^I' complete-word; zstyle ':completion:*' list-prompt ''\"\n"
      "zpty -w z 'PS1=READY'\n"
      "sleep 1\n"
      "zpty -n -w z $'accelerate launch --mixed_pre\\tb\\t\\n'\n"
      "sleep 1\nzpty -r z out '*bf16*' && print FOUND\nzpty -d z\n";
  const auto answer = ran({"zsh", "-f", "-c", script});
  EXPECT_TRUE(has(answer.out, "FOUND")) << answer.err;
}

TEST(FishCompletion, KnowsCommandsFlagsAndChoices) {
  if (!there_is("fish")) GTEST_SKIP() << "fish is not installed";
  const auto completed = [](const std::string& line) {
    const auto answer =
        ran({"fish", "--no-config", "-c",
             kAccelerate + " completion fish | source; complete -C '" + line + "'"});
    EXPECT_EQ(answer.err, "");
    Words words;
    for (const auto& each : split(answer.out, '\n')) {
      if (!each.empty()) words.push_back(each.substr(0, each.find('\t')));
    }
    return words;
  };
  EXPECT_EQ(completed("accelerate la"), Words{"launch"});
  EXPECT_EQ(completed("accelerate launch --num_m"), Words{"--num_machines"});
  EXPECT_EQ(completed("accelerate checkpoint s"), Words{"show"});
  EXPECT_EQ(completed("accelerate checkpoint ver"), Words{"verify"});
  EXPECT_EQ(completed("accelerate checkpoint show --j"), Words{"--json"});
  EXPECT_EQ(completed("accelerate launch --mixed_precision b"), Words{"bf16"});
  EXPECT_EQ(completed("accelerate to-fsdp2 --over"), Words{"--overwrite"});
  EXPECT_EQ(completed("accelerate config upd"), Words{"update"});
}

}  // namespace
}  // namespace accelerate::detail::commands
