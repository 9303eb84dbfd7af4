#include "launch/resolve.h"

#include <gtest/gtest.h>

#include <fstream>

#include "launch/planning.h"

namespace accelerate::detail::launch {
namespace {

// --- precedence

TEST(Precedence, IsFlagThenEnvironmentThenFileThenDefault) {
  const std::string file = config("'NO'", "num_processes: 1\nmixed_precision: fp16\n");
  const Variables environment{{"ACCELERATE_MIXED_PRECISION", "bf16"}};
  const auto precision = [](const std::string& line, const Around& around) {
    return setting(plan_of(line, around), "mixed_precision");
  };
  EXPECT_EQ(precision("--mixed_precision no x", {environment, file}), "no (flag)");
  EXPECT_EQ(precision("x", {environment, file}), "bf16 (environment ACCELERATE_MIXED_PRECISION)");
  EXPECT_EQ(precision("x", {{}, file}), "fp16 (config team.yaml)");
  EXPECT_EQ(precision("x", {}), "no (default)");
}

TEST(Precedence, HoldsForSettingsOfSections) {
  const std::string file = config("FSDP", "num_processes: 2\nfsdp_config:\n  fsdp_version: 2\n");
  const auto plan = plan_of("x", {{{"FSDP_VERSION", "1"}}, file, gpus(2)});
  EXPECT_EQ(setting(plan, "fsdp_version"), "1 (environment FSDP_VERSION)");
  EXPECT_EQ(setting(plan_of("x", {{}, file, gpus(2)}), "fsdp_version"), "2 (config team.yaml)");
}

TEST(Precedence, HoldsForTheMeetingPoint) {
  const std::string file =
      config("MULTI_GPU", "num_processes: 4\nnum_machines: 2\nmain_process_ip: file\n");
  const Variables environment{{"MASTER_ADDR", "variable"}, {"MASTER_PORT", "77"}};
  auto plan = plan_of("x", {environment, file, gpus(2)});
  EXPECT_EQ(plan.agent.master_addr, "variable");
  EXPECT_EQ(plan.agent.master_port, 77);
  plan = plan_of("--main_process_ip flag x", {environment, file, gpus(2)});
  EXPECT_EQ(plan.agent.master_addr, "flag");
  EXPECT_EQ(plan_of("x", {{}, file, gpus(2)}).agent.master_addr, "file");
}

TEST(Precedence, LeavesVariablesOfTheMachineAlone) {
  const auto plan = plan_of("--num_processes 1 x", {{{"CUDA_VISIBLE_DEVICES", "1"}}, {}, gpus(2)});
  EXPECT_EQ(setting(plan, "gpu_ids"), "all (default)");
  EXPECT_EQ(variable(plan, "CUDA_VISIBLE_DEVICES"), "not set");
}

TEST(Precedence, NamesTheVariableOfAWrongValue) {
  EXPECT_TRUE(starts(refusal_of("x", {{{"ACCELERATE_MIXED_PRECISION", "half"}}}),
                     "ACCELERATE_MIXED_PRECISION is 'half'. Choose one of: no, fp16"));
  EXPECT_TRUE(starts(refusal_of("x", {{{"MASTER_PORT", "http"}}}), "MASTER_PORT is 'http'"));
}

TEST(Precedence, LooksAtEngineVariablesOnlyWhereTheEngineIsUsed) {
  EXPECT_EQ(refusal_of("x", {{{"FSDP_VERSION", "7"}}}), "no error");
  EXPECT_TRUE(starts(refusal_of("--use_fsdp x", {{{"FSDP_VERSION", "7"}}}),
                     "FSDP_VERSION is '7'. Choose one of: 1, 2."));
}

TEST(Precedence, TakesTheEngineFromTheEnvironment) {
  const auto run =
      resolved("--num_processes 2 x", {{{"ACCELERATE_USE_FSDP", "true"}}, {}, gpus(2)});
  EXPECT_TRUE(run.fsdp);
  EXPECT_EQ(run.mode, LaunchMode::kAgent);
}

TEST(Precedence, LetsATypedEngineReplaceTheOneOfTheEnvironment) {
  const Around around{{{"ACCELERATE_USE_FSDP", "true"}}, {}, gpus(2)};
  const auto plan = plan_of("--multi_gpu --num_processes 2 x", around);
  EXPECT_EQ(variable(plan, "ACCELERATE_USE_FSDP"), "false");
}

// --- the configuration file

TEST(ConfigFileOfALaunch, FillsWhatWasNotTyped) {
  const auto plan =
      plan_of("--num-processes 4 x", {{},
                                      config("MULTI_GPU",
                                             "num_processes: 2\nmixed_precision: bf16\n"
                                             "main_process_port: 4321\ndebug: true\n"),
                                      gpus(4)});
  EXPECT_EQ(setting(plan, "num_processes"), "4 (flag)");
  EXPECT_EQ(setting(plan, "mixed_precision"), "bf16 (config team.yaml)");
  EXPECT_EQ(plan.agent.master_port, 4321);
  EXPECT_EQ(variable(plan, "ACCELERATE_DEBUG_MODE"), "true");
}

TEST(ConfigFileOfALaunch, BeatsTheDefaultsOfFsdpAndIsBeatenByFlags) {
  const std::string file = config("FSDP",
                                  "num_processes: 2\nfsdp_config:\n  fsdp_sync_module_states: "
                                  "false\n  fsdp_cpu_ram_efficient_loading: false\n"
                                  "  fsdp_offload_params: true\n");
  const auto plan = plan_of("--fsdp_offload_params false x", {{}, file, gpus(2)});
  EXPECT_EQ(variable(plan, "FSDP_SYNC_MODULE_STATES"), "false");
  EXPECT_EQ(variable(plan, "FSDP_OFFLOAD_PARAMS"), "false");
}

TEST(ConfigFileOfALaunch, MayLeavePrefixesOutInItsSections) {
  const auto plan =
      plan_of("x", {{},
                    config("FSDP",
                           "num_processes: 2\nmixed_precision: fp8\nfsdp_config:\n  version: 2\n"
                           "fp8_config:\n  margin: 3\ndynamo_config:\n  backend: INDUCTOR\n"),
                    gpus(2)});
  EXPECT_EQ(variable(plan, "FSDP_VERSION"), "2");
  EXPECT_EQ(variable(plan, "ACCELERATE_FP8_MARGIN"), "3");
  EXPECT_EQ(variable(plan, "ACCELERATE_DYNAMO_BACKEND"), "INDUCTOR");
}

TEST(ConfigFileOfALaunch, MayHaveTheKeysThatTheQuestionnaireWrites) {
  const auto plan =
      plan_of("x", {{},
                    config("MULTI_GPU",
                           "num_processes: 2\nmixed_precision: fp8\nfp8_config:\n"
                           "  amax_history_length: 32\n  amax_compute_algorithm: max\n"
                           "  optimization_level: O1\n"
                           "  override_linear_precision: (false, true, false)\n"),
                    gpus(2)});
  EXPECT_EQ(variable(plan, "ACCELERATE_FP8_AMAX_HISTORY_LEN"), "32");
  EXPECT_EQ(variable(plan, "ACCELERATE_FP8_AMAX_COMPUTE_ALGO"), "max");
  EXPECT_EQ(variable(plan, "ACCELERATE_FP8_OPT_LEVEL"), "O1");
  EXPECT_EQ(variable(plan, "ACCELERATE_FP8_OVERRIDE_DGRAD"), "True");
  EXPECT_EQ(variable(plan, "ACCELERATE_FP8_OVERRIDE_FPROP"), "False");
}

TEST(ConfigFileOfALaunch, CountsWherePythonOverlooksIt) {
  const std::string file = config(
      "MULTI_GPU",
      "num_processes: 2\nrdzv_backend: c10d\nsame_network: true\nenable_cpu_affinity: true\n");
  const auto plan = plan_of("x", {{}, file, gpus(2)});
  EXPECT_EQ(plan.agent.rdzv_backend, "c10d");
  EXPECT_EQ(setting(plan, "same_network"), "true (config team.yaml)");
  EXPECT_EQ(variable(plan, "ACCELERATE_CPU_AFFINITY"), "1");
  const auto off = plan_of("--no_enable_cpu_affinity x", {{}, file, gpus(2)});
  EXPECT_EQ(variable(off, "ACCELERATE_CPU_AFFINITY"), "not set");
}

TEST(ConfigFileOfALaunch, ChoosesTheEngineUnlessOneIsTyped) {
  const std::string fsdp = config("FSDP", "num_processes: 2\n");
  EXPECT_TRUE(resolved("x", {{}, fsdp, gpus(2)}).fsdp);
  const auto typed = resolved("--use_megatron_lm x", {{}, fsdp, gpus(2)});
  EXPECT_FALSE(typed.fsdp);
  EXPECT_TRUE(typed.megatron);
  EXPECT_TRUE(resolved("x", {{}, config("MEGATRON_LM", "num_processes: 2\n"), gpus(2)}).megatron);
  EXPECT_TRUE(resolved("x", {{}, config("DEEPSPEED", "num_processes: 2\n"), gpus(2)}).deepspeed);
  EXPECT_TRUE(resolved("x", {{}, config("MULTI_GPU", "num_processes: 2\n"), gpus(2)}).multi_gpu);
}

TEST(ConfigFileOfALaunch, LosesItsEngineToTheTypedCpu) {
  const auto plan = plan_of("--cpu x", {{}, config("FSDP", "num_processes: 2\n"), gpus(2)});
  EXPECT_EQ(setting(plan, "use_fsdp"), "false (default)");
  EXPECT_EQ(variable(plan, "ACCELERATE_USE_FSDP"), "not set");
  EXPECT_EQ(plan.mode, LaunchMode::kAgent);
}

TEST(ConfigFileOfALaunch, SwitchesParallelismOnByItsSection) {
  const auto run = resolved("x", {{},
                                  config("FSDP",
                                         "num_processes: 2\nfsdp_config:\n  fsdp_version: "
                                         "2\nparallelism_config:\n"
                                         "  parallelism_config_tp_size: 2\n"
                                         "  parallelism_config_pp_size: 4\n"),
                                  gpus(2)});
  EXPECT_TRUE(run.parallelism);
  EXPECT_EQ(run.settings.integer("parallelism_config_pp_size"), 4);
}

TEST(ConfigFileOfALaunch, MustSayHowManyProcessesOrLeaveItToTheFlag) {
  const Around silent{{}, config("MULTI_GPU"), gpus(2)};
  EXPECT_TRUE(has(refusal_of("x", silent), "Pass --num_processes"));
  EXPECT_EQ(refusal_of("--num_processes 2 x", silent), "no error");
  EXPECT_TRUE(has(refusal_of("x", {{}, config("MULTI_GPU", "num_processes: -1\n"), gpus(2)}),
                  "'num_processes' in team.yaml is -1"));
  EXPECT_EQ(resolved("x", {{}, config("'NO'"), gpus(2)}).num_processes, 1);
}

TEST(ConfigFileOfALaunch, IsNotForSageMaker) {
  const std::string file =
      "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'\nec2_instance_type: a\n"
      "iam_role_name: b\n";
  EXPECT_TRUE(
      starts(refusal_of("train.py", {{}, file}), "unsupported: team.yaml is for Amazon SageMaker"));
}

TEST(ConfigFileOfALaunch, SaysNothingAboutDefaults) {
  EXPECT_EQ(warnings(plan_of("x", {{}, config("'NO'"), gpus(1)})), "");
}

TEST(ConfigFileOfALaunch, IsTheDefaultOneUnlessTheCpuWasTyped) {
  const auto home = testing::TempDir() + "/launch_config_home";
  std::filesystem::create_directories(home + "/accelerate");
  std::ofstream(home + "/accelerate/default_config.yaml") << config("'NO'", "debug: true\n");
  const Environment environment(Variables{{"HF_HOME", home}});
  EXPECT_TRUE(read_launch_config(parsed("x"), environment));
  EXPECT_FALSE(read_launch_config(parsed("--cpu x"), environment));
  EXPECT_FALSE(read_launch_config(parsed("x"), Environment(Variables{{"HF_HOME", home + "/no"}})));
  const auto file = read_launch_config(parsed("x"), environment);
  EXPECT_TRUE(file->keys.contains("debug"));
  EXPECT_FALSE(file->keys.contains("num_machines"));
}

TEST(ConfigFileOfALaunch, MustExistWhenItWasNamed) {
  EXPECT_THROW((void)read_launch_config(parsed("--config_file /no/such.yaml x"), Environment()),
               ConfigError);
}

// --- flags that exclude each other

TEST(Checks, RefuseFlagsThatExcludeEachOther) {
  EXPECT_EQ(refusal_of("--use_deepspeed --use_fsdp x"),
            "--use_deepspeed and --use_fsdp exclude each other: pass one of --multi_gpu, --tpu, "
            "--use_deepspeed, --use_fsdp.");
  EXPECT_TRUE(has(refusal_of("--multi_gpu --use_deepspeed x"), "exclude each other"));
  EXPECT_EQ(refusal_of("--cpu --multi_gpu x"),
            "--cpu and --multi_gpu exclude each other: pass one of --cpu, --multi_gpu, --tpu.");
  EXPECT_EQ(refusal_of("--cpu --use_fsdp x"), "no error");
  EXPECT_EQ(refusal_of("--cpu --use_deepspeed x"), "no error");
  EXPECT_EQ(refusal_of("--cpu --use_megatron_lm x"), "no error");
  EXPECT_TRUE(has(refusal_of("--module --no_python x"), "--module and --no_python"));
}

TEST(Checks, WantTwoProcessesForSeveralGpus) {
  EXPECT_TRUE(has(refusal_of("--multi_gpu --num_processes 1 x"),
                  "--multi_gpu needs at least 2 processes, but --num_processes is 1"));
}

TEST(Checks, WantTheSecondFsdpForContextParallelism) {
  const std::string line = "--num_processes 2 --use_parallelism_config --parallelism_config_";
  for (const auto* size : {"tp_size 2 x", "sp_size 2 x", "pp_size 2 x", "dp_shard_size 2 x"}) {
    EXPECT_EQ(refusal_of(line + size, {{}, {}, gpus(2)}), "no error") << size;
  }
  EXPECT_TRUE(
      has(refusal_of(line + "cp_size 2 x", {{}, {}, gpus(2)}),
          "--use_parallelism_config with parallelism_config_cp_size above 1 needs --use_fsdp "
          "and --fsdp_version 2"));
  EXPECT_EQ(refusal_of(line + "cp_size 2 x", {{{"ACCELERATE_USE_CPU", "1"}}}), "no error");
  EXPECT_EQ(
      refusal_of(line + "cp_size 2 x", {{{"ACCELERATE_ALLOW_CP_STANDALONE", "true"}}, {}, gpus(2)}),
      "no error");
  EXPECT_TRUE(has(refusal_of("--use_fsdp --use_parallelism_config x"), "but --fsdp_version is 1"));
  EXPECT_EQ(refusal_of("--use_fsdp --fsdp_version 2 --use_parallelism_config --num_processes 2 x"),
            "no error");
  EXPECT_TRUE(has(refusal_of("x", {{},
                                   config("FSDP",
                                          "num_processes: 2\nparallelism_config:\n"
                                          "  parallelism_config_tp_size: 2\n"),
                                   gpus(2)}),
                  "'parallelism_config' in team.yaml needs"));
}

TEST(Checks, WantSyncedStatesForLoadingOnOneProcess) {
  EXPECT_TRUE(has(refusal_of("--use_fsdp --fsdp_sync_module_states false x"),
                  "--fsdp_cpu_ram_efficient_loading is true"));
  // Python takes the word "false" for true here.
  EXPECT_EQ(refusal_of("--use_fsdp --fsdp_sync_module_states false "
                       "--fsdp_cpu_ram_efficient_loading false x"),
            "no error");
}

TEST(Checks, WantAsManyProcessesOnEveryMachine) {
  EXPECT_TRUE(
      has(refusal_of("--num_processes 5 --num_machines 2 --machine_rank 0 --main_process_ip h x"),
          "--num_processes is 5, which 2 machines cannot share evenly"));
}

TEST(Checks, WantAtLeastOneProcess) {
  EXPECT_TRUE(has(refusal_of("--num_processes 0 x"), "at least one process"));
}

TEST(Checks, NameWhatIsMissingForSeveralMachines) {
  EXPECT_TRUE(has(refusal_of("--num_processes 2 --num_machines 2 x"), "--machine_rank is missing"));
  EXPECT_TRUE(has(refusal_of("--num_processes 2 --num_machines 2 --machine_rank 0 x"),
                  "--main_process_ip is missing"));
  EXPECT_TRUE(has(refusal_of("--num_processes 2 --num_machines 2 --machine_rank 2 "
                             "--main_process_ip h x"),
                  "--machine_rank is 2, but there are 2 machines: ranks go from 0 to 1"));
}

TEST(Checks, WantAPortThatOtherMachinesCanKnow) {
  const std::string line =
      "--num_processes 2 --num_machines 2 --machine_rank 0 --main_process_ip h ";
  EXPECT_TRUE(has(refusal_of(line + "--main_process_port 0 x"), "a free port"));
  EXPECT_TRUE(has(refusal_of(line + "--main_process_port 70000 x"), "0 to 65535"));
}

TEST(Checks, TakeAnAddressWithoutPort) {
  const std::string line = "--num_processes 2 --num_machines 2 --machine_rank 0 --main_process_ip ";
  EXPECT_TRUE(has(refusal_of(line + "10.0.0.1:29500 x"), "--main_process_port"));
  EXPECT_EQ(plan_of(line + "[fd00::1] x").agent.master_addr, "fd00::1");
  EXPECT_EQ(plan_of(line + "fd00::1 x").agent.master_addr, "fd00::1");
}

TEST(Checks, KnowTwoWaysToMeet) {
  EXPECT_TRUE(starts(refusal_of("--rdzv_backend etcd-v2 x"), "unsupported: --rdzv_backend"));
  EXPECT_TRUE(has(refusal_of("--rdzv_backend magic x"), "Choose one of: static, c10d"));
}

TEST(Checks, AllowARangeOfMachinesOnlyWhereTheyComeAndGo) {
  EXPECT_TRUE(has(refusal_of("--num_machines 1:2 --num_processes 2 --main_process_ip h x"),
                  "--rdzv_backend c10d"));
  const auto plan =
      plan_of("--num_machines 1:2 --num_processes 4 --main_process_ip h --rdzv_backend c10d x");
  EXPECT_EQ(plan.agent.min_nodes, 1);
  EXPECT_EQ(plan.agent.max_nodes, 2);
  EXPECT_EQ(plan.agent.nproc_per_node, 2);
}

TEST(Checks, LookAtDeviceIds) {
  EXPECT_TRUE(has(refusal_of("--gpu_ids 0,8 --num_processes 2 x", {{}, {}, gpus(8)}),
                  "this machine has 8 devices"));
  EXPECT_TRUE(has(refusal_of("--gpu_ids 1,1 --num_processes 2 x", {{}, {}, gpus(8)}),
                  "device 1 comes twice"));
  EXPECT_TRUE(has(refusal_of("--gpu_ids 0,x --num_processes 2 x", {{}, {}, gpus(8)}),
                  "'x' is not a device id"));
  EXPECT_EQ(refusal_of("--gpu_ids GPU-1a,GPU-2b --num_processes 2 x", {{}, {}, gpus(8)}),
            "no error");
  EXPECT_TRUE(has(refusal_of("--gpu_ids a,b --num_processes 2 x", {{}, {}, cores(8)}),
                  "'a' is not a device id"));
}

TEST(Checks, RefuseMoreProcessesThanAMachineCanHave) {
  EXPECT_TRUE(starts(refusal_of("--cpu --num_processes 2000000 x"),
                     "--num_processes is 2000000, which are 2000000 for each machine. At most 8192 "
                     "are started on one"));
  EXPECT_EQ(refusal_of("--cpu --num_processes 8192 x"), "no error");
  EXPECT_EQ(refusal_of("--cpu --num_processes 16384 --num_machines 2 --machine_rank 0 "
                       "--main_process_ip h x"),
            "no error");
}

TEST(Checks, WantMoreThanOneDeviceForSeveralProcessesWithAndWithoutAFile) {
  EXPECT_TRUE(has(refusal_of("--gpu_ids 0 --num_processes 2 x", {{}, {}, gpus(4)}),
                  "a single device for 2 processes"));
  EXPECT_TRUE(
      has(refusal_of("--gpu_ids 0 x", {{}, config("MULTI_GPU", "num_processes: 2\n"), gpus(4)}),
          "a single device for 2 processes"));
  EXPECT_EQ(refusal_of("--gpu_ids 0 --num_processes 1 x", {{}, {}, gpus(4)}), "no error");
}

TEST(Checks, RefuseAPrecisionThatTheHardwareLacks) {
  auto old = gpus(1);
  old.bf16 = false;
  EXPECT_TRUE(has(refusal_of("--mixed_precision bf16 x", {{}, {}, old}), "'bf16'"));
  EXPECT_EQ(refusal_of("--cpu --mixed_precision bf16 x", {{}, {}, old}), "no error");
}

TEST(Checks, LookAtEverySettingOfTheAgentWhateverTheMode) {
  EXPECT_TRUE(has(refusal_of("--rdzv_conf timeout x"), "'timeout' has no value"));
  EXPECT_TRUE(has(refusal_of("--rdzv_conf =5 x"), "has no key"));
  EXPECT_TRUE(has(refusal_of("--rdzv_conf timeout=soon x"), "timeout"));
  EXPECT_TRUE(has(refusal_of("--tee 4 x"), "--tee is '4'"));
  EXPECT_TRUE(has(refusal_of("x", {{{"PET_REDIRECTS", "9"}}}), "PET_REDIRECTS is '9'"));
  EXPECT_TRUE(has(refusal_of("--max_restarts -1 x"), "--max_restarts is -1"));
  EXPECT_TRUE(has(refusal_of("--monitor_interval 0 x"), "--monitor_interval"));
  EXPECT_TRUE(has(refusal_of("--signals_to_handle SIGTERM,SIGFOO x"), "'SIGFOO' is not a signal"));
  EXPECT_TRUE(has(refusal_of("--signals_to_handle SIGKILL x"), "cannot be caught"));
  EXPECT_TRUE(has(refusal_of("--signals_to_handle= x"), "is '', which names none"));
  EXPECT_TRUE(has(refusal_of("--local_ranks_filter 0,b x"), "--local_ranks_filter is '0,b'"));
}

TEST(Refusals, NameFlagsThatCouldHaveNoEffect) {
  EXPECT_EQ(refusal_of("--cpu --gpu_ids 0 x", {{}, {}, gpus(2)}),
            "--gpu_ids has no effect with --cpu: pass one of them.");
  EXPECT_EQ(refusal_of("--cpu --num_processes 2 --local_ranks_filter 0,7 x"),
            "--local_ranks_filter is '0,7', but there is no local rank 7: they go from 0 to 1.");
  EXPECT_EQ(refusal_of("--cpu --num_processes 1 --local_ranks_filter 1 x"),
            "--local_ranks_filter is '1', but there is no local rank 1: the only one is 0.");
  const std::string line = "--cpu --num_processes 2 --log_line_prefix_template ";
  EXPECT_EQ(refusal_of(line + "[${rank}:${host}] x"),
            "--log_line_prefix_template is '[${rank}:${host}]', but nothing replaces ${host}. "
            "Known are ${role_name}, ${rank} and ${local_rank}.");
  EXPECT_TRUE(has(refusal_of(line + "${rank x"), "nothing replaces ${rank."));
  EXPECT_EQ(refusal_of(line + "$[${role_name}${rank}${local_rank}] x"), "no error");
}

// --- what only Python can do

TEST(Refusals, NameTpusAndTheReason) {
  EXPECT_TRUE(starts(refusal_of("--tpu train.py"), "unsupported: --tpu cannot be granted"));
  EXPECT_TRUE(starts(refusal_of("--tpu_cluster train.py"), "unsupported: --tpu_cluster"));
  EXPECT_TRUE(starts(refusal_of("train.py", {{}, config("XLA", "num_processes: 8\n")}),
                     "unsupported: 'distributed_type' XLA in team.yaml"));
}

TEST(Refusals, NameFlagsThatMeanNothingToANativeProgram) {
  for (const auto* flag :
       {"--tpu_use_sudo", "--vm a", "--env A=1", "--downcast_bf16", "--main_training_function f",
        "--aws_access_key_id k", "--aws_secret_access_key s"}) {
    const auto name = words_of(flag).front();
    EXPECT_TRUE(starts(refusal_of(std::string(flag) + " ./train"),
                       "unsupported: " + name + " means nothing to a native program"));
    const auto plan = plan_of(std::string(flag) + " train.py");
    EXPECT_TRUE(has(warnings(plan), name + " has an effect on"));
  }
}

TEST(Refusals, DoNotConcernEnginesOfPythonWhichBecomeVariables) {
  EXPECT_EQ(refusal_of("--use_deepspeed --zero_stage 2 ./train"), "no error");
  EXPECT_EQ(refusal_of("--use_megatron_lm ./train"), "no error");
  EXPECT_EQ(refusal_of("--dynamo_backend inductor ./train"), "no error");
}

// --- processes and modes

TEST(Modes, TakeOneProcessPerAccelerator) {
  const auto run = resolved("x", {{}, {}, gpus(4)});
  EXPECT_EQ(run.num_processes, 4);
  EXPECT_TRUE(run.multi_gpu);
  EXPECT_EQ(run.mode, LaunchMode::kAgent);
  EXPECT_EQ(resolved("--gpu_ids 0,2 x", {{}, {}, gpus(4)}).num_processes, 2);
  EXPECT_EQ(resolved("x", {{}, {}, gpus(1)}).mode, LaunchMode::kSimple);
}

TEST(Modes, TakeOneProcessWithoutAccelerator) {
  const auto run = resolved("x", {{}, {}, cores(8)});
  EXPECT_EQ(run.num_processes, 1);
  EXPECT_EQ(run.mode, LaunchMode::kSimple);
}

TEST(Modes, CountTheDevicesOfEveryMachine) {
  const auto run =
      resolved("--num_machines 2 --machine_rank 0 --main_process_ip h x", {{}, {}, gpus(4)});
  EXPECT_EQ(run.num_processes, 8);
  EXPECT_EQ(run.processes_per_machine, 4);
}

TEST(Modes, SayOnceWhatWasTakenForGranted) {
  const auto plan = plan_of("x", {{}, {}, gpus(2)});
  EXPECT_EQ(plan.warnings.size(), 1U);
  for (const auto* part : {"--num_processes 2", "--num_machines 1", "--mixed_precision no",
                           "--dynamo_backend no", "--multi_gpu", "--num_processes 1"}) {
    EXPECT_TRUE(has(plan.warnings.front(), part));
  }
  EXPECT_EQ(warnings(plan_of("--quiet x", {{}, {}, gpus(2)})), "");
  // Only a guessed number of processes is worth a line.
  EXPECT_EQ(warnings(plan_of("--num_processes 1 x", {{}, {}, gpus(2)})), "");
  EXPECT_EQ(warnings(plan_of("--num_processes 2 x", {{}, {}, gpus(2)})), "");
  EXPECT_EQ(warnings(plan_of("--cpu --num_processes 2 x", {{}, {}, cores(8)})), "");
}

TEST(Modes, StartAllProcessesOfACpuRun) {
  for (const auto* line : {"--cpu --num_processes 3 x", "--num_processes 3 x"}) {
    const auto run = resolved(line, {{}, {}, cores(8)});
    EXPECT_EQ(run.mode, LaunchMode::kAgent) << line;
    EXPECT_TRUE(run.cpu) << line;
    EXPECT_EQ(run.processes_per_machine, 3) << line;
  }
  const std::string file = config("MULTI_CPU", "num_processes: 3\nuse_cpu: true\n");
  EXPECT_EQ(resolved("x", {{}, file, gpus(2)}).mode, LaunchMode::kAgent);
  EXPECT_TRUE(resolved("x", {{}, file, gpus(2)}).cpu);
}

TEST(Modes, WarnWhenAnEngineEndsUpOnTheCpu) {
  const auto plan = plan_of("--use_fsdp --num_processes 2 x", {{}, {}, cores(2)});
  EXPECT_TRUE(has(warnings(plan), "There is no accelerator here, so the 2 processes train"));
  EXPECT_EQ(variable(plan, "ACCELERATE_USE_FSDP"), "true");
  EXPECT_EQ(variable(plan, "ACCELERATE_USE_CPU"), "True");
  EXPECT_FALSE(
      has(warnings(plan_of("--cpu --num_processes 2 x", {{}, {}, cores(2)})), "accelerator"));
}

TEST(Modes, GoThroughTheAgentWithAnEngineEvenForOneProcess) {
  EXPECT_EQ(resolved("--use_fsdp --num_processes 1 x", {{}, {}, gpus(1)}).mode, LaunchMode::kAgent);
  EXPECT_EQ(resolved("--use_megatron_lm --num_processes 1 x", {{}, {}, gpus(1)}).mode,
            LaunchMode::kAgent);
}

TEST(Modes, StartSeveralProcessesOnASingleGpuToo) {
  EXPECT_EQ(resolved("--num_processes 2 x", {{}, {}, gpus(1)}).mode, LaunchMode::kAgent);
}

TEST(Modes, BecomeOneWorkerInsideAnMpiJob) {
  const Variables mpi{{"OMPI_COMM_WORLD_SIZE", "2"},
                      {"OMPI_COMM_WORLD_RANK", "0"},
                      {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  const auto plan = plan_of("--cpu --num_processes 2 x", {mpi, {}, cores(8)});
  EXPECT_EQ(plan.mode, LaunchMode::kSimple);
  EXPECT_EQ(variable(plan, "MASTER_ADDR"), "127.0.0.1");
  EXPECT_EQ(variable(plan, "MASTER_PORT"), "29500");
  EXPECT_EQ(variable(plan, "OMP_NUM_THREADS"), "4");
  EXPECT_EQ(resolved("--use_fsdp --num_processes 2 x", {mpi, {}, gpus(2)}).mode,
            LaunchMode::kSimple);
}

TEST(Modes, LeaveTheAddressOfAnMpiJobOnSeveralHostsOpen) {
  const Variables mpi{{"OMPI_COMM_WORLD_SIZE", "4"},
                      {"OMPI_COMM_WORLD_RANK", "0"},
                      {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  EXPECT_EQ(variable(plan_of("--cpu --num_processes 4 x", {mpi}), "MASTER_ADDR"), "not set");
  EXPECT_EQ(
      variable(plan_of("--cpu --num_processes 4 --main_process_ip h x", {mpi}), "MASTER_ADDR"),
      "h");
}

TEST(Modes, BecomeOneWorkerOfATorchrunJobOnTheCpu) {
  const Variables torchrun{{"WORLD_SIZE", "2"}, {"RANK", "1"}, {"LOCAL_RANK", "1"}};
  EXPECT_EQ(resolved("--cpu --num_processes 2 x", {torchrun}).mode, LaunchMode::kSimple);
  // Containers carry it around.
  EXPECT_EQ(resolved("--cpu --num_processes 2 x", {{{"WORLD_SIZE", "1"}}}).mode,
            LaunchMode::kAgent);
}

TEST(Modes, BelieveAMakerWhoseDevicesCannotBeCounted) {
  const auto plan =
      plan_of("--gpu_ids 0,1 x", {{}, config("MULTI_NPU", "num_processes: 2\n"), cores(4)});
  EXPECT_EQ(variable(plan, "ASCEND_RT_VISIBLE_DEVICES"), "0,1");
  EXPECT_EQ(variable(plan, "ACCELERATE_USE_CPU"), "not set");
}

TEST(Modes, CountDevicesAndNotTheirIds) {
  const Around without{{}, {}, cores(4)};
  const auto two = plan_of("--gpu_ids 0,1 --num_processes 2 x", without);
  EXPECT_TRUE(has(warnings(two), "There is no accelerator here, so the 2 processes train"));
  EXPECT_FALSE(has(warnings(two), "more than one GPU"));
  EXPECT_EQ(variable(two, "ACCELERATE_USE_CPU"), "True");
  const auto open = plan_of("--gpu_ids 0,1 x", without);
  EXPECT_EQ(open.mode, LaunchMode::kSimple);
  EXPECT_EQ(setting(open, "num_processes"), "1 (default)");
  EXPECT_TRUE(has(warnings(open), "There is no accelerator here: --gpu_ids 0,1 names none"));
  // Ids bring back what the environment hides.
  auto hidden = gpus(4);
  hidden.visible_count = 0;
  const auto chosen = plan_of("--gpu_ids 0,1 --num_processes 2 x", {{}, {}, hidden});
  EXPECT_FALSE(has(warnings(chosen), "There is no accelerator"));
  EXPECT_EQ(variable(chosen, "ACCELERATE_USE_CPU"), "not set");
}

// --- threads

struct ThreadCase {
  std::string line;
  Variables environment;
  std::string threads;
};
const std::vector<ThreadCase> kThreadCases{
    {"--num_cpu_threads_per_process 5 x", {{"OMP_NUM_THREADS", "2"}}, "5"},
    {"x", {{"OMP_NUM_THREADS", "2"}}, "2"},
    {"x", {{"OMP_NUM_THREADS", "4,2"}}, "4,2"},
    {"x", {}, "1"},
    {"--cpu x", {}, "8"},
    {"--cpu x", {{"OMP_NUM_THREADS", "0"}}, "8"},
    {"--cpu x", {{"OMP_NUM_THREADS", "-3"}}, "8"},
    {"--cpu --num_processes 3 x", {}, "2"},
    {"--cpu --num_processes 16 x", {}, "1"},
    {"--cpu --num_processes 4 --num_machines 2 --machine_rank 0 --main_process_ip h x", {}, "4"},
    {"--cpu --num_processes 8 x", {{"MPI_LOCALNRANKS", "2"}}, "4"},
};

TEST(Threads, AreTheFlagElseTheVariableElseTheCoresOfACpuRunSharedOut) {
  for (const auto& [line, environment, threads] : kThreadCases) {
    EXPECT_EQ(resolved(line, {environment, {}, cores(8)}).threads, threads) << line;
  }
}

TEST(Threads, AreAtLeastOne) {
  EXPECT_TRUE(has(refusal_of("--num_cpu_threads_per_process 0 x"), "at least 1"));
  EXPECT_TRUE(has(refusal_of("x", {{{"OMP_NUM_THREADS", "abc"}}}), "OMP_NUM_THREADS is 'abc'"));
}

// --- Slurm

Variables slurm(const Variables& more) {
  Variables variables{{"SLURM_JOB_ID", "4711"},
                      {"SLURM_STEP_ID", "0"},
                      {"SLURM_PROCID", "1"},
                      {"SLURM_STEP_NUM_TASKS", "2"},
                      {"SLURM_LOCALID", "0"},
                      {"SLURM_NODEID", "1"},
                      {"SLURM_STEP_NUM_NODES", "2"},
                      {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"},
                      {"SLURM_STEP_NODELIST", "n[3-4]"}};
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

MachineFacts with_resolver(MachineFacts facts) {
  facts.lookups.resolves = [](const std::string&) { return true; };
  return facts;
}

TEST(Slurm, TellsALauncherPerNodeWhereItIs) {
  const auto plan = plan_of("x", {slurm({}), {}, with_resolver(gpus(4))});
  EXPECT_EQ(setting(plan, "num_machines"), "2 (environment SLURM_STEP_NUM_NODES)");
  EXPECT_EQ(setting(plan, "machine_rank"), "1 (environment SLURM_NODEID)");
  EXPECT_EQ(setting(plan, "main_process_ip"), "n3 (environment SLURM_STEP_NODELIST)");
  EXPECT_EQ(plan.agent.master_port, port_for_step(4711, 0));
  EXPECT_EQ(plan.agent.node_rank, 1);
  EXPECT_EQ(plan.agent.nproc_per_node, 4);
  EXPECT_EQ(setting(plan, "num_processes"), "8 (default)");
}

TEST(Slurm, CountsLessThanFlags) {
  const auto plan =
      plan_of("--main_process_ip head --main_process_port 5 --machine_rank 0 --num_processes 4 x",
              {slurm({}), {}, gpus(4)});
  EXPECT_EQ(plan.agent.master_addr, "head");
  EXPECT_EQ(plan.agent.master_port, 5);
  EXPECT_EQ(plan.agent.node_rank, 0);
  EXPECT_EQ(
      plan_of("--num_machines 1 --num_processes 2 x", {slurm({}), {}, gpus(4)}).agent.max_nodes, 1);
}

TEST(Slurm, CountsMoreThanTheFile) {
  const std::string file = config("MULTI_GPU", "num_processes: 4\nnum_machines: 1\n");
  EXPECT_EQ(plan_of("x", {slurm({}), file, with_resolver(gpus(2))}).agent.max_nodes, 2);
}

TEST(Slurm, MakesEachOfSeveralTasksOneWorker) {
  const auto plan =
      plan_of("--num_processes 4 x",
              {slurm({{"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"}}),
               {},
               gpus(2)});
  EXPECT_EQ(plan.mode, LaunchMode::kSimple);
  EXPECT_EQ(variable(plan, "MASTER_ADDR"), "not set");
  EXPECT_TRUE(has(warnings(plan), "--ntasks-per-node=1"));
}

TEST(Slurm, IsNoJobInTheShellOfABatchScript) {
  for (const auto* step : {"batch", "interactive", "4294967291"}) {
    const auto run = resolved("--cpu --num_processes 2 x", {slurm({{"SLURM_STEP_ID", step}})});
    EXPECT_EQ(run.outer, OuterJob::kNone) << step;
    EXPECT_EQ(run.mode, LaunchMode::kAgent) << step;
  }
}

TEST(Slurm, WithPmiIsStillSlurm) {
  const auto plan =
      plan_of("--cpu --num_processes 4 x",
              {slurm({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}), {}, with_resolver(cores(4))});
  EXPECT_EQ(plan.mode, LaunchMode::kAgent);
  EXPECT_EQ(plan.agent.max_nodes, 2);
}

TEST(Slurm, IsForgottenBelowMpirun) {
  const auto run =
      resolved("--cpu --num_processes 4 x", {slurm({{"OMPI_COMM_WORLD_RANK", "1"},
                                                    {"OMPI_COMM_WORLD_SIZE", "4"},
                                                    {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                                    {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}})});
  EXPECT_EQ(run.outer, OuterJob::kMpi);
  EXPECT_EQ(run.mode, LaunchMode::kSimple);
}

}  // namespace
}  // namespace accelerate::detail::launch
