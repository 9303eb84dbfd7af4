#include <map>
#include <string>

#include "core/config_fields.h"

namespace accelerate::detail::inline core {
namespace {

using Sections = std::map<std::string, std::vector<std::string>, std::less<>>;

// The flags of the launcher that have no top-level key, and what the questionnaire writes.
const Sections& sections() {  // NOLINT(readability-function-size): a table
  static const Sections kSections{
      {"deepspeed_config",
       {"deepspeed_config_file", "deepspeed_exclusion_filter", "deepspeed_hostfile",
        "deepspeed_inclusion_filter", "deepspeed_moe_layer_cls_names",
        "deepspeed_multinode_launcher", "gradient_accumulation_steps", "gradient_clipping",
        "offload_optimizer_device", "offload_optimizer_nvme_path", "offload_param_device",
        "offload_param_nvme_path", "zero3_init_flag", "zero3_save_16bit_model", "zero_stage"}},
      {"dynamo_config",
       {"dynamo_backend", "dynamo_mode", "dynamo_use_dynamic", "dynamo_use_fullgraph",
        "dynamo_use_regional_compilation"}},
      {"fp8_config",
       {"fp8_amax_compute_algo", "fp8_amax_compute_algorithm", "fp8_amax_history_len",
        "fp8_amax_history_length", "fp8_backend", "fp8_enable_fsdp_float8_all_gather", "fp8_format",
        "fp8_interval", "fp8_margin", "fp8_opt_level", "fp8_optimization_level",
        "fp8_override_linear_precision", "fp8_pad_inner_dim", "fp8_use_autocast_during_eval"}},
      {"fsdp_config",
       {"fsdp_activation_checkpointing", "fsdp_auto_wrap_policy", "fsdp_backward_prefetch",
        "fsdp_cpu_ram_efficient_loading", "fsdp_forward_prefetch", "fsdp_ignored_modules",
        "fsdp_min_num_params", "fsdp_offload_params", "fsdp_reshard_after_forward",
        "fsdp_sharding_strategy", "fsdp_state_dict_type", "fsdp_sync_module_states",
        "fsdp_transformer_layer_cls_to_wrap", "fsdp_use_orig_params", "fsdp_version"}},
      {"megatron_lm_config",
       {"megatron_lm_attention_backend",
        "megatron_lm_attention_dropout",
        "megatron_lm_attention_softmax_in_fp32",
        "megatron_lm_calculate_per_token_loss",
        "megatron_lm_context_parallel_size",
        "megatron_lm_decoder_last_pipeline_num_layers",
        "megatron_lm_eod_mask_loss",
        "megatron_lm_expert_model_parallel_size",
        "megatron_lm_expert_tensor_parallel_size",
        "megatron_lm_gradient_clipping",
        "megatron_lm_hidden_dropout",
        "megatron_lm_no_load_optim",
        "megatron_lm_no_save_optim",
        "megatron_lm_num_micro_batches",
        "megatron_lm_optimizer_cpu_offload",
        "megatron_lm_overlap_cpu_optimizer_d2h_h2d",
        "megatron_lm_pp_degree",
        "megatron_lm_recompute_activations",
        "megatron_lm_recompute_granularity",
        "megatron_lm_recompute_method",
        "megatron_lm_recompute_num_layers",
        "megatron_lm_sequence_parallelism",
        "megatron_lm_tp_degree",
        "megatron_lm_use_custom_fsdp",
        "megatron_lm_use_distributed_optimizer",
        "megatron_lm_use_precision_aware_optimizer",
        "megatron_lm_use_rotary_position_embeddings"}},
      // mpirun_ccl is of older versions; the launcher still knows it.
      {"mpirun_config", {"mpirun_ccl", "mpirun_hostfile"}},
      {"parallelism_config",
       {"parallelism_config_cp_backend", "parallelism_config_cp_comm_strategy",
        "parallelism_config_cp_size", "parallelism_config_dp_replicate_size",
        "parallelism_config_dp_shard_size", "parallelism_config_sp_attn_implementation",
        "parallelism_config_sp_backend", "parallelism_config_sp_seq_length",
        "parallelism_config_sp_seq_length_is_variable", "parallelism_config_sp_size",
        "parallelism_config_tp_size"}},
  };
  return kSections;
}

}  // namespace

const std::vector<std::string>& known_section_keys(std::string_view section) {
  static const std::vector<std::string> kNone;
  const auto found = sections().find(section);
  return found != sections().end() ? found->second : kNone;
}

std::string_view optional_section_prefix(std::string_view section) {
  if (section == "fsdp_config") return "fsdp_";
  if (section == "fp8_config") return "fp8_";
  if (section == "dynamo_config") return "dynamo_";
  return "";
}

}  // namespace accelerate::detail::inline core
