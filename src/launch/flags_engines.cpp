#include <array>
#include <deque>
#include <string>

#include "core/text.h"
#include "launch/flags.h"

namespace accelerate::detail::launch {
namespace {

using enum FlagKind;

// clang-format off
constexpr auto kDeepspeedFlags = std::to_array<Flag>({
    {.name = "deepspeed_config_file", .variable = "ACCELERATE_DEEPSPEED_CONFIG_FILE", .value_name = "FILE",
     .help = "DeepSpeed's own configuration (JSON)."},
    {.name = "zero_stage", .kind = kInteger, .choices = "0 1 2 3", .variable = "ACCELERATE_DEEPSPEED_ZERO_STAGE",
     .help = "What ZeRO shards: 1 optimizer states, 2 gradients too, 3 parameters too."},
    {.name = "offload_optimizer_device", .choices = "none cpu nvme", .loose = true,
     .variable = "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", .help = "Where optimizer states are kept."},
    {.name = "offload_param_device", .choices = "none cpu nvme", .loose = true,
     .variable = "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", .help = "Where parameters are kept."},
    {.name = "offload_optimizer_nvme_path", .variable = "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
     .value_name = "DIR", .help = "The folder on the drive for optimizer states."},
    {.name = "offload_param_nvme_path", .variable = "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
     .value_name = "DIR", .help = "The folder on the drive for parameters."},
    {.name = "gradient_accumulation_steps", .kind = kIntegerOrAuto,
     .variable = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", .help = "Batches whose gradients add up to one step."},
    {.name = "gradient_clipping", .kind = kNumberOrAuto, .variable = "ACCELERATE_GRADIENT_CLIPPING",
     .help = "The largest gradient norm."},
    {.name = "zero3_init_flag", .kind = kTruth, .variable = "ACCELERATE_DEEPSPEED_ZERO3_INIT",
     .help = "Build models sharded from the start (stage 3)."},
    {.name = "zero3_save_16bit_model", .kind = kTruth, .variable = "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
     .help = "Gather 16-bit weights when saving (stage 3)."},
    {.name = "deepspeed_hostfile", .value_name = "FILE", .help = "The hosts and their slots, for several machines."},
    {.name = "deepspeed_exclusion_filter", .value_name = "FILTER", .help = "Hosts and slots to leave out."},
    {.name = "deepspeed_inclusion_filter", .value_name = "FILTER", .help = "Hosts and slots to use."},
    {.name = "deepspeed_multinode_launcher", .choices = "pdsh standard openmpi mvapich mpich nossh slurm",
     .help = "What starts other machines (pdsh); standard: this launcher runs on each of them."},
    {.name = "deepspeed_moe_layer_cls_names", .variable = "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
     .value_name = "NAMES", .help = "Classes of mixture-of-experts layers, with commas between them."},
});

constexpr auto kFsdpFlags = std::to_array<Flag>({
    {.name = "fsdp_version", .fallback = "1", .choices = "1 2", .help = "Which FSDP."},
    {.name = "fsdp_offload_params", .kind = kTruth, .fallback = "false",
     .help = "Keep parameters and gradients on the CPU."},
    {.name = "fsdp_min_num_params", .kind = kInteger, .fallback = "100000000",
     .help = "The size from which a module is wrapped by itself."},
    {.name = "fsdp_sharding_strategy", .fallback = "FULL_SHARD",
     .choices = "FULL_SHARD SHARD_GRAD_OP NO_SHARD HYBRID_SHARD HYBRID_SHARD_ZERO2", .loose = true,
     .value_name = "STRATEGY", .help = "What is sharded (version 1)."},
    {.name = "fsdp_reshard_after_forward", .kind = kTruthOrChoice, .fallback = "true",
     .choices = "true false FULL_SHARD SHARD_GRAD_OP NO_SHARD HYBRID_SHARD HYBRID_SHARD_ZERO2", .loose = true,
     .value_name = "TRUTH",
     .help = "Free gathered parameters after the forward pass: true or false (version 2), or a strategy (version 1)."},
    {.name = "fsdp_auto_wrap_policy", .choices = "TRANSFORMER_BASED_WRAP SIZE_BASED_WRAP NO_WRAP", .loose = true,
     .value_name = "POLICY", .help = "Which modules become units of their own."},
    {.name = "fsdp_transformer_layer_cls_to_wrap", .variable = "FSDP_TRANSFORMER_CLS_TO_WRAP", .value_name = "NAMES",
     .help = "Classes to wrap, with commas between them."},
    {.name = "fsdp_backward_prefetch", .choices = "BACKWARD_PRE BACKWARD_POST NO_PREFETCH", .loose = true,
     .value_name = "WHEN", .help = "When the next parameters are gathered in the backward pass."},
    {.name = "fsdp_state_dict_type", .choices = "FULL_STATE_DICT LOCAL_STATE_DICT SHARDED_STATE_DICT", .loose = true,
     .value_name = "TYPE", .help = "How checkpoints hold the model."},
    {.name = "fsdp_forward_prefetch", .kind = kTruth, .fallback = "false",
     .help = "Gather the next parameters early in the forward pass."},
    {.name = "fsdp_use_orig_params", .kind = kTruth, .fallback = "true",
     .help = "Keep the original parameters, so that some may be frozen (version 1)."},
    {.name = "fsdp_cpu_ram_efficient_loading", .kind = kTruth, .fallback = "true",
     .help = "Only the first process loads the weights; needs --fsdp_sync_module_states."},
    {.name = "fsdp_sync_module_states", .kind = kTruth, .fallback = "true",
     .help = "Rank 0 sends its weights to all."},
    {.name = "fsdp_activation_checkpointing", .kind = kTruth, .fallback = "false",
     .help = "Compute activations again instead of keeping them."},
    {.name = "fsdp_ignored_modules", .file_only = true},
});

constexpr auto kMegatronFlags = std::to_array<Flag>({
    {.name = "megatron_lm_tp_degree", .kind = kInteger, .fallback = "1", .help = "Tensor parallel degree."},
    {.name = "megatron_lm_use_custom_fsdp", .kind = kTruth, .fallback = "false", .help = "Megatron's own FSDP."},
    {.name = "megatron_lm_no_load_optim", .kind = kTruth, .fallback = "false",
     .help = "Do not load optimizer states."},
    {.name = "megatron_lm_eod_mask_loss", .kind = kTruth, .fallback = "false",
     .help = "Leave ends of documents out of the loss."},
    {.name = "megatron_lm_no_save_optim", .kind = kTruth, .fallback = "false",
     .help = "Do not save optimizer states."},
    {.name = "megatron_lm_optimizer_cpu_offload", .kind = kTruth, .fallback = "false",
     .help = "Keep the optimizer on the CPU."},
    {.name = "megatron_lm_use_precision_aware_optimizer", .kind = kTruth, .fallback = "false",
     .help = "The optimizer with states of lower precision."},
    {.name = "megatron_lm_overlap_cpu_optimizer_d2h_h2d", .kind = kTruth, .fallback = "false",
     .help = "Overlap the CPU optimizer with copies to and from the device."},
    {.name = "megatron_lm_decoder_last_pipeline_num_layers", .kind = kInteger,
     .help = "Layers of the last pipeline stage."},
    {.name = "megatron_lm_pp_degree", .kind = kInteger, .fallback = "1", .help = "Pipeline parallel degree."},
    {.name = "megatron_lm_num_micro_batches", .kind = kInteger, .help = "Micro batches of the pipeline."},
    {.name = "megatron_lm_sequence_parallelism", .kind = kTruth, .help = "Sequence parallelism."},
    {.name = "megatron_lm_recompute_activations", .kind = kTruth, .help = "Compute activations again, selectively."},
    {.name = "megatron_lm_use_distributed_optimizer", .kind = kTruth,
     .help = "Shard optimizer states over data parallel ranks."},
    {.name = "megatron_lm_gradient_clipping", .kind = kNumber, .fallback = "1.0",
     .help = "The largest gradient norm; 0 for none."},
    {.name = "megatron_lm_recompute_granularity", .help = "full or selective."},
    {.name = "megatron_lm_recompute_method", .help = "uniform or block."},
    {.name = "megatron_lm_recompute_num_layers", .kind = kInteger, .help = "Layers to compute again."},
    {.name = "megatron_lm_attention_backend", .help = "Which attention."},
    {.name = "megatron_lm_expert_model_parallel_size", .kind = kInteger, .help = "Expert parallel size."},
    {.name = "megatron_lm_context_parallel_size", .kind = kInteger, .help = "Context parallel size."},
    {.name = "megatron_lm_attention_dropout", .kind = kNumber, .help = "Dropout of the attention."},
    {.name = "megatron_lm_hidden_dropout", .kind = kNumber, .help = "Dropout of hidden states."},
    {.name = "megatron_lm_attention_softmax_in_fp32", .kind = kTruth, .help = "The softmax in 32 bits."},
    {.name = "megatron_lm_expert_tensor_parallel_size", .kind = kInteger, .help = "Tensor parallel size of experts."},
    {.name = "megatron_lm_calculate_per_token_loss", .kind = kTruth, .help = "The loss per token."},
    {.name = "megatron_lm_use_rotary_position_embeddings", .kind = kTruth, .help = "Rotary position embeddings."},
});

constexpr auto kFp8Flags = std::to_array<Flag>({
    {.name = "fp8_backend", .choices = "ao te msamp", .loose = true,
     .help = "Who computes in 8 bits: torchao, Transformer Engine, MS-AMP."},
    {.name = "fp8_use_autocast_during_eval", .kind = kSwitch, .fallback = "false",
     .help = "8 bits in evaluation too (te)."},
    {.name = "fp8_margin", .kind = kInteger, .fallback = "0", .help = "Margin of the scaling factor (te)."},
    {.name = "fp8_interval", .kind = kInteger, .fallback = "1", .help = "Steps between new scaling factors (te)."},
    {.name = "fp8_format", .fallback = "HYBRID", .choices = "HYBRID E4M3 E5M2", .loose = true,
     .help = "The 8-bit format (te)."},
    {.name = "fp8_amax_history_len", .kind = kInteger, .fallback = "1024",
     .help = "Length of the history of maxima (te)."},
    {.name = "fp8_amax_compute_algo", .fallback = "most_recent", .choices = "max most_recent", .loose = true,
     .help = "Which of these maxima counts (te)."},
    {.name = "fp8_override_linear_precision", .kind = kTruths, .fallback = "false,false,false", .value_name = "F,D,W",
     .help = "fprop, dgrad and wgrad in higher precision: three truth values (te)."},
    {.name = "fp8_opt_level", .fallback = "O2", .choices = "O1 O2", .help = "Level of 8-bit communication (msamp)."},
    {.name = "fp8_enable_fsdp_float8_all_gather", .kind = kTruth, .fallback = "true",
     .help = "FSDP gathers 8 bits (ao)."},
    {.name = "fp8_pad_inner_dim", .kind = kTruth, .fallback = "true",
     .help = "Pad matrices to what 8 bits need (ao)."},
});

constexpr auto kParallelismFlags = std::to_array<Flag>({
    {.name = "parallelism_config_dp_replicate_size", .kind = kInteger, .fallback = "1",
     .help = "Copies of the model."},
    {.name = "parallelism_config_dp_shard_size", .kind = kInteger, .fallback = "1",
     .help = "Processes that share one copy's shards."},
    {.name = "parallelism_config_pp_size", .kind = kInteger, .help = "Stages of a pipeline."},
    {.name = "parallelism_config_tp_size", .kind = kInteger, .fallback = "1", .help = "Tensor parallel size."},
    {.name = "parallelism_config_cp_size", .kind = kInteger, .fallback = "1", .help = "Context parallel size."},
    {.name = "parallelism_config_cp_backend", .fallback = "torch", .choices = "torch",
     .help = "Who does context parallelism."},
    {.name = "parallelism_config_cp_comm_strategy", .fallback = "allgather", .choices = "allgather alltoall",
     .help = "How its parts are exchanged."},
    {.name = "parallelism_config_sp_size", .kind = kInteger, .fallback = "1", .help = "Sequence parallel size."},
    {.name = "parallelism_config_sp_backend", .fallback = "deepspeed", .choices = "deepspeed",
     .help = "Who does sequence parallelism."},
    {.name = "parallelism_config_sp_seq_length", .kind = kInteger, .help = "The length, where all batches have one."},
    {.name = "parallelism_config_sp_seq_length_is_variable", .kind = kTruth, .fallback = "true",
     .help = "Lengths change between batches."},
    {.name = "parallelism_config_sp_attn_implementation", .fallback = "sdpa", .value_name = "NAME",
     .help = "sdpa, flash_attention_2 or flash_attention_3."},
});
// clang-format on

}  // namespace

std::span<const Flag> engine_flags() {
  static std::deque<std::string> variables;  // keeps its strings in place
  static const auto all = [] {
    std::vector<Flag> flags;
    // Rows of one engine with what they have in common: the group, the section of the configuration
    // file, and the variable `prefix` + NAME unless the row names another.
    const auto add = [&](std::span<const Flag> rows, FlagGroup group, std::string_view key,
                         const char* prefix) {
      for (Flag flag : rows) {
        flag.group = group;
        flag.key = key;
        // Three truth values have a variable each.
        if (prefix != nullptr && flag.variable.empty() && flag.kind != kTruths) {
          flag.variable = variables.emplace_back(str(prefix, to_upper(flag.name)));
        }
        flags.push_back(flag);
      }
    };
    add(kDeepspeedFlags, FlagGroup::kDeepspeed, "deepspeed_config", nullptr);
    add(kFsdpFlags, FlagGroup::kFsdp, "fsdp_config", "");
    add(kMegatronFlags, FlagGroup::kMegatron, "megatron_lm_config", "");
    add(kFp8Flags, FlagGroup::kFp8, "fp8_config", "ACCELERATE_");
    add(kParallelismFlags, FlagGroup::kParallelism, "parallelism_config", "");
    return flags;
  }();
  return all;
}

}  // namespace accelerate::detail::launch
