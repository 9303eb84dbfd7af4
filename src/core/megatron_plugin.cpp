// Tensor, pipeline and sequence parallelism in Megatron-LM's words.
#include "accelerate/megatron_plugin.h"

#include "core/record.h"

namespace accelerate {
namespace detail {
namespace {

using Megatron = MegatronLMPlugin;

/// A field whose variable is MEGATRON_LM_ and its name.
template <class T>
auto megatron(std::string_view name, std::optional<T> Megatron::*member,
              std::optional<std::type_identity_t<T>> fallback = std::nullopt) {
  return field(name, member, "MEGATRON_LM_" + to_upper(name), std::move(fallback));
}

auto parallel_fields() {
  return std::tuple{
      megatron("tp_degree", &Megatron::tp_degree, 1),
      megatron("pp_degree", &Megatron::pp_degree, 1),
      megatron("use_custom_fsdp", &Megatron::use_custom_fsdp, false),
      megatron("overlap_cpu_optimizer_d2h_h2d", &Megatron::overlap_cpu_optimizer_d2h_h2d, false),
      megatron("no_load_optim", &Megatron::no_load_optim, false),
      megatron("eod_mask_loss", &Megatron::eod_mask_loss, false),
      megatron("no_save_optim", &Megatron::no_save_optim, false),
      megatron("optimizer_cpu_offload", &Megatron::optimizer_cpu_offload, false),
      megatron("use_precision_aware_optimizer", &Megatron::use_precision_aware_optimizer, false),
      megatron("decoder_last_pipeline_num_layers", &Megatron::decoder_last_pipeline_num_layers),
      megatron("recompute_granularity", &Megatron::recompute_granularity, "full"),
      megatron("recompute_method", &Megatron::recompute_method, "uniform"),
      megatron("recompute_num_layers", &Megatron::recompute_num_layers, 1),
      megatron("attention_backend", &Megatron::attention_backend, true),
      megatron("expert_model_parallel_size", &Megatron::expert_model_parallel_size, 1),
      megatron("context_parallel_size", &Megatron::context_parallel_size, 2),
      megatron("attention_dropout", &Megatron::attention_dropout, 0.0),
      megatron("hidden_dropout", &Megatron::hidden_dropout, 0.0),
      megatron("attention_softmax_in_fp32", &Megatron::attention_softmax_in_fp32, true),
      megatron("expert_tensor_parallel_size", &Megatron::expert_tensor_parallel_size, 1),
      megatron("calculate_per_token_loss", &Megatron::calculate_per_token_loss, true),
      megatron("use_rotary_position_embeddings", &Megatron::use_rotary_position_embeddings, true),
      megatron("num_micro_batches", &Megatron::num_micro_batches, 1),
      megatron("gradient_clipping", &Megatron::gradient_clipping, 1.0),
      megatron("sequence_parallelism", &Megatron::sequence_parallelism, false),
      megatron("recompute_activations", &Megatron::recompute_activations, false),
      megatron("use_distributed_optimizer", &Megatron::use_distributed_optimizer, false)};
}

auto training_fields() {
  return std::tuple{
      field("pipeline_model_parallel_split_rank", &Megatron::pipeline_model_parallel_split_rank),
      field("num_layers_per_virtual_pipeline_stage",
            &Megatron::num_layers_per_virtual_pipeline_stage),
      field("is_train_batch_min", &Megatron::is_train_batch_min),
      field("train_iters", &Megatron::train_iters),
      field("train_samples", &Megatron::train_samples),
      field("weight_decay_incr_style", &Megatron::weight_decay_incr_style),
      field("start_weight_decay", &Megatron::start_weight_decay),
      field("end_weight_decay", &Megatron::end_weight_decay),
      field("lr_decay_style", &Megatron::lr_decay_style),
      field("lr_decay_iters", &Megatron::lr_decay_iters),
      field("lr_decay_samples", &Megatron::lr_decay_samples),
      field("lr_warmup_iters", &Megatron::lr_warmup_iters),
      field("lr_warmup_samples", &Megatron::lr_warmup_samples),
      field("lr_warmup_fraction", &Megatron::lr_warmup_fraction),
      field("min_lr", &Megatron::min_lr),
      field("consumed_samples", &Megatron::consumed_samples),
      field("no_wd_decay_cond", &Megatron::no_wd_decay_cond),
      field("scale_lr_cond", &Megatron::scale_lr_cond),
      field("lr_mult", &Megatron::lr_mult),
      field("megatron_dataset_flag", &Megatron::megatron_dataset_flag),
      field("seq_length", &Megatron::seq_length),
      field("encoder_seq_length", &Megatron::encoder_seq_length),
      field("decoder_seq_length", &Megatron::decoder_seq_length),
      field("tensorboard_dir", &Megatron::tensorboard_dir),
      field("set_all_logging_options", &Megatron::set_all_logging_options),
      field("eval_iters", &Megatron::eval_iters),
      field("eval_interval", &Megatron::eval_interval),
      field("return_logits", &Megatron::return_logits)};
}

auto custom_fields() {
  return std::tuple{
      field("custom_train_step_class", &Megatron::custom_train_step_class),
      field("custom_train_step_kwargs", &Megatron::custom_train_step_kwargs),
      field("custom_model_provider_function", &Megatron::custom_model_provider_function),
      field("custom_prepare_model_function", &Megatron::custom_prepare_model_function),
      field("custom_megatron_datasets_provider_function",
            &Megatron::custom_megatron_datasets_provider_function),
      field("custom_get_batch_function", &Megatron::custom_get_batch_function),
      field("custom_loss_function", &Megatron::custom_loss_function),
      field("other_megatron_args", &Megatron::other_megatron_args)};
}

}  // namespace

template <>
struct RecordTraits<MegatronLMPlugin> {
  static auto fields() {
    return std::tuple_cat(parallel_fields(), training_fields(), custom_fields());
  }

