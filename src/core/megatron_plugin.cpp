// Tensor, pipeline and sequence parallelism in Megatron-LM's words.
#include "accelerate/kwargs/megatron_plugin.h"

#include "core/options.h"

namespace accelerate {

using namespace detail;

namespace {

using Megatron = MegatronLMPlugin;

/// The fields that have a variable.
auto parallel_fields() {
  return with_variables(
      "MEGATRON_LM_",
      ACCELERATE_FIELDS(
          Megatron, tp_degree, pp_degree, use_custom_fsdp, overlap_cpu_optimizer_d2h_h2d,
          no_load_optim, eod_mask_loss, no_save_optim, optimizer_cpu_offload,
          use_precision_aware_optimizer, decoder_last_pipeline_num_layers, recompute_granularity,
          recompute_method, recompute_num_layers, attention_backend, expert_model_parallel_size,
          context_parallel_size, attention_dropout, hidden_dropout, attention_softmax_in_fp32,
          expert_tensor_parallel_size, calculate_per_token_loss, use_rotary_position_embeddings,
          num_micro_batches, gradient_clipping, sequence_parallelism, recompute_activations,
          use_distributed_optimizer));
}

}  // namespace

static auto value_fields(std::type_identity<Megatron>) {
  return std::tuple_cat(
      parallel_fields(),
      ACCELERATE_FIELDS(
          Megatron, pipeline_model_parallel_split_rank, num_layers_per_virtual_pipeline_stage,
          is_train_batch_min, train_iters, train_samples, weight_decay_incr_style,
          start_weight_decay, end_weight_decay, lr_decay_style, lr_decay_iters, lr_decay_samples,
          lr_warmup_iters, lr_warmup_samples, lr_warmup_fraction, min_lr, consumed_samples,
          no_wd_decay_cond, scale_lr_cond, lr_mult, megatron_dataset_flag, seq_length,
          encoder_seq_length, decoder_seq_length, tensorboard_dir, set_all_logging_options,
          eval_iters, eval_interval, return_logits, custom_train_step_class,
          custom_train_step_kwargs, custom_model_provider_function, custom_prepare_model_function,
          custom_megatron_datasets_provider_function, custom_get_batch_function,
          custom_loss_function, other_megatron_args));
}

static Megatron option_defaults(std::type_identity<Megatron>) {
  return {.tp_degree = 1,
          .pp_degree = 1,
          .use_custom_fsdp = false,
          .overlap_cpu_optimizer_d2h_h2d = false,
          .no_load_optim = false,
          .eod_mask_loss = false,
          .no_save_optim = false,
          .optimizer_cpu_offload = false,
          .use_precision_aware_optimizer = false,
          .recompute_granularity = "full",
          .recompute_method = "uniform",
          .recompute_num_layers = 1,
          .attention_backend = true,
          .expert_model_parallel_size = 1,
          .context_parallel_size = 2,
          .attention_dropout = 0.0,
          .hidden_dropout = 0.0,
          .attention_softmax_in_fp32 = true,
          .expert_tensor_parallel_size = 1,
          .calculate_per_token_loss = true,
          .use_rotary_position_embeddings = true,
          .num_micro_batches = 1,
          .gradient_clipping = 1.0,
          .sequence_parallelism = false,
          .recompute_activations = false,
          .use_distributed_optimizer = false};
}

static void finish(Megatron& plugin, const Megatron& given, const Environment& environment,
                   Warnings& warnings) {
  for (const auto& [name, value] :
       {std::pair("tp_degree", plugin.tp_degree), std::pair("pp_degree", plugin.pp_degree),
        std::pair("context_parallel_size", plugin.context_parallel_size),
        std::pair("expert_model_parallel_size", plugin.expert_model_parallel_size),
        std::pair("expert_tensor_parallel_size", plugin.expert_tensor_parallel_size),
        std::pair("num_micro_batches", plugin.num_micro_batches),
        std::pair("recompute_num_layers", plugin.recompute_num_layers)}) {
    require_at_least(1, name, *value);
  }
  require_one_of({"full", "selective"}, "recompute_granularity", *plugin.recompute_granularity);
  require_one_of({"uniform", "block"}, "recompute_method", *plugin.recompute_method);
  const std::vector<std::string> styles{"constant", "linear", "cosine"};
  require_one_of(styles, "weight_decay_incr_style", plugin.weight_decay_incr_style);
  require_one_of(styles, "lr_decay_style", plugin.lr_decay_style);
  if (plugin.custom_prepare_model_function && !plugin.custom_model_provider_function) {
    throw ConfigError(
        "custom_prepare_model_function needs custom_model_provider_function beside it.");
  }
  if (plugin.consumed_samples && plugin.consumed_samples->size() < 3 &&
      !plugin.consumed_samples->empty()) {
    plugin.consumed_samples->resize(3, 0);
  }
  if (!given.context_parallel_size && !environment.contains("MEGATRON_LM_CONTEXT_PARALLEL_SIZE")) {
    warnings.emplace_back(
        "context_parallel_size of MegatronLMPlugin is 2, the default of Python Accelerate, though "
        "nothing asked for it. Set it, or MEGATRON_LM_CONTEXT_PARALLEL_SIZE, to 1 to turn context "
        "parallelism off.");
  }
}

ACCELERATE_OPTIONS(MegatronLMPlugin);

std::string MegatronLMPlugin::ddp_impl() const {
  return pp_degree.value_or(1) > 1 || use_distributed_optimizer.value_or(false) ? "local" : "torch";
}

Value::Dict MegatronLMPlugin::megatron_lm_default_args() const {
  // The arguments in Megatron-LM's order; `renamed` are those that have another name here.
  static constexpr std::string_view kArguments =
      "tensor_model_parallel_size pipeline_model_parallel_size pipeline_model_parallel_split_rank "
      "num_layers_per_virtual_pipeline_stage DDP_impl use_distributed_optimizer sequence_parallel "
      "clip_grad num_micro_batches consumed_samples no_wd_decay_cond scale_lr_cond lr_mult "
      "megatron_dataset_flag eval_iters eval_interval use_custom_fsdp no_load_optim eod_mask_loss "
      "no_save_optim optimizer_cpu_offload overlap_cpu_optimizer_d2h_h2d "
      "use_precision_aware_optimizer decoder_last_pipeline_num_layers recompute_granularity "
      "recompute_method recompute_num_layers attention_backend expert_model_parallel_size "
      "context_parallel_size attention_dropout hidden_dropout attention_softmax_in_fp32 "
      "expert_tensor_parallel_size calculate_per_token_loss use_rotary_position_embeddings";
  if (!collected_args.empty()) return collected_args;
  const Value::Dict fields = dict_of(*this);
  const Value::Dict renamed{{"tensor_model_parallel_size", fields.at("tp_degree")},
                            {"pipeline_model_parallel_size", fields.at("pp_degree")},
                            {"DDP_impl", ddp_impl()},
                            {"sequence_parallel", fields.at("sequence_parallelism")},
                            {"clip_grad", fields.at("gradient_clipping")}};
  Value::Dict arguments;
  for (const auto& name : split(kArguments, ' ')) {
    arguments.set(name, renamed.contains(name) ? renamed.at(name) : fields.at(name));
  }
  if (tensorboard_dir) arguments.set("tensorboard_dir", *tensorboard_dir);
  if (other_megatron_args) {
    for (const auto& [key, value] : *other_megatron_args) arguments.set(key, value);
  }
  return arguments;
}

}  // namespace accelerate
