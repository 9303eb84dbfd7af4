// From the options of an accelerator, and the environment, to what it will do.
#include <algorithm>
#include <mutex>

#include "accelerate/checks.h"
#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "accelerate/modeling/compiled_model.h"
#include "accelerator/accelerator_core.h"
#include "accelerator/monitoring.h"
#include "core/log.h"
#include "core/megatron_run.h"
#include "core/supported.h"
#include "core/text.h"
#include "state/partial_facts.h"
#include "state/random_states.h"

namespace accelerate::detail::accelerator {
namespace {

constexpr const char* kStepsVariable = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS";
constexpr const char* kDriftVariable = "ACCELERATE_DRIFT_CHECK";
constexpr const char* kNoPrecision =
    "mixed_precision is no. Set mixed_precision, or leave the handler out.";

/// Where two fields mean the same, one of them is given at most.
void check_given_once(const AcceleratorOptions& options) {
  if (options.dynamo_backend && options.dynamo_plugin) {
    throw ConfigError("dynamo_backend and dynamo_plugin are both given. Give one of them.");
  }
  if (options.deepspeed_plugin && !options.deepspeed_plugins.empty()) {
    throw ConfigError("deepspeed_plugin and deepspeed_plugins are both given. Give one of them.");
  }
  const auto steps = options.gradient_accumulation_steps.value_or(1);
  if (options.gradient_accumulation_plugin && steps != 1) {
    throw ConfigError(str("gradient_accumulation_steps is ", steps,
                          " and gradient_accumulation_plugin is given too. Give one of them."));
  }
  if (steps < 1) {
    throw ConfigError(
        str("gradient_accumulation_steps is ", steps, ", but a step takes one batch at least."));
  }
  if (options.split_batches && !*options.split_batches && options.dataloader_config.split_batches) {
    throw ConfigError(
        "split_batches is false, but split_batches of dataloader_config is true. Set one of them.");
  }
}

void check_supported(const AcceleratorOptions& options, const Environment& environment) {
  validate(options.kwargs_handlers, environment);
  for (const auto& handler : options.kwargs_handlers) require_supported(handler);
}

/// Also those that have no effect on this run: what is wrong with them shall not come out later.
void check_plugins(const AcceleratorOptions& options, const Environment& environment) {
  const auto check = [&](const auto& plugin) {
    if (plugin) validate(*plugin, environment);
  };
  check(options.deepspeed_plugin);
  for (const auto& [name, plugin] : options.deepspeed_plugins) validate(plugin, environment);
  check(options.fsdp_plugin);
  check(options.torch_tp_plugin);
  if (options.torch_tp_plugin && options.torch_tp_plugin->torch_device_mesh) {
    throw ConfigError(
        "torch_device_mesh of TorchTensorParallelPlugin is given, but the accelerator makes the "
        "mesh itself. Leave it out, and take accelerator.torch_device_mesh().");
  }
  check(options.megatron_lm_plugin);
  check(options.gradient_accumulation_plugin);
  validate(options.dataloader_config, environment);
}

/// What only the backend CUDAGRAPHS follows. The launcher's variable for `dynamic` is false where
/// it was not asked for, so that only a plugin with it counts.
void warn_of_capture_options(const TorchDynamoPlugin& plugin, std::optional<bool> given_dynamic) {
  if (plugin.backend == DynamoBackend::kCudagraphs) return;
  const auto warn_of = [&](std::string_view field) {
    warn_once(str(field, " of the TorchDynamoPlugin has no effect with the backend ",
                  *plugin.backend,
                  ": it is for steps that are recorded. Choose CUDAGRAPHS, or leave it out."));
  };
  if (plugin.fullgraph.value_or(false)) warn_of("fullgraph");
  if (given_dynamic == false) warn_of("dynamic");
}

/// Options of Python's compiler, of which there is none here.
void warn_of_compiler_options(const TorchDynamoPlugin& plugin, std::optional<bool> given_dynamic) {
  if (plugin.disable || plugin.backend == DynamoBackend::kNo) return;
  warn_of_capture_options(plugin, given_dynamic);
  if (plugin.mode != "default") {
    warn_once(str("mode of the TorchDynamoPlugin is '", *plugin.mode,
                  "', which has no effect: models are not compiled. Use accelerator.capture for "
                  "what reduce-overhead does in Python."));
  }
  if (plugin.use_regional_compilation.value_or(false)) {
    warn_once(
        "use_regional_compilation of the TorchDynamoPlugin has no effect: models are not compiled, "
        "neither whole nor by their blocks.");
  }
}

TorchDynamoPlugin dynamo_plugin(const AcceleratorOptions& options, const Environment& environment) {
  TorchDynamoPlugin plugin = options.dynamo_plugin.value_or(TorchDynamoPlugin{});
  const auto given_dynamic = plugin.dynamic;
  if (options.dynamo_backend) plugin.backend = options.dynamo_backend;
  plugin = resolved(plugin, environment);
  require_supported(plugin);
  if (!plugin.disable && plugin.backend == DynamoBackend::kInductor) {
    static_cast<void>(modeling::compiled_package(plugin));  // what CompiledModel loads
  }
  warn_of_compiler_options(plugin, given_dynamic);
  return plugin;
}

/// The plugin that was given, else one of the variables alone where the launcher asks for it. The
/// variables speak to the first accelerator only: those after it have its plugins.
template <class Plugin>
std::optional<Plugin> asked_for(const std::optional<Plugin>& given, const std::string& variable,
                                bool given_otherwise, const Environment& environment) {
  if (given || given_otherwise || AcceleratorState::initialized()) return given;
  return environment.flag(variable) ? std::optional(Plugin{}) : std::nullopt;
}

std::optional<ParallelismConfig> parallelism_config(const AcceleratorOptions& options,
                                                    const Environment& environment) {
  if (options.parallelism_config) return options.parallelism_config;
  if (options.torch_tp_plugin) {
    warn_once("TorchTensorParallelPlugin is deprecated. Use ParallelismConfig with tp_size.");
    return to_parallelism_config(*options.torch_tp_plugin);
  }
  return asked_for(options.parallelism_config, "ACCELERATE_USE_PARALLELISM_CONFIG",
                   /*given_otherwise=*/false, environment);
}

AcceleratorStateOptions state_options(const AcceleratorOptions& options,
                                      const Environment& environment) {
  AcceleratorStateOptions wanted;
  wanted.mixed_precision = options.mixed_precision;
  wanted.cpu = options.cpu;
  // As `asked_for`: the variables speak to the first accelerator only.
  if (options.dynamo_plugin || options.dynamo_backend || !AcceleratorState::initialized()) {
    wanted.dynamo_plugin = std::make_shared<TorchDynamoPlugin>(dynamo_plugin(options, environment));
  }
  const auto add_deepspeed = [&](const std::string& name, const DeepSpeedPlugin& plugin) {
    auto filled = std::make_shared<DeepSpeedPlugin>(resolved(plugin, environment));
    require_supported(*filled);
    wanted.deepspeed_plugins.emplace_back(name, std::move(filled));
  };
  for (const auto& [name, plugin] : options.deepspeed_plugins) add_deepspeed(name, plugin);
  if (const auto plugin = asked_for(options.deepspeed_plugin, "ACCELERATE_USE_DEEPSPEED",
                                    !options.deepspeed_plugins.empty(), environment)) {
    add_deepspeed("default", *plugin);
  }
  if (const auto plugin =
          asked_for(options.fsdp_plugin, "ACCELERATE_USE_FSDP", false, environment)) {
    wanted.fsdp_plugin =
        std::make_shared<FullyShardedDataParallelPlugin>(resolved(*plugin, environment));
  }
  const auto shared = [](const auto& plugin) {
    using Plugin = typename std::remove_cvref_t<decltype(plugin)>::value_type;
    return plugin ? std::make_shared<Plugin>(*plugin) : nullptr;
  };
  wanted.torch_tp_plugin = shared(options.torch_tp_plugin);
  if (const auto plugin =
          asked_for(options.megatron_lm_plugin, "ACCELERATE_USE_MEGATRON_LM", false, environment)) {
    wanted.megatron_lm_plugin =
        std::make_shared<MegatronLMPlugin>(megatron_for_run(*plugin, environment));
  }
  if (auto config = parallelism_config(options, environment)) {
    auto filled = resolved(*config, environment);
    require_supported(filled);
    wanted.parallelism_config = std::make_shared<ParallelismConfig>(std::move(filled));
  }
  if (const auto* init = find_handler<InitProcessGroupKwargs>(options.kwargs_handlers)) {
    wanted.process_group = PartialStateOptions::from(*init);
  }
  wanted.process_group.process_group = options.process_group;
  return wanted;
}

/// A recipe may come with fp8 and, as in Python, with the engines that have a precision of their
/// own.
std::optional<Fp8Recipe> fp8_recipe(const AcceleratorCore& core, const Environment& environment) {
  const auto precision = core.state.mixed_precision();
  const bool fp8 = precision == PrecisionType::kFp8;
  auto recipe = choose_fp8_recipe(core.options.kwargs_handlers, fp8, environment);
  if (!recipe || fp8) return recipe;
  // A GPU without kernels has turned fp8 into fp16.
  if (core.options.mixed_precision.value_or(state::precision_from_environment()) ==
      PrecisionType::kFp8) {
    return std::nullopt;
  }
  const auto type = core.state.distributed_type();
  if (type == DistributedType::kFsdp || type == DistributedType::kDeepspeed) return recipe;
  throw ConfigError(str("A recipe for fp8 is in kwargs_handlers, but mixed_precision is '",
                        precision, "', not fp8. Take it out."));
}

ProjectConfiguration project_of(const AcceleratorOptions& options, const Environment& environment) {
  ProjectConfiguration project = options.project_config.value_or(ProjectConfiguration{});
  if (options.project_dir && !project.project_dir) project.set_directories(options.project_dir);
  project = resolved(project, environment);
  if (project.save_on_preemption && !(project.automatic_checkpoint_naming && project.project_dir)) {
    throw ConfigError(
        "save_on_preemption needs a name for what it saves: set automatic_checkpoint_naming and "
        "project_dir of the ProjectConfiguration too.");
  }
  return project;
}

/// A folder that the first `save_state` would refuse to overwrite is found hours earlier.
void warn_of_next_checkpoint(const AcceleratorCore& core) {
  const auto& project = core.project;
  if (!project.automatic_checkpoint_naming || !project.project_dir) return;
  const auto next = *project.project_dir / "checkpoints" / str("checkpoint_", project.iteration);
  std::error_code error;
  if (!std::filesystem::exists(next, error)) return;
  info(str("'", next.string(),
           "' exists. Call load_state() to go on from the newest checkpoint, or "
           "set the iteration of the ProjectConfiguration: save_state does not overwrite it."));
}

/// The batches of a step that the variable or the options ask for; nullopt if a plugin sets them or
/// nothing does.
std::optional<std::int64_t> accumulation_steps(const AcceleratorOptions& options,
                                               const Environment& environment) {
  if (options.gradient_accumulation_plugin) return std::nullopt;
  // "auto" is for the DeepSpeed configuration.
  if (const auto text = environment.get(kStepsVariable); text && *text != "auto") {
    const auto steps = environment.integer({kStepsVariable}, -1);
    if (steps >= 1) return steps;
    throw ConfigError(str(kStepsVariable, " is '", *text,
                          "', but a step takes one batch at least. Set it to 1 or more."));
  }
  return options.gradient_accumulation_steps;
}

/// Steps between comparisons of parameters, by the variable or the options.
std::int64_t drift_check(const AcceleratorOptions& options, const Environment& environment) {
  const auto text = environment.get(kDriftVariable);
  const auto steps = text ? environment.integer({kDriftVariable}, -1) : options.drift_check;
  if (steps >= 0) return steps;
  throw ConfigError(str(text ? kDriftVariable : "drift_check", " is ",
                        text ? str("'", *text, "'") : str(steps),
                        ", which is no number of steps. Set it to 1 or more, or to 0 to compare no "
                        "parameters."));
}

/// Settings that were given go into the gradient state; a second accelerator without any leaves it
/// as the first one made it.
void set_accumulation(const std::optional<GradientAccumulationPlugin>& plugin,
                      std::optional<std::int64_t> steps) {
  GradientState state;
  const std::int64_t before = state.num_steps();
  if (plugin) state = GradientState(*plugin);
  if (steps) state.set_num_steps(*steps);
  if (before == 1 || state.num_steps() == before) return;
  info(str("gradient_accumulation_steps is now ", state.num_steps(), ", it was ", before,
           ": all accelerators of a process share it."));
}

/// Of a handler that is given, unless it is switched off.
template <class Handler>
void warn_without_effect(const AcceleratorCore& core, std::string_view why) {
  const auto* given = find_handler<Handler>(core.options.kwargs_handlers);
  if (given == nullptr || !given->enabled) return;
  warn_once(str(Handler::kOptionsName, " in kwargs_handlers has no effect: ", why));
}

/// Float16 needs a factor on the loss; bfloat16 has the range of float32. A DeepSpeed engine casts
/// the model itself and scales the loss by rules of its own.
void set_precision(AcceleratorCore& core) {
  if (core.state.distributed_type() == DistributedType::kDeepspeed) {
    warn_without_effect<AutocastKwargs>(
        core,
        "a run with DeepSpeed casts the model, not its operators. Set fp16 or bf16 of its "
        "configuration, or leave the handler out.");
    warn_without_effect<GradScalerKwargs>(
        core,
        "a run with DeepSpeed scales the loss by its configuration. Set fp16.loss_scale or "
        "fp16.initial_scale_power there, or leave the handler out.");
    return;
  }
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
        constexpr const char* kWhy =
            "a CPU computes in float32 where mixed_precision is fp16. Leave it out.";
        warn_without_effect<AutocastKwargs>(core, kWhy);
        warn_without_effect<GradScalerKwargs>(core, kWhy);
        return;
      }
      core.cast = CastSettings{device.type(), at::kHalf, kwargs};
      GradScalerKwargs scaler;
      if (const auto* given = find_handler<GradScalerKwargs>(handlers)) scaler = *given;
      core.registry.scaling = std::make_shared<optim::LossScaling>(scaler);
      return;
    }
    case PrecisionType::kFp8:  // what is not a product in 8 bits
    case PrecisionType::kBf16:
      if (!device.is_cpu() && !is_bf16_available(true)) {
        throw UnsupportedError(str("mixed_precision is ", core.state.mixed_precision(), ", which ",
                                   device.str(),
                                   " does not compute in: that takes compute capability 8.0. Use "
                                   "fp16 or no."));
      }
      core.cast = CastSettings{device.type(), at::kBFloat16, kwargs};
      warn_without_effect<GradScalerKwargs>(
          core, str("mixed_precision is ", core.state.mixed_precision(),
                    ", whose gradients have the range of float32. Leave it out, or use fp16."));
      return;
    default:
      warn_without_effect<AutocastKwargs>(core, kNoPrecision);
      warn_without_effect<GradScalerKwargs>(core, kNoPrecision);
      return;
  }
}

