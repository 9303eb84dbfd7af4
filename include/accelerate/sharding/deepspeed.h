// accelerate/sharding/deepspeed.h - for programs whose DeepSpeed configuration has the optimizer
// and the scheduler.
//
//     DummyOptim optimizer(net->parameters(), {.lr = 2e-5});
//     DummyScheduler scheduler(optimizer, {.total_num_steps = 1000, .warmup_num_steps = 100});
//     auto [model, optim, loader, schedule] =
//         accelerator.prepare(net, std::move(optimizer), data, std::move(scheduler));
//
// Part of accelerate/sharding.h.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/big_modeling/empty_weights.h"
#include "accelerate/kwargs/deepspeed_plugin.h"
#include "accelerate/scheduler/lr_scheduler.h"
#include "accelerate/state/accelerator_state.h"

namespace accelerate {

struct DummyOptimOptions {
  double lr = 0.001;
  double weight_decay = 0;
};

/// Holds the parameters until `prepare` makes the optimizer of the configuration for them. Its lr
/// and weight_decay are what "auto" stands for there.
class ACCELERATE_API DummyOptim : public torch::optim::Optimizer {
 public:
  explicit DummyOptim(std::vector<at::Tensor> params, DummyOptimOptions options = {});
  /// Groups with options of their own; those of the first are what "auto" stands for.
  explicit DummyOptim(std::vector<std::pair<std::vector<at::Tensor>, DummyOptimOptions>> groups);

  [[nodiscard]] const DummyOptimOptions& options() const noexcept { return options_; }
  /// Throws `StateError`: it must be prepared first.
  at::Tensor step(LossClosure closure = nullptr) override;

 private:
  DummyOptimOptions options_;
};

struct DummySchedulerOptions {
  /// As one process would count them.
  std::optional<std::int64_t> total_num_steps = std::nullopt;
  std::int64_t warmup_num_steps = 0;
  /// Makes the scheduler, instead of the configuration.
  std::function<std::shared_ptr<LRScheduler>(torch::optim::Optimizer&)> lr_scheduler_callable = {};
};

/// Holds the number of steps until `prepare` makes the scheduler of the configuration. `step`
/// changes no learning rate.
class ACCELERATE_API DummyScheduler : public LRScheduler {
 public:
  explicit DummyScheduler(torch::optim::Optimizer& optimizer, DummySchedulerOptions options = {});

  [[nodiscard]] const DummySchedulerOptions& options() const noexcept { return options_; }

 protected:
  [[nodiscard]] std::vector<double> get_lr() override { return group_lrs(); }

 private:
  DummySchedulerOptions options_;
};

/// A model that knows the widths of its layers derives from this beside `torch::nn::Module`:
/// bucket sizes that are "auto" in a DeepSpeed configuration follow from the largest one.
class ACCELERATE_API HiddenSizes {
 public:
  virtual ~HiddenSizes();
  [[nodiscard]] virtual std::vector<std::int64_t> hidden_sizes() const = 0;
};

/// The active plugin of a run. Throws `StateError` if it does not use DeepSpeed.
[[nodiscard]] ACCELERATE_API std::shared_ptr<DeepSpeedPlugin> get_active_deepspeed_plugin(
    const AcceleratorState& state);

/// The modules of the classes in `transformer_moe_cls_names` of the plugin, by name: each is
/// gathered as a whole, whichever experts it uses. Throws `ConfigError` for a class that the model
/// does not have.
[[nodiscard]] ACCELERATE_API std::vector<std::string> set_moe_leaf_modules(
    const DeepSpeedPlugin& plugin, const torch::nn::Module& model);

/// Models that are built while the guard lives have no memory for their weights, of which each
/// process will get a part in `prepare`, from the first process: it needs the values, in the host's
/// memory, and gets null. Null, and without effect, unless `enable` is true and the stage is 3.
///
///     auto building = zero3_init_context_manager(plugin, *plugin.zero3_init_flag);
[[nodiscard]] ACCELERATE_API std::unique_ptr<InitOnDeviceScope> zero3_init_context_manager(
    const DeepSpeedPlugin& plugin, bool enable = false);

}  // namespace accelerate
