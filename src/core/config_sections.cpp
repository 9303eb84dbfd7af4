#include <algorithm>
#include <array>

#include "core/config_fields.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

struct Section {
  std::string_view name;
  std::string_view prefix;  ///< of all keys
  bool optional_prefix;     ///< a file may leave it out
  std::string_view keys;    ///< without the prefix
};

// The flags of the launcher that have no top-level key, and what the questionnaire writes.
// clang-format off
constexpr auto kSections = std::to_array<Section>({
    {"deepspeed_config", "", false,
     "deepspeed_config_file deepspeed_exclusion_filter deepspeed_hostfile "
     "deepspeed_inclusion_filter deepspeed_moe_layer_cls_names "
     "deepspeed_multinode_launcher gradient_accumulation_steps gradient_clipping "
     "offload_optimizer_device offload_optimizer_nvme_path offload_param_device "
     "offload_param_nvme_path zero3_init_flag zero3_save_16bit_model zero_stage"},
    {"dynamo_config", "dynamo_", true,
     "backend mode use_dynamic use_fullgraph use_regional_compilation"},
    {"fp8_config", "fp8_", true,
     "amax_compute_algo amax_compute_algorithm amax_history_len amax_history_length "
     "backend enable_fsdp_float8_all_gather format interval margin opt_level "
     "optimization_level override_linear_precision pad_inner_dim use_autocast_during_eval"},
    {"fsdp_config", "fsdp_", true,
     "activation_checkpointing auto_wrap_policy backward_prefetch "
     "cpu_ram_efficient_loading forward_prefetch ignored_modules min_num_params "
     "offload_params reshard_after_forward sharding_strategy state_dict_type "
     "sync_module_states transformer_layer_cls_to_wrap use_orig_params version"},
    {"megatron_lm_config", "megatron_lm_", false,
     "attention_backend attention_dropout attention_softmax_in_fp32 "
     "calculate_per_token_loss context_parallel_size decoder_last_pipeline_num_layers "
     "eod_mask_loss expert_model_parallel_size expert_tensor_parallel_size "
     "gradient_clipping hidden_dropout no_load_optim no_save_optim num_micro_batches "
     "optimizer_cpu_offload overlap_cpu_optimizer_d2h_h2d pp_degree recompute_activations "
     "recompute_granularity recompute_method recompute_num_layers sequence_parallelism "
     "tp_degree use_custom_fsdp use_distributed_optimizer use_precision_aware_optimizer "
     "use_rotary_position_embeddings"},
    // mpirun_ccl is of older versions; the launcher still knows it.
    {"mpirun_config", "mpirun_", false,
     "ccl hostfile"},
    {"parallelism_config", "parallelism_config_", false,
     "cp_backend cp_comm_strategy cp_size dp_replicate_size dp_shard_size "
     "sp_attn_implementation sp_backend sp_seq_length sp_seq_length_is_variable sp_size "
     "tp_size"},
});
// clang-format on

}  // namespace

std::vector<std::string> known_section_keys(std::string_view section) {
  std::vector<std::string> keys;
  for (const Section& each : kSections) {
    if (each.name != section) continue;
    for (const auto& key : split(each.keys, ' ')) keys.push_back(str(each.prefix, key));
  }
  return keys;
}

std::string_view optional_section_prefix(std::string_view section) {
  const auto* found = std::ranges::find(kSections, section, &Section::name);
  return found != kSections.end() && found->optional_prefix ? found->prefix : "";
}

}  // namespace accelerate::detail::inline core
