// accelerate/parallel/megatron.h - training loops written for Megatron-LM.
//
//     MegatronLMPlugin plugin{.pp_degree = 2, .num_micro_batches = 4};
//     Accelerator accelerator({.megatron_lm_plugin = plugin});
//     MegatronLMDummyScheduler schedule(adamw, {.total_num_steps = 1000, .warmup_num_steps = 100});
//     auto [model, optimizer, loader, scheduler] = accelerator.prepare(
//         Pipeline(net, cross_entropy), std::move(adamw), data, std::move(schedule));
//     for (auto& [x, y] : loader) {
//       auto loss = model(x, y);      // forwards, backwards, averages, clipping, step, schedule
//       accelerator.backward(loss);   // does nothing, as the next two
//       optimizer.step();
//       scheduler.step();
//     }
//
// Megatron-LM itself is not used: the plugin is a front end of `Pipeline`. docs/parallelism.md says
// what becomes of each field. Part of accelerate/parallel.h.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/kwargs/megatron_plugin.h"
#include "accelerate/scheduler/lr_scheduler.h"
#include "accelerate/value.h"

namespace accelerate {

/// The arguments of a run, as Python's methods of the plugin collect them.
class ACCELERATE_API MegatronLMArguments {
 public:
  /// Of a resolved plugin.
  explicit MegatronLMArguments(MegatronLMPlugin plugin);

  [[nodiscard]] const Value::Dict& megatron_lm_default_args() const { return arguments_; }

  /// Throws `UnsupportedError`: Python reads the sizes of a Transformers configuration, to build a
  /// model of Megatron-LM's layers. Here the model is the program's.
  [[noreturn]] static void set_network_size_args(const torch::nn::Module& model);
  void set_mixed_precision(std::string_view mixed_precision);
  void set_training_args(std::int64_t micro_batch_size, std::int64_t dp_degree);
  /// Throws `ArgumentError` for an optimizer that is neither Adam, AdamW nor SGD.
  void set_optimizer_type(const torch::optim::Optimizer& optimizer);
  /// Of the whole run, as one process counts. `set_training_args` comes first.
  void set_scheduler_args(std::optional<std::int64_t> total_num_steps,
                          std::int64_t warmup_num_steps);
  /// Throws `UnsupportedError`: those are options of Megatron-LM's own writer.
  [[noreturn]] static void set_tensorboard_logging_options();

 private:
  MegatronLMPlugin plugin_;
  Value::Dict arguments_;
};

/// Megatron-LM's schedule of the learning rate and of the weight decay, in steps of training.
struct MegatronLMSchedule {
  /// constant, linear or cosine.
  std::string lr_decay_style = "linear";
  std::int64_t warmup_steps = 0;
  /// When the decay ends.
  std::int64_t decay_steps = 1;
  double min_lr = 0;
  std::string weight_decay_incr_style = "constant";
  std::optional<double> start_weight_decay = std::nullopt;
  std::optional<double> end_weight_decay = std::nullopt;
  std::int64_t train_steps = 1;

  /// After `step` steps: up to `max_lr` in a straight line, then down to `min_lr`.
  [[nodiscard]] ACCELERATE_API double lr(double max_lr, std::int64_t step) const;
  /// nullopt leaves the weight decay of the optimizer as it is.
  [[nodiscard]] ACCELERATE_API std::optional<double> weight_decay(std::int64_t step) const;

  /// Of collected arguments; see `MegatronLMArguments`. Throws `ConfigError` if they leave the
  /// number of steps open.
  [[nodiscard]] static ACCELERATE_API MegatronLMSchedule from(const Value::Dict& arguments);
};

struct MegatronLMDummySchedulerOptions {
  /// As one process would count them.
  std::optional<std::int64_t> total_num_steps = std::nullopt;
  std::int64_t warmup_num_steps = 0;
};

/// The only scheduler of a run with `MegatronLMPlugin`: `prepare` gives it the schedule of the
/// plugin. Elsewhere `step` changes no learning rate.
class ACCELERATE_API MegatronLMDummyScheduler : public LRScheduler {
 public:
  explicit MegatronLMDummyScheduler(torch::optim::Optimizer& optimizer,
                                    MegatronLMDummySchedulerOptions options = {});

  [[nodiscard]] const MegatronLMDummySchedulerOptions& options() const noexcept { return options_; }
  void step() override;

  /// For this library.
  void _follow(const MegatronLMSchedule& schedule);

 protected:
  [[nodiscard]] std::vector<double> get_lr() override;

 private:
  void set_weight_decay();

  MegatronLMDummySchedulerOptions options_;
  std::optional<MegatronLMSchedule> schedule_;
};

/// Python's loader of Megatron-LM's indexed datasets. Its constructor throws `UnsupportedError`.
class ACCELERATE_API MegatronLMDummyDataLoader {
 public:
  explicit MegatronLMDummyDataLoader(const Value::Dict& dataset_kwargs = {});
};

}  // namespace accelerate
