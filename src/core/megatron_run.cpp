#include "core/megatron_run.h"

#include <string_view>

#include "accelerate/errors.h"
#include "core/log.h"
#include "core/supported.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

/// A field that this library cannot follow.
struct Refusal {
  std::string_view field;
  bool applies = false;
  std::string_view instead;
};

constexpr std::string_view kOwnModel =
    "The model is the program's: build it with what this field would have set.";

std::vector<Refusal> refusals_of(const MegatronLMPlugin& plugin) {
  const auto more = [](const auto& size) { return size.value_or(1) > 1; };
  const auto on = [](const auto& flag) { return flag.value_or(false); };
  const auto off = [](const auto& flag) { return !flag.value_or(true); };
  const bool consumed =
      plugin.consumed_samples && *plugin.consumed_samples != std::vector<std::int64_t>(3, 0);
  return {
      {"context_parallel_size", more(plugin.context_parallel_size),
       "Use cp_size of ParallelismConfig."},
      {"use_custom_fsdp", on(plugin.use_custom_fsdp),
       "Use FullyShardedDataParallelPlugin, or dp_shard_size of ParallelismConfig."},
      {"optimizer_cpu_offload", on(plugin.optimizer_cpu_offload),
       "Use use_distributed_optimizer, which divides the optimizer's state."},
      {"overlap_cpu_optimizer_d2h_h2d", on(plugin.overlap_cpu_optimizer_d2h_h2d),
       "It belongs to optimizer_cpu_offload. Leave it out."},
      {"no_load_optim", on(plugin.no_load_optim),
       "Load the weights alone with load_checkpoint_in_model before prepare."},
      {"no_save_optim", on(plugin.no_save_optim), "Save the weights alone with save_model."},
      {"eod_mask_loss", on(plugin.eod_mask_loss), "Mask these tokens in the loss of the Pipeline."},
      {"attention_dropout", plugin.attention_dropout.value_or(0) != 0, kOwnModel},
      {"hidden_dropout", plugin.hidden_dropout.value_or(0) != 0, kOwnModel},
      {"attention_softmax_in_fp32", off(plugin.attention_softmax_in_fp32), kOwnModel},
      {"attention_backend", off(plugin.attention_backend), kOwnModel},
      {"use_rotary_position_embeddings", off(plugin.use_rotary_position_embeddings), kOwnModel},
      {"calculate_per_token_loss", off(plugin.calculate_per_token_loss),
       "The loss of the Pipeline decides what a mean is over; micro-batches count by their rows."},
      {"is_train_batch_min", !plugin.is_train_batch_min,
       "Each data loader has its own batch size; a batch is cut into num_micro_batches."},
      {"consumed_samples", consumed, "load_state restores the place in the data."},
      {"no_wd_decay_cond", static_cast<bool>(plugin.no_wd_decay_cond),
       "Give the optimizer parameter groups with their own weight decay."},
      {"scale_lr_cond", static_cast<bool>(plugin.scale_lr_cond),
       "Give the optimizer parameter groups with their own learning rates."},
      {"lr_mult", plugin.lr_mult != 1, "It belongs to scale_lr_cond. Leave it out."},
      {"train_samples", plugin.train_samples && plugin.train_iters,
       "A run counts steps or samples: use train_iters alone."},
      {"lr_decay_samples", plugin.lr_decay_samples.has_value(),
       "Steps are counted, as in Megatron-LM with a scheduler: use lr_decay_iters."},
      {"lr_warmup_samples", plugin.lr_warmup_samples.value_or(0) != 0 && plugin.lr_warmup_iters,
       "A run counts steps or samples: use lr_warmup_iters alone."},
      {"seq_length", plugin.seq_length.has_value(), "Lengths are those of the batches."},
      {"encoder_seq_length", plugin.encoder_seq_length.has_value(),
       "Lengths are those of the batches."},
      {"decoder_seq_length", plugin.decoder_seq_length.has_value(),
       "Lengths are those of the batches."},
      {"tensorboard_dir", plugin.tensorboard_dir.has_value(),
       "Use log_with and project_dir of AcceleratorOptions."},
      {"set_all_logging_options", plugin.set_all_logging_options,
       "Use log_with and Accelerator::log."},
      {"eval_iters", plugin.eval_iters != 100, "The program's loop decides when it evaluates."},
      {"eval_interval", plugin.eval_interval != 1000,
       "The program's loop decides when it evaluates."},
      {"return_logits", plugin.return_logits, "model(x) of a Pipeline gives the outputs."},
      {"custom_train_step_class", plugin.custom_train_step_class != nullptr,
       "Give a Pipeline its layers and its loss."},
      {"custom_train_step_kwargs", plugin.custom_train_step_kwargs.has_value(),
       "Give a Pipeline its layers and its loss."},
      {"custom_model_provider_function", static_cast<bool>(plugin.custom_model_provider_function),
       "Give prepare a Pipeline of the model."},
      {"custom_prepare_model_function", static_cast<bool>(plugin.custom_prepare_model_function),
       "Change the model before the Pipeline is made."},
      {"custom_get_batch_function", static_cast<bool>(plugin.custom_get_batch_function),
       "Change batches in the collate function of the data loader."}};
}

}  // namespace

