// From the options of an accelerator, and the environment, to what it will do.
#include <algorithm>

#include "accelerate/checks.h"
#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "accelerator/accelerator_core.h"
#include "core/log.h"
#include "core/supported.h"
#include "core/text.h"

namespace accelerate::detail {
namespace {

constexpr const char* kStepsVariable = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS";

/// Where two fields mean the same, one of them is given at most.
void check_given_once(const AcceleratorOptions& options) {
  if (options.dynamo_backend && options.dynamo_plugin) {
    throw ConfigError("dynamo_backend and dynamo_plugin are both given. Give one of them.");
  }
  if (options.deepspeed_plugin && !options.deepspeed_plugins.empty()) {
    throw ConfigError("deepspeed_plugin and deepspeed_plugins are both given. Give one of them.");
  }
  if (options.gradient_accumulation_plugin && options.gradient_accumulation_steps != 1) {
    throw ConfigError(str("gradient_accumulation_steps is ", options.gradient_accumulation_steps,
                          " and gradient_accumulation_plugin is given too. Give one of them."));
  }
  if (options.gradient_accumulation_steps < 1) {
    throw ConfigError(str("gradient_accumulation_steps is ", options.gradient_accumulation_steps,
                          ", but a step takes one batch at least."));
  }
  if (options.split_batches && !*options.split_batches && options.dataloader_config.split_batches) {
    throw ConfigError(
        "split_batches is false, but split_batches of dataloader_config is true. Set one of them.");
  }
}

void check_supported(const AcceleratorOptions& options, const Environment& environment) {
  validate(options.kwargs_handlers, environment);
  for (const auto& handler : options.kwargs_handlers) require_supported(handler);
  if (!options.log_with.empty()) {
    throw UnsupportedError(str("log_with asks for ", to_string(options.log_with.front()),
                               ", but this version has no trackers yet. Leave it out."));
  }
}

TorchDynamoPlugin dynamo_plugin(const AcceleratorOptions& options, const Environment& environment) {
  TorchDynamoPlugin plugin = options.dynamo_plugin.value_or(TorchDynamoPlugin{});
  if (options.dynamo_backend) plugin.backend = options.dynamo_backend;
  plugin = resolved(plugin, environment);
  require_supported(plugin);
  const auto backend = plugin.backend.value_or(DynamoBackend::kNo);
  if (!plugin.disable && backend != DynamoBackend::kNo && backend != DynamoBackend::kEager) {
    throw UnsupportedError(str("The dynamo backend ", backend,
                               " is asked for, but this version does not capture steps yet. Use NO "
                               "(dynamo_backend, or ACCELERATE_DYNAMO_BACKEND)."));
  }
  return plugin;
}

std::optional<ParallelismConfig> parallelism_config(const AcceleratorOptions& options,
                                                    const Environment& environment) {
  if (options.parallelism_config) return options.parallelism_config;
  if (options.torch_tp_plugin) {
    warn_once("TorchTensorParallelPlugin is deprecated. Use ParallelismConfig with tp_size.");
    return to_parallelism_config(*options.torch_tp_plugin);
  }
  if (environment.flag("ACCELERATE_USE_PARALLELISM_CONFIG")) return ParallelismConfig{};
  return std::nullopt;
}

/// Of all dimensions only the replication of whole models is there.
void require_replication_alone(const ParallelismConfig& config) {
  const auto refuse = [](const char* name, std::optional<std::int64_t> size) {
    if (size.value_or(1) <= 1) return;
    throw UnsupportedError(str(name, " of parallelism_config is ", *size,
                               ", but this version has no such parallelism yet. Set it to 1; "
                               "dp_replicate_size is there."));
  };
  refuse("dp_shard_size", config.dp_shard_size);
  refuse("tp_size", config.tp_size);
  refuse("cp_size", config.cp_size);
  refuse("sp_size", config.sp_size);
}

AcceleratorState make_state(const AcceleratorOptions& options, const Environment& environment) {
  AcceleratorStateOptions wanted;
  wanted.mixed_precision = options.mixed_precision;
  wanted.cpu = options.cpu;
  wanted.dynamo_plugin = std::make_shared<TorchDynamoPlugin>(dynamo_plugin(options, environment));
  for (const auto& [name, plugin] : options.deepspeed_plugins) {
    wanted.deepspeed_plugins.emplace_back(name, std::make_shared<DeepSpeedPlugin>(plugin));
  }
  if (options.deepspeed_plugin) {
    wanted.deepspeed_plugins.emplace_back(
        "default", std::make_shared<DeepSpeedPlugin>(*options.deepspeed_plugin));
  }
  const auto shared = [](const auto& plugin) {
    using Plugin = typename std::remove_cvref_t<decltype(plugin)>::value_type;
    return plugin ? std::make_shared<Plugin>(*plugin) : nullptr;
  };
  wanted.fsdp_plugin = shared(options.fsdp_plugin);
  wanted.torch_tp_plugin = shared(options.torch_tp_plugin);
  wanted.megatron_lm_plugin = shared(options.megatron_lm_plugin);
  if (auto config = parallelism_config(options, environment)) {
    auto filled = resolved(*config, environment);
    require_supported(filled);
    require_replication_alone(filled);
    wanted.parallelism_config = std::make_shared<ParallelismConfig>(std::move(filled));
  }
  if (const auto* init = find_handler<InitProcessGroupKwargs>(options.kwargs_handlers)) {
    wanted.process_group = PartialStateOptions::from(*init);
  }
  wanted.process_group.process_group = options.process_group;
  AcceleratorState state(wanted, FromAccelerator{});
  if (const auto config = state.parallelism_config()) {
    *config = validated_for(
        *config, {.num_processes = state.num_processes(), .distributed = state.use_distributed()});
  }
  return state;
}

/// What only one who asks for fp8 may bring along.
void check_fp8_recipes(const AcceleratorOptions& options) {
  const auto& handlers = options.kwargs_handlers;
  if (find_handler<AORecipeKwargs>(handlers) || find_handler<FP8RecipeKwargs>(handlers)) {
    throw ConfigError(
        "A recipe for fp8 is in kwargs_handlers, but mixed_precision is not fp8. Take it out.");
  }
}

/// Settings that were given go into the gradient state; a second accelerator without any leaves it
/// as the first one made it.
void set_accumulation(const AcceleratorOptions& options, const Environment& environment) {
  const bool existed = GradientState::initialized();
  if (options.gradient_accumulation_plugin) {
    const std::int64_t before = existed ? GradientState().num_steps() : 1;
    const GradientState changed(*options.gradient_accumulation_plugin);
    if (existed && changed.num_steps() != before) {
      info(str("gradient_accumulation_steps is now ", changed.num_steps(), ", it was ", before,
               ": all accelerators of a process share it."));
    }
    return;
  }
  const auto steps = environment.integer({kStepsVariable}, options.gradient_accumulation_steps);
  GradientState state;
  const bool given = environment.contains(kStepsVariable) || steps != 1;
  if (!given || steps == state.num_steps()) return;
  if (existed && state.num_steps() != 1) {
    info(str("gradient_accumulation_steps is now ", steps, ", it was ", state.num_steps(),
             ": all accelerators of a process share it."));
  }
  state.set_num_steps(steps);
}

/// Float16 needs a factor on the loss; bfloat16 has the range of float32.
void set_precision(AcceleratorCore& core) {
  const auto device = core.state.device();
  const auto& handlers = core.options.kwargs_handlers;
  AutocastKwargs kwargs;
  if (const auto* given = find_handler<AutocastKwargs>(handlers)) kwargs = *given;
  switch (core.state.mixed_precision()) {
    case PrecisionType::kFp16: {
      if (device.is_cpu()) {
        warn_once(
            "mixed_precision is fp16, which a CPU does not train in: all is computed in float32. "
            "Use bf16 for mixed precision on a CPU.");
        return;
      }
      core.cast = CastSettings{device.type(), at::kHalf, kwargs};
      GradScalerKwargs scaler;
      if (const auto* given = find_handler<GradScalerKwargs>(handlers)) scaler = *given;
      core.scaling = std::make_shared<LossScaling>(scaler);
      return;
    }
    case PrecisionType::kBf16:
      if (!device.is_cpu() && !is_bf16_available(true)) {
        throw UnsupportedError(str("mixed_precision is bf16, which ", device.str(),
                                   " does not compute in. Use fp16 or no."));
      }
      core.cast = CastSettings{device.type(), at::kBFloat16, kwargs};
      return;
    default:
      return;
  }
}

}  // namespace

std::shared_ptr<AcceleratorCore> make_accelerator_core(const AcceleratorOptions& options) {
  const Environment environment = Environment::process();
  check_given_once(options);
  check_supported(options, environment);
  check_fp8_recipes(options);
  auto core = std::make_shared<AcceleratorCore>(options, make_state(options, environment));
  if (options.split_batches) {
    core->options.dataloader_config.split_batches = *options.split_batches;
  }
  validate(core->options.dataloader_config, environment);
  core->project = options.project_config.value_or(ProjectConfiguration{});
  if (options.project_dir && !core->project.project_dir) {
    core->project.set_directories(options.project_dir);
  }
  core->project = resolved(core->project, environment);
  if (const auto* ddp = find_handler<DistributedDataParallelKwargs>(options.kwargs_handlers)) {
    core->ddp = resolved(*ddp, environment);
  }
  set_accumulation(options, environment);
  core->gradient_state = GradientState();
  set_precision(*core);
  return core;
}

}  // namespace accelerate::detail
