#include <gtest/gtest.h>

#include "launch/mode_variables.h"
#include "launch/planning.h"

namespace accelerate::detail::launch {
namespace {

const Variables kCommon{{"ACCELERATE_MIXED_PRECISION", "no"},
                        {"ACCELERATE_DYNAMO_BACKEND", "NO"},
                        {"ACCELERATE_DYNAMO_MODE", "default"},
                        {"ACCELERATE_DYNAMO_USE_FULLGRAPH", "False"},
                        {"ACCELERATE_DYNAMO_USE_DYNAMIC", "False"},
                        {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "False"},
                        {"OMP_NUM_THREADS", "1"}};

Variables with(Variables base, const Variables& more) {
  for (const auto& [name, value] : more) base[name] = value;
  return base;
}

// The variables of a run on GPUs.
Variables on_gpus(const std::string& line, const Variables& environment = {}) {
  return plan_of(line, {environment, {}, gpus(8)}).variables;
}

TEST(ModeVariables, OfASimpleRunAreFew) {
  EXPECT_EQ(on_gpus("--num_processes 1 x"), with(kCommon, {{"ACCELERATE_USE_CPU", "False"}}));
}

TEST(ModeVariables, OfACpuRunBindItsThreads) {
  EXPECT_EQ(plan_of("--cpu x").variables,
            with(kCommon, {{"ACCELERATE_USE_CPU", "True"},
                           {"KMP_AFFINITY", "granularity=fine,compact,1,0"},
                           {"KMP_BLOCKTIME", "1"}}));
  EXPECT_EQ(plan_of("--cpu --num_processes 2 x").variables, plan_of("--cpu x").variables);
}

TEST(ModeVariables, OfSeveralGpusAreTheCommonOnes) {
  EXPECT_EQ(on_gpus("--multi_gpu --num_processes 2 x"), kCommon);
}

TEST(ModeVariables, TurnDynamoIntoUpperCase) {
  const auto variables = on_gpus(
      "--num_processes 1 --dynamo_backend aot_eager --dynamo_mode max-autotune "
      "--dynamo_use_fullgraph --dynamo_use_dynamic --dynamo_use_regional_compilation x");
  EXPECT_EQ(variables.at("ACCELERATE_DYNAMO_BACKEND"), "AOT_EAGER");
  EXPECT_EQ(variables.at("ACCELERATE_DYNAMO_MODE"), "max-autotune");
  EXPECT_EQ(variables.at("ACCELERATE_DYNAMO_USE_FULLGRAPH"), "True");
  EXPECT_EQ(variables.at("ACCELERATE_DYNAMO_USE_DYNAMIC"), "True");
  EXPECT_EQ(variables.at("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"), "True");
}

TEST(ModeVariables, SayDebugMonitorAndAffinity) {
  const auto variables = on_gpus("--num_processes 1 --debug --monitor --enable_cpu_affinity x");
  EXPECT_EQ(variables.at("ACCELERATE_MONITOR"), "1");
  EXPECT_EQ(variables.at("ACCELERATE_DEBUG_MODE"), "true");
  EXPECT_EQ(variables.at("ACCELERATE_CPU_AFFINITY"), "1");
}

TEST(ModeVariables, NameTheDevices) {
  EXPECT_EQ(on_gpus("--num_processes 2 --gpu_ids 3,5 x").at("CUDA_VISIBLE_DEVICES"), "3,5");
  EXPECT_FALSE(on_gpus("--num_processes 2 --gpu_ids all x").contains("CUDA_VISIBLE_DEVICES"));
}

struct MakerCase {
  const char* type;
  const char* variable;
};
constexpr MakerCase kMakers[] = {
    {"MULTI_XPU", "ZE_AFFINITY_MASK"},          {"MULTI_MLU", "MLU_VISIBLE_DEVICES"},
    {"MULTI_SDAA", "SDAA_VISIBLE_DEVICES"},     {"MULTI_MUSA", "MUSA_VISIBLE_DEVICES"},
    {"MULTI_NPU", "ASCEND_RT_VISIBLE_DEVICES"}, {"MULTI_HPU", "HABANA_VISIBLE_MODULES"},
    {"MULTI_NEURON", "NEURON_RT_VISIBLE_CORES"}};

TEST(ModeVariables, NameTheDevicesOfOtherMakersByTheirVariables) {
  for (const auto& [type, name] : kMakers) {
    const auto plan =
        plan_of("x", {{}, config(type, "num_processes: 2\ngpu_ids: 0,1\n"), cores(2)});
    EXPECT_EQ(variable(plan, name), "0,1") << type;
  }
}

TEST(ModeVariables, OverwriteWhatTheFlagsDecide) {
  const Variables outer{{"ACCELERATE_MIXED_PRECISION", "fp16"}, {"OMP_NUM_THREADS", "9"}};
  const auto variables =
      on_gpus("--num_processes 1 --mixed_precision no --num_cpu_threads_per_process 2 x", outer);
  EXPECT_EQ(variables.at("ACCELERATE_MIXED_PRECISION"), "no");
  EXPECT_EQ(variables.at("OMP_NUM_THREADS"), "2");
}

TEST(ModeVariables, SwitchOffWhatTheEnvironmentHasOn) {
  const Variables outer{{"ACCELERATE_DEBUG_MODE", "1"},
                        {"ACCELERATE_MONITOR", "1"},
                        {"ACCELERATE_CPU_AFFINITY", "1"},
                        {"ACCELERATE_USE_CPU", "true"},
                        {"ACCELERATE_USE_DEEPSPEED", "true"}};
  const auto variables = on_gpus(
      "--no_debug --no_monitor --no_enable_cpu_affinity --no_cpu --multi_gpu --num_processes 2 x",
      outer);
  EXPECT_EQ(variables.at("ACCELERATE_MONITOR"), "0");
  EXPECT_EQ(variables.at("ACCELERATE_DEBUG_MODE"), "false");
  EXPECT_EQ(variables.at("ACCELERATE_CPU_AFFINITY"), "0");
  EXPECT_EQ(variables.at("ACCELERATE_USE_CPU"), "False");
  EXPECT_EQ(variables.at("ACCELERATE_USE_DEEPSPEED"), "false");
}

TEST(ModeVariables, OfFsdpAreInLowerCase) {
  EXPECT_EQ(on_gpus("--use_fsdp --num_processes 2 x"),
            with(kCommon, {{"ACCELERATE_USE_FSDP", "true"},
                           {"FSDP_VERSION", "1"},
                           {"FSDP_SHARDING_STRATEGY", "FULL_SHARD"},
                           {"FSDP_RESHARD_AFTER_FORWARD", "true"},
                           {"FSDP_OFFLOAD_PARAMS", "false"},
                           {"FSDP_MIN_NUM_PARAMS", "100000000"},
                           {"FSDP_FORWARD_PREFETCH", "false"},
                           {"FSDP_USE_ORIG_PARAMS", "true"},
                           {"FSDP_CPU_RAM_EFFICIENT_LOADING", "true"},
                           {"FSDP_SYNC_MODULE_STATES", "true"},
                           {"FSDP_ACTIVATION_CHECKPOINTING", "false"}}));
}

TEST(ModeVariables, OfFsdpHaveTheOptionalOnesWhereGiven) {
  const auto variables = on_gpus(
      "--use_fsdp --num_processes 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP "
      "--fsdp_transformer_layer_cls_to_wrap Block --fsdp_backward_prefetch BACKWARD_PRE "
      "--fsdp_state_dict_type FULL_STATE_DICT --fsdp_reshard_after_forward FULL_SHARD x");
  EXPECT_EQ(variables.at("FSDP_AUTO_WRAP_POLICY"), "TRANSFORMER_BASED_WRAP");
  EXPECT_EQ(variables.at("FSDP_TRANSFORMER_CLS_TO_WRAP"), "Block");
  EXPECT_EQ(variables.at("FSDP_BACKWARD_PREFETCH"), "BACKWARD_PRE");
  EXPECT_EQ(variables.at("FSDP_STATE_DICT_TYPE"), "FULL_STATE_DICT");
  EXPECT_EQ(variables.at("FSDP_RESHARD_AFTER_FORWARD"), "full_shard");
}

TEST(ModeVariables, OfParallelismComeWithTheirSizes) {
  const std::string line =
      "--use_fsdp --fsdp_version 2 --use_parallelism_config --num_processes 8 ";
  auto variables = on_gpus(line + "--parallelism_config_tp_size 2 x");
  EXPECT_EQ(variables.at("ACCELERATE_USE_PARALLELISM_CONFIG"), "true");
  EXPECT_EQ(variables.at("PARALLELISM_CONFIG_TP_SIZE"), "2");
  EXPECT_EQ(variables.at("PARALLELISM_CONFIG_CP_BACKEND"), "torch");
  EXPECT_EQ(variables.at("PARALLELISM_CONFIG_SP_BACKEND"), "deepspeed");
  EXPECT_FALSE(variables.contains("PARALLELISM_CONFIG_CP_COMM_STRATEGY"));
  EXPECT_FALSE(variables.contains("PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE"));
  variables = on_gpus(line +
                      "--parallelism_config_cp_size 2 --parallelism_config_sp_size 2 "
                      "--parallelism_config_sp_seq_length 4096 x");
  EXPECT_EQ(variables.at("PARALLELISM_CONFIG_CP_COMM_STRATEGY"), "allgather");
  EXPECT_EQ(variables.at("PARALLELISM_CONFIG_SP_SEQ_LENGTH"), "4096");
  EXPECT_EQ(variables.at("PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE"), "True");
  EXPECT_EQ(variables.at("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION"), "sdpa");
}

TEST(ModeVariables, OfAPipelineNeedNoFsdp) {
  for (const auto* device : {"", "--cpu "}) {
    const auto line = std::string(device) + "--use_parallelism_config --num_processes 2 ";
    EXPECT_FALSE(
        on_gpus(line + "--parallelism_config_pp_size 2 x").contains("ACCELERATE_USE_FSDP"));
    EXPECT_EQ(on_gpus(line + "--parallelism_config_pp_size 2 x").at("PARALLELISM_CONFIG_PP_SIZE"),
              "2");
  }
}

TEST(ModeVariables, OfMegatronComeOnTheCpuToo) {
  const auto variables = on_gpus("--cpu --use_megatron_lm --num_processes 2 x");
  EXPECT_EQ(variables.at("ACCELERATE_USE_MEGATRON_LM"), "true");
  EXPECT_EQ(variables.at("MEGATRON_LM_PP_DEGREE"), "1");
}

TEST(ModeVariables, OfMegatronAreAllThatHaveAValue) {
  const auto variables = on_gpus(
      "--use_megatron_lm --num_processes 8 --megatron_lm_pp_degree 4 "
      "--megatron_lm_sequence_parallelism true --megatron_lm_hidden_dropout 1 x");
  EXPECT_EQ(variables.at("ACCELERATE_USE_MEGATRON_LM"), "true");
  EXPECT_EQ(variables.at("MEGATRON_LM_TP_DEGREE"), "1");
  EXPECT_EQ(variables.at("MEGATRON_LM_PP_DEGREE"), "4");
  EXPECT_EQ(variables.at("MEGATRON_LM_GRADIENT_CLIPPING"), "1.0");
  EXPECT_EQ(variables.at("MEGATRON_LM_SEQUENCE_PARALLELISM"), "True");
  EXPECT_EQ(variables.at("MEGATRON_LM_NO_LOAD_OPTIM"), "False");
  EXPECT_EQ(variables.at("MEGATRON_LM_HIDDEN_DROPOUT"), "1.0");
  EXPECT_FALSE(variables.contains("MEGATRON_LM_NUM_MICRO_BATCHES"));
}

TEST(ModeVariables, OfFp8ComeWithThatPrecisionOnly) {
  EXPECT_FALSE(on_gpus("--num_processes 1 --fp8_margin 2 x").contains("ACCELERATE_FP8_MARGIN"));
  const auto variables = on_gpus(
      "--num_processes 1 --mixed_precision fp8 --fp8_backend te "
      "--fp8_override_linear_precision false,true,false x");
  EXPECT_EQ(variables.at("ACCELERATE_FP8_BACKEND"), "te");
  EXPECT_EQ(variables.at("ACCELERATE_FP8_FORMAT"), "HYBRID");
  EXPECT_EQ(variables.at("ACCELERATE_FP8_AMAX_HISTORY_LEN"), "1024");
  EXPECT_EQ(variables.at("ACCELERATE_FP8_OVERRIDE_FPROP"), "False");
  EXPECT_EQ(variables.at("ACCELERATE_FP8_OVERRIDE_DGRAD"), "True");
  EXPECT_EQ(variables.at("ACCELERATE_FP8_OVERRIDE_WGRAD"), "False");
  EXPECT_EQ(variables.at("ACCELERATE_FP8_PAD_INNER_DIM"), "True");
}

TEST(ModeVariables, OfDeepSpeedHaveNoDynamo) {
  EXPECT_EQ(on_gpus("--use_deepspeed --num_processes 2 --zero_stage 3 --gradient_clipping 1 "
                    "--gradient_accumulation_steps auto --offload_optimizer_device CPU "
                    "--zero3_init_flag True --offload_param_nvme_path /n --deepspeed_config_file "
                    "d.json --deepspeed_moe_layer_cls_names A x",
                    {{"PYTHONPATH", "/a::/b"}}),
            (Variables{{"ACCELERATE_MIXED_PRECISION", "no"},
                       {"ACCELERATE_USE_DEEPSPEED", "true"},
                       {"ACCELERATE_CONFIG_DS_FIELDS", ""},
                       {"ACCELERATE_DEEPSPEED_ZERO_STAGE", "3"},
                       {"ACCELERATE_GRADIENT_CLIPPING", "1.0"},
                       {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto"},
                       {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu"},
                       {"ACCELERATE_DEEPSPEED_ZERO3_INIT", "true"},
                       {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "/n"},
                       {"ACCELERATE_DEEPSPEED_CONFIG_FILE", "d.json"},
                       {"ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "A"},
                       {"OMP_NUM_THREADS", "1"},
                       {"PYTHONPATH", "/a:/b:/home/user"}}));
}

TEST(ModeVariables, OfDeepSpeedNameTheFieldsOfTheFile) {
  const std::string file = config("DEEPSPEED",
                                  "num_processes: 2\nmixed_precision: bf16\ndeepspeed_config:\n"
                                  "  zero_stage: 2\n  gradient_clipping: 1.0\n");
  EXPECT_EQ(variable(plan_of("x", {{}, file, gpus(2)}), "ACCELERATE_CONFIG_DS_FIELDS"),
            "zero_stage,gradient_clipping,mixed_precision");
  EXPECT_EQ(variable(plan_of("--mixed_precision no x", {{}, file, gpus(2)}),
                     "ACCELERATE_CONFIG_DS_FIELDS"),
            "zero_stage,gradient_clipping");
}

TEST(ModeVariables, KeepGpusWithoutPeerAccessApart) {
  auto facts = gpus(2);
  facts.needs_p2p_disabled = true;
  const auto plan = plan_of("--num_processes 2 x", {{}, {}, facts});
  EXPECT_EQ(variable(plan, "NCCL_P2P_DISABLE"), "1");
  EXPECT_EQ(variable(plan, "NCCL_IB_DISABLE"), "1");
  EXPECT_TRUE(has(warnings(plan), "RTX 40"));
  const auto told = plan_of("--num_processes 2 x",
                            {{{"NCCL_P2P_DISABLE", "0"}, {"NCCL_IB_DISABLE", "0"}}, {}, facts});
  EXPECT_EQ(variable(told, "NCCL_P2P_DISABLE"), "not set");
  EXPECT_FALSE(has(warnings(told), "RTX 40"));
}

TEST(ModeVariables, DoNotUpperCaseNamesOfTheEnvironment) {
  const auto variables = on_gpus("--num_processes 1 x", {{"http_proxy", "p"}});
  EXPECT_FALSE(variables.contains("HTTP_PROXY"));
}

}  // namespace
}  // namespace accelerate::detail::launch
