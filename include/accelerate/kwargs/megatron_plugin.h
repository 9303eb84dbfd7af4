// accelerate/kwargs/megatron_plugin.h - tensor, pipeline and sequence parallelism in Megatron-LM's
// words.
//
// Part of accelerate/kwargs.h. Fields up to `use_distributed_optimizer` have a variable
// MEGATRON_LM_<FIELD>; the comment behind a field is its default.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/fwd.h"
#include "accelerate/kwargs/options.h"
#include "accelerate/value.h"

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace accelerate {

class AbstractTrainStep;
class MegatronLMDummyScheduler;

struct ACCELERATE_API MegatronLMPlugin {
  static constexpr std::string_view kOptionsName = "MegatronLMPlugin";

  std::optional<std::int64_t> tp_degree = std::nullopt;  // 1
  std::optional<std::int64_t> pp_degree = std::nullopt;  // 1
  std::optional<bool> use_custom_fsdp = std::nullopt;    // false, as the next six
  std::optional<bool> overlap_cpu_optimizer_d2h_h2d = std::nullopt;
  std::optional<bool> no_load_optim = std::nullopt;
  std::optional<bool> eod_mask_loss = std::nullopt;
  std::optional<bool> no_save_optim = std::nullopt;
  std::optional<bool> optimizer_cpu_offload = std::nullopt;
  std::optional<bool> use_precision_aware_optimizer = std::nullopt;
  /// Unset: layers are split evenly over the stages.
  std::optional<std::int64_t> decoder_last_pipeline_num_layers = std::nullopt;
  /// full or selective.
  std::optional<std::string> recompute_granularity = std::nullopt;  // full
  /// uniform or block.
  std::optional<std::string> recompute_method = std::nullopt;             // uniform
  std::optional<std::int64_t> recompute_num_layers = std::nullopt;        // 1
  std::optional<bool> attention_backend = std::nullopt;                   // true
  std::optional<std::int64_t> expert_model_parallel_size = std::nullopt;  // 1
  /// Python's default is 2, kept for its files; `resolved` warns when it was not set.
  std::optional<std::int64_t> context_parallel_size = std::nullopt;        // 2
  std::optional<double> attention_dropout = std::nullopt;                  // 0
  std::optional<double> hidden_dropout = std::nullopt;                     // 0
  std::optional<bool> attention_softmax_in_fp32 = std::nullopt;            // true
  std::optional<std::int64_t> expert_tensor_parallel_size = std::nullopt;  // 1
  std::optional<bool> calculate_per_token_loss = std::nullopt;             // true
  std::optional<bool> use_rotary_position_embeddings = std::nullopt;       // true
  std::optional<std::int64_t> num_micro_batches = std::nullopt;            // 1
  /// By the global norm; 0 is off.
  std::optional<double> gradient_clipping = std::nullopt;        // 1
  std::optional<bool> sequence_parallelism = std::nullopt;       // false
  std::optional<bool> recompute_activations = std::nullopt;      // false
  std::optional<bool> use_distributed_optimizer = std::nullopt;  // false

  std::optional<std::int64_t> pipeline_model_parallel_split_rank = std::nullopt;
  std::optional<std::int64_t> num_layers_per_virtual_pipeline_stage = std::nullopt;
  bool is_train_batch_min = true;
  std::optional<std::int64_t> train_iters = std::nullopt;
  std::optional<std::int64_t> train_samples = std::nullopt;
  /// constant, linear or cosine, as `lr_decay_style`.
  std::string weight_decay_incr_style = "constant";
  std::optional<double> start_weight_decay = std::nullopt;
  std::optional<double> end_weight_decay = std::nullopt;
  std::string lr_decay_style = "linear";
  std::optional<std::int64_t> lr_decay_iters = std::nullopt;
  std::optional<std::int64_t> lr_decay_samples = std::nullopt;
  std::optional<std::int64_t> lr_warmup_iters = std::nullopt;
  std::optional<std::int64_t> lr_warmup_samples = std::nullopt;
  std::optional<double> lr_warmup_fraction = std::nullopt;
  double min_lr = 0.0;
  /// Per data loader in the order of `prepare`; `resolved` fills up to three with 0.
  std::optional<std::vector<std::int64_t>> consumed_samples = std::nullopt;
  Callback<bool(const std::string& name, const at::Tensor& parameter)> no_wd_decay_cond = {};
  Callback<bool(const std::string& name, const at::Tensor& parameter)> scale_lr_cond = {};
  double lr_mult = 1.0;
  bool megatron_dataset_flag = false;
  std::optional<std::int64_t> seq_length = std::nullopt;
  std::optional<std::int64_t> encoder_seq_length = std::nullopt;
  std::optional<std::int64_t> decoder_seq_length = std::nullopt;
  std::optional<std::string> tensorboard_dir = std::nullopt;
  bool set_all_logging_options = false;
  std::int64_t eval_iters = 100;
  std::int64_t eval_interval = 1000;
  bool return_logits = false;

  std::shared_ptr<AbstractTrainStep> custom_train_step_class = nullptr;
  std::optional<Value::Dict> custom_train_step_kwargs = std::nullopt;
  Callback<std::shared_ptr<torch::nn::Module>(bool pre_process, bool post_process)>
      custom_model_provider_function = {};
  /// Needs `custom_model_provider_function` too.
  Callback<std::shared_ptr<torch::nn::Module>(std::shared_ptr<torch::nn::Module>)>
      custom_prepare_model_function = {};
  Callback<Value(const std::vector<std::int64_t>& train_valid_test_num_samples)>
      custom_megatron_datasets_provider_function = {};
  Callback<Value(const Value& batch)> custom_get_batch_function = {};
  /// Takes the place of the loss of a `Pipeline`. `batch` is the list of the targets of a
  /// micro-batch.
  Callback<at::Tensor(const Value& batch, const at::Tensor& output)> custom_loss_function = {};
  std::optional<Value::Dict> other_megatron_args = std::nullopt;
  /// Arguments of a run, as `set_training_args` and the functions beside it have collected them.
  Value::Dict collected_args = {};

  /// "local" or "torch": who reduces gradients.
  [[nodiscard]] std::string ddp_impl() const;
  /// The arguments that Megatron-LM would get from this resolved plugin.
  [[nodiscard]] Value::Dict megatron_lm_default_args() const;

  // What `Accelerator::prepare` calls in Python: arguments of the run, which
  // `megatron_lm_default_args` gives from then on. `MegatronLMArguments` has their contracts.
  [[noreturn]] void set_network_size_args(const torch::nn::Module& model);
  void set_mixed_precision(std::string_view mixed_precision);
  void set_training_args(std::int64_t micro_batch_size, std::int64_t dp_degree);
  void set_optimizer_type(const torch::optim::Optimizer& optimizer);
  void set_scheduler_args(const MegatronLMDummyScheduler& scheduler);
  [[noreturn]] void set_tensorboard_logging_options();

  bool operator==(const MegatronLMPlugin&) const = default;
};

}  // namespace accelerate