  static void finish(Megatron& plugin, const Megatron& given, const Environment& environment,
                     Warnings& warnings) {
    require_at_least(1, "tp_degree", *plugin.tp_degree);
    require_at_least(1, "pp_degree", *plugin.pp_degree);
    require_at_least(1, "context_parallel_size", *plugin.context_parallel_size);
    require_at_least(1, "expert_model_parallel_size", *plugin.expert_model_parallel_size);
    require_at_least(1, "expert_tensor_parallel_size", *plugin.expert_tensor_parallel_size);
    require_at_least(1, "num_micro_batches", *plugin.num_micro_batches);
    require_at_least(1, "recompute_num_layers", *plugin.recompute_num_layers);
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
    if (!given.context_parallel_size &&
        !environment.contains("MEGATRON_LM_CONTEXT_PARALLEL_SIZE")) {
      warnings.emplace_back(
          "context_parallel_size of MegatronLMPlugin is 2, the default of Python Accelerate, "
          "though "
          "nothing asked for it. Set it, or MEGATRON_LM_CONTEXT_PARALLEL_SIZE, to 1 to turn "
          "context "
          "parallelism off.");
    }
  }
};

}  // namespace detail

ACCELERATE_RECORD(MegatronLMPlugin);

std::string MegatronLMPlugin::ddp_impl() const {
  return pp_degree.value_or(1) > 1 || use_distributed_optimizer.value_or(false) ? "local" : "torch";
}

Value::Dict MegatronLMPlugin::megatron_lm_default_args() const {
  // Megatron-LM's name for each argument, and ours where it differs.
  struct Argument {
    std::string_view name;
    std::string_view field;
  };
  static constexpr auto kArguments = std::to_array<Argument>({
      {"tensor_model_parallel_size", "tp_degree"},
      {"pipeline_model_parallel_size", "pp_degree"},
      {"pipeline_model_parallel_split_rank", ""},
      {"num_layers_per_virtual_pipeline_stage", ""},
      {"DDP_impl", ""},
      {"use_distributed_optimizer", ""},
      {"sequence_parallel", "sequence_parallelism"},
      {"clip_grad", "gradient_clipping"},
      {"num_micro_batches", ""},
      {"consumed_samples", ""},
      {"no_wd_decay_cond", ""},
      {"scale_lr_cond", ""},
      {"lr_mult", ""},
      {"megatron_dataset_flag", ""},
      {"eval_iters", ""},
      {"eval_interval", ""},
      {"use_custom_fsdp", ""},
      {"no_load_optim", ""},
      {"eod_mask_loss", ""},
      {"no_save_optim", ""},
      {"optimizer_cpu_offload", ""},
      {"overlap_cpu_optimizer_d2h_h2d", ""},
      {"use_precision_aware_optimizer", ""},
      {"decoder_last_pipeline_num_layers", ""},
      {"recompute_granularity", ""},
      {"recompute_method", ""},
      {"recompute_num_layers", ""},
      {"attention_backend", ""},
      {"expert_model_parallel_size", ""},
      {"context_parallel_size", ""},
      {"attention_dropout", ""},
      {"hidden_dropout", ""},
      {"attention_softmax_in_fp32", ""},
      {"expert_tensor_parallel_size", ""},
      {"calculate_per_token_loss", ""},
      {"use_rotary_position_embeddings", ""},
  });
  const Value::Dict fields = detail::dict_of(*this);
  Value::Dict arguments;
  for (const auto& [name, field] : kArguments) {
    if (name == "DDP_impl") {
      arguments.set(name, ddp_impl());
    } else {
      arguments.set(name, fields.at(field.empty() ? name : field));
    }
  }
  if (tensorboard_dir) arguments.set("tensorboard_dir", *tensorboard_dir);
  if (other_megatron_args) {
    for (const auto& [key, value] : *other_megatron_args) arguments.set(key, value);
  }
  return arguments;
}

}  // namespace accelerate