MegatronLMPlugin megatron_for_run(const MegatronLMPlugin& given, const Environment& environment) {
  auto wanted = given;
  if (!environment.contains("MEGATRON_LM_CONTEXT_PARALLEL_SIZE") && !given.context_parallel_size) {
    wanted.context_parallel_size = 1;
  }
  const bool recomputes = given.recompute_granularity.has_value() ||
                          environment.contains("MEGATRON_LM_RECOMPUTE_GRANULARITY");
  auto plugin = resolved(wanted, environment);
  if (!recomputes) plugin.recompute_granularity = std::nullopt;
  // The Pipeline has these two, also.
  if (!given.num_micro_batches && !environment.contains("MEGATRON_LM_NUM_MICRO_BATCHES")) {
    plugin.num_micro_batches = std::nullopt;
  }
  // The launcher passes its default on.
  if (!given.gradient_clipping && plugin.gradient_clipping == 1.0) {
    plugin.gradient_clipping = std::nullopt;
  }
  require_supported(plugin);
  const auto values = to_dict(plugin, environment);
  for (const auto& [field, applies, instead] : refusals_of(plugin)) {
    if (!applies) continue;
    throw UnsupportedError(str(field, " of MegatronLMPlugin is ", values.at(field).repr(),
                               ", which has no equivalent here. ", instead));
  }
  if (plugin.sequence_parallelism.value_or(false)) {
    warn_once(str("sequence_parallelism of MegatronLMPlugin has no effect: ",
                  plugin.tp_degree.value_or(1) > 1
                      ? "the layers decide. Set sequence_parallel of TpPlanOptions, or of the "
                        "parallel layers."
                      : "it belongs to tensor parallelism, and tp_degree is 1."));
  }
  if (plugin.use_precision_aware_optimizer.value_or(false)) {
    warn_once(
        "use_precision_aware_optimizer of MegatronLMPlugin has no effect: the states of optimizers "
        "are float32. Use use_distributed_optimizer, which divides them.");
  }
  if (plugin.recompute_activations.value_or(false) || plugin.recompute_granularity == "selective") {
    warn_once(
        "recompute_activations of MegatronLMPlugin, and recompute_granularity = selective, have no "
        "effect: C++ cannot find the attention inside of a layer, so that its activations are "
        "kept. Use recompute_granularity = full, or call activation_checkpoint in your layer.");
  }
  return plugin;
}

ParallelismConfig megatron_parallelism(const MegatronLMPlugin& plugin, std::int64_t num_processes) {
  const auto stages = plugin.pp_degree.value_or(1);
  const auto parts = plugin.tp_degree.value_or(1);
  if (num_processes % (stages * parts) != 0) {
    throw ConfigError(str("pp_degree of MegatronLMPlugin is ", stages, " and tp_degree ", parts,
                          ", but the run has ", num_processes, " processes, which is no multiple ",
                          "of ", stages * parts, "."));
  }
  auto config = resolved(ParallelismConfig{.dp_replicate_size = 1,
                                           .dp_shard_size = 1,
                                           .tp_size = parts,
                                           .cp_size = 1,
                                           .sp_size = 1,
                                           .pp_size = stages});
  // A pipeline, also of one stage, has copies that are cut.
  config.dp_replicate_size = num_processes / (stages * parts);
  return config;
}

}  // namespace accelerate::detail::inline core