/// Collective if the run has a parallelism_config and no mesh yet.
std::shared_ptr<DeviceMesh> mesh_of(const AcceleratorState& state) {
  const auto device = c10::DeviceTypeName(state.device().type(), /*lower_case=*/true);
  if (const auto config = state.parallelism_config()) return config->get_device_mesh(device);
  if (!state.use_distributed()) return nullptr;
  return std::make_shared<DeviceMesh>(device,
                                      MeshLayout({"dp_replicate"}, {state.num_processes()}));
}

/// Which states of the process there were before a construction.
class StatesBefore {
 public:
  /// Forgets the others.
  void restore() const {
    if (!accelerator_) AcceleratorState::_reset_state();
    if (!partial_) PartialState::_reset_state();
    if (!gradient_) GradientState::_reset_state();
  }

 private:
  bool accelerator_ = AcceleratorState::initialized();
  bool partial_ = PartialState::initialized();
  bool gradient_ = GradientState::initialized();
};

}  // namespace

std::shared_ptr<AcceleratorCore> make_accelerator_core(const AcceleratorOptions& given) {
  static std::mutex mutex;  // one construction must not take back the states of another
  const std::lock_guard lock(mutex);
  const Environment environment = Environment::process();
  check_given_once(given);
  check_supported(given, environment);
  AcceleratorOptions options = given;
  if (options.split_batches) options.dataloader_config.split_batches = *options.split_batches;
  check_plugins(options, environment);
  options.drift_check = drift_check(options, environment);
  const auto project = project_of(options, environment);
  options.log_with = filter_trackers(options.log_with, project.logging_dir);
  const auto steps = accumulation_steps(options, environment);
  DistributedDataParallelKwargs ddp;
  if (const auto* kwargs = find_handler<DistributedDataParallelKwargs>(options.kwargs_handlers)) {
    ddp = resolved(*kwargs, environment);
  }
  const auto wanted = state_options(options, environment);

  // Some things are wrong with the device or the number of processes only.
  const StatesBefore before;
  try {
    auto core = std::make_shared<AcceleratorCore>(
        options, AcceleratorState(
                     wanted, {.fp8 = true, .fsdp = true, .deepspeed = true, .megatron_lm = true}));
    core->project = project;
    core->ddp = ddp;
    core->mesh = mesh_of(core->state);
    core->registry.random_states = std::make_shared<state::RandomStates>(core->step);
    core->fp8 = fp8_recipe(*core, environment);
    set_precision(*core);
    set_accumulation(options.gradient_accumulation_plugin, steps);
    if (project.save_on_preemption) core->preemption = std::make_unique<Preemption>(core->state);
    if (project.monitor) core->recorder = make_recorder(*core);
    if (core->state.is_main_process()) {
      check_os_kernel();
      warn_of_next_checkpoint(*core);
    }
    return core;
  } catch (...) {
    before.restore();
    throw;
  }
}

}  // namespace accelerate::detail::accelerator
