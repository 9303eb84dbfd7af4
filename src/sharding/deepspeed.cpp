#include "accelerate/sharding/deepspeed.h"

#include <utility>

#include "accelerate/errors.h"
#include "accelerate/optim.h"
#include "accelerate/state/partial_state.h"
#include "core/text.h"
#include "sharding/unit_policy.h"

namespace accelerate {
namespace {

using Groups = std::vector<std::pair<std::vector<at::Tensor>, DummyOptimOptions>>;

/// The smallest options of ours with a learning rate and a weight decay.
SGDOptions group_options(const DummyOptimOptions& options) {
  return {.lr = options.lr, .weight_decay = options.weight_decay};
}

DummyOptimOptions first_options(const Groups& groups) {
  if (groups.empty()) throw ArgumentError("DummyOptim: there is no group of parameters.");
  return groups.front().second;
}

}  // namespace

DummyOptim::DummyOptim(std::vector<at::Tensor> params, DummyOptimOptions options)
    : DummyOptim(Groups{{std::move(params), options}}) {}

DummyOptim::DummyOptim(Groups groups)
    : Optimizer(std::vector<torch::optim::OptimizerParamGroup>(),
                std::make_unique<GroupOptions<SGDOptions>>(group_options(first_options(groups)))),
      options_(first_options(groups)) {
  for (auto& [params, options] : groups) {
    add_param_group(param_group(std::move(params), group_options(options)));
  }
}

at::Tensor DummyOptim::step(LossClosure /*closure*/) {
  throw StateError(
      "step: a DummyOptim has no rule of its own. Give it to prepare, with a DeepSpeed "
      "configuration that has an 'optimizer', and step what comes back.");
}

DummyScheduler::DummyScheduler(torch::optim::Optimizer& optimizer, DummySchedulerOptions options)
    : LRScheduler(optimizer), options_(std::move(options)) {
  initialize();
}

HiddenSizes::~HiddenSizes() = default;

std::shared_ptr<DeepSpeedPlugin> get_active_deepspeed_plugin(const AcceleratorState& state) {
  if (auto plugin = state.deepspeed_plugin()) return plugin;
  throw StateError(
      "Couldn't retrieve the active `DeepSpeedPlugin` as none were enabled. Give the first "
      "`Accelerator` a deepspeed_plugin, or start the program with `accelerate launch "
      "--use_deepspeed`.");
}

std::vector<std::string> set_moe_leaf_modules(const DeepSpeedPlugin& plugin,
                                              const torch::nn::Module& model) {
  if (!plugin.transformer_moe_cls_names) return {};
  return detail::sharding::units_by_class(model,
                                          detail::split(*plugin.transformer_moe_cls_names, ','));
}

std::unique_ptr<InitOnDeviceScope> zero3_init_context_manager(const DeepSpeedPlugin& plugin,
                                                              bool enable) {
  if (!enable || plugin.zero_stage != 3 || PartialState().is_main_process()) return nullptr;
  return std::make_unique<InitOnDeviceScope>(c10::kMeta);
}

}  // namespace accelerate
