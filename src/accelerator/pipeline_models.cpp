#include "accelerator/pipeline_models.h"

#include <algorithm>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "accelerate/errors.h"
#include "accelerate/parallel/megatron.h"
#include "accelerate/parallel/pipeline.h"
#include "accelerator/model_engines.h"
#include "accelerator/model_registry.h"
#include "core/text.h"
#include "model_parallel/parameter_part.h"
#include "model_parallel/tensor_parallel_engine.h"
#include "optim/clip_grad.h"
#include "optim/scheduler_core.h"
#include "parallel/data_parallel.h"
#include "parallel/wrapped_engine.h"
#include "pipeline/pipeline_engine.h"
#include "sharding/sharded_engine.h"
#include "state/tensor_device.h"

namespace accelerate::detail::accelerator {
namespace {

void check_run(const AcceleratorCore& core) {
  const auto refuse = [](std::string_view what, std::string_view instead) {
    throw UnsupportedError(str("prepare: a Pipeline does not go with ", what, ". ", instead));
  };
  if (core.registry.scaling) refuse("mixed_precision fp16", "Use bf16, which needs no scaling.");
  if (core.fp8) refuse("mixed_precision fp8", "Use bf16.");
  if (core.gradient_state.num_steps() > 1) {
    refuse("gradient_accumulation_steps above 1",
           "Its micro-batches are its accumulation: use num_micro_batches of PipelineOptions.");
  }
  const auto type = core.state.distributed_type();
  constexpr std::string_view kInstead = "Use pp_size, tp_size and dp_replicate_size.";
  if (type == DistributedType::kFsdp || type == DistributedType::kDeepspeed) {
    refuse(str("distributed_type ", type), kInstead);
  }
  if (!core.mesh) return;
  for (const auto& name : core.mesh->mesh_dim_names()) {
    if (name == "pp" || name == "tp" || name == "dp_replicate") continue;
    refuse(str(name, "_size ", core.mesh->size(name)), kInstead);
  }
}

void check_own_stage(const AcceleratorCore& core, const PipelineImpl& pipeline) {
  const auto stages = pipeline._own_stage().stages;
  if (stages == 1) return;
  const auto given = core.mesh && core.mesh->has("pp") ? core.mesh->size("pp") : 1;
  if (given != stages) {
    throw ArgumentError(str("prepare: the PipelineStage is one of ", stages, ", but pp_size is ",
                            given, ". Set it to the number of stages."));
  }
  if (!steps_by_megatron(core)) return;
  const auto plugin = core.state.megatron_lm_plugin();
  if (!plugin->num_layers_per_virtual_pipeline_stage && !plugin->decoder_last_pipeline_num_layers) {
    return;
  }
  throw ArgumentError(
      "prepare: num_layers_per_virtual_pipeline_stage and decoder_last_pipeline_num_layers divide "
      "the layers of a whole model, but a PipelineStage is divided already. Leave them out.");
}

bool is_trained_by(const torch::optim::Optimizer& optimizer, const ModelCore& model) {
  const auto parameters = model.module->parameters();
  return std::ranges::any_of(optimizer.param_groups(), [&](const auto& group) {
    return std::ranges::any_of(group.params(), [&](const at::Tensor& one) {
      if (model.engine) return model.engine->holds(one);
      return std::ranges::any_of(parameters, [&](const auto& own) { return own.is_same(one); });
    });
  });
}

/// What a training step ends with. The accelerator may be gone by then.
PipelineImpl::Steps steps_of(AcceleratorCore& core, const std::shared_ptr<ModelCore>& model) {
  using Optimizers = std::vector<std::shared_ptr<optim::OptimizerCore>>;
  const auto optimizers = [owner = core.weak_from_this(), of = std::weak_ptr(model)] {
    Optimizers found;
    const auto core = owner.lock();
    const auto model = of.lock();
    if (!core || !model) return found;
    for (const auto& one : core->registry.optimizers) {
      if (is_trained_by(*one->optimizer, *model)) found.push_back(one);
    }
    return found;
  };
  const auto step = [optimizers, owner = core.weak_from_this()] {
    const auto all = optimizers();
    if (all.empty()) {
      throw StateError(
          "No prepared optimizer has parameters of this pipeline, so that a training step would "
          "change nothing. Give the optimizer to prepare as well.");
    }
    for (const auto& one : all) one->step();
    const auto core = owner.lock();
    if (!core || !steps_by_megatron(*core)) return;
    const optim::PreparedStep prepared;
    for (const auto& one : core->registry.schedulers) one->parts.ours->step();
  };
  const auto clip = [of = std::weak_ptr(model)](double max_norm) {
    const auto model = of.lock();
    return optim::clip_grad_norm_(model->module->parameters(), max_norm, 2.0, false,
                                  list_engines());
  };
  // Processes that are told to stop agree on a step by this count.
  const auto averaged = [owner = core.weak_from_this()] {
    if (const auto core = owner.lock()) {
      core->backward.set_synchronized(core->backward.synchronized() + 1);
    }
  };
  const auto zero_grad = [optimizers] {
    for (const auto& one : optimizers()) one->zero_grad();
  };
  return {.averaged = averaged, .clip = clip, .step = step, .zero_grad = zero_grad};
}

}  // namespace

namespace {

/// The layers that begin a stage, if the last one has `last` layers and the others share the rest.
std::vector<std::string> split_before_last(const std::vector<PipelineLayer>& layers,
                                           std::int64_t stages, std::int64_t last) {
  const auto count = static_cast<std::int64_t>(layers.size());
  const auto others = stages - 1;
  if (others < 1 || last < 1 || count - last < others || (count - last) % others != 0) {
    throw ConfigError(str("decoder_last_pipeline_num_layers is ", last, ", but the ", count - last,
                          " other layers cannot be divided evenly over ", others, " stages."));
  }
  std::vector<std::string> names;
  for (std::int64_t stage = 1; stage < stages; ++stage) {
    names.push_back(layers[static_cast<std::size_t>(stage * ((count - last) / others))].name);
  }
  return names;
}

/// Throws `ConfigError` if the plugin and the options of the pipeline say different things.
void check_alike(std::string_view field, const Value& of_plugin, std::string_view option,
                 const Value& of_pipeline) {
  if (of_plugin == of_pipeline) return;
  throw ConfigError(str(field, " of MegatronLMPlugin is ", of_plugin.repr(), ", but ", option,
                        " of PipelineOptions ", of_pipeline.repr(), ". Set one of them only."));
}

/// What the plugin says of a pipeline. What was not given stays as the pipeline has it, but that
/// Megatron-LM clips.
void configure(const MegatronLMPlugin& plugin, PipelineImpl& pipeline) {
  auto options = pipeline.options();
  const auto stages = plugin.pp_degree.value_or(1);
  const auto layers = static_cast<std::int64_t>(pipeline._layers().size());
  if (const auto given = plugin.num_micro_batches) {
    if (options.num_micro_batches != 1) {
      check_alike("num_micro_batches", *given, "num_micro_batches", options.num_micro_batches);
    }
    options.num_micro_batches = *given;
  }
  if (const auto given = plugin.gradient_clipping) {
    if (const auto own = options.max_grad_norm) {
      check_alike("gradient_clipping", *given, "max_grad_norm", *own);
    }
    options.max_grad_norm = *given == 0.0 ? std::nullopt : given;
  } else if (!options.max_grad_norm) {
    options.max_grad_norm = 1.0;
  }
  if (plugin.num_layers_per_virtual_pipeline_stage && plugin.decoder_last_pipeline_num_layers) {
    throw ConfigError(
        "num_layers_per_virtual_pipeline_stage of MegatronLMPlugin gives all stages as many "
        "layers, but decoder_last_pipeline_num_layers is set, too. Leave one of them out.");
  }
  if (const auto each = plugin.num_layers_per_virtual_pipeline_stage) {
    if (*each < 1 || layers % (stages * *each) != 0) {
      throw ConfigError(str("num_layers_per_virtual_pipeline_stage is ", *each, ", but the ",
                            layers, " layers of the model are no multiple of ", stages,
                            " stages of as many layers."));
    }
    options.chunks = layers / (stages * *each);
    options.schedule = PipelineSchedule::kInterleaved1F1B;
    options.split_points.clear();
    for (auto layer = *each; layer < layers; layer += *each) {
      options.split_points.push_back(pipeline._layers()[static_cast<std::size_t>(layer)].name);
    }
  } else if (const auto last = plugin.decoder_last_pipeline_num_layers) {
    options.split_points = split_before_last(pipeline._layers(), stages, *last);
  }
  if (plugin.recompute_granularity == "full") {
    options.recompute = plugin.recompute_method == "block" ? PipelineRecompute::kBlock
                                                           : PipelineRecompute::kUniform;
    options.recompute_layers = plugin.recompute_num_layers.value_or(1);
  }
  pipeline._set_options(options);
  if (plugin.custom_loss_function) {
    pipeline._set_loss([loss = plugin.custom_loss_function](const PipelineTensors& outputs,
                                                            const PipelineTensors& targets) {
      return loss(Value(Value::List(targets.begin(), targets.end())),
                  pipeline::only_tensor(outputs));
    });
  }
}

/// Collective. Averages gradients over the copies of a stage.
std::shared_ptr<parallel::Engine> stage_engine(const AcceleratorCore& core, const ModelCore& model,
                                               const pipeline::RunnerPlace& place,
                                               bool divides_states, torch::nn::Module& part) {
  if (!place.data) return std::make_shared<parallel::LocalEngine>(part);
  if (!divides_states) {
    return std::make_shared<parallel::DataParallel>(part, place.data, core.ddp,
                                                    core.options.drift_check);
  }
  check_averaging_of_shards(core.ddp);
  sharding::ShardSpec spec;
  spec.level = sharding::ShardLevel::kOptimizer;
  auto engine = std::make_shared<sharding::ShardedEngine>(
      part, spec, sharding::ShardProcesses{.shard = place.data, .all = place.data}, model.device,
      core.options.drift_check);
  engine->keep_states(keeps_states(core));
  return engine;
}

/// `core` and `model` must outlive the result.
pipeline::MakePartEngine part_engines(const AcceleratorCore& core, const ModelCore& model,
                                      const pipeline::RunnerPlace& place) {
  const auto plugin = core.state.megatron_lm_plugin();
  const bool divides =
      place.data && steps_by_megatron(core) && plugin->use_distributed_optimizer.value_or(false);
  return [&core, &model, place, divides](torch::nn::Module& part) {
    const bool cut = place.tensor && model_parallel::is_cut(part);
    if (cut) model_parallel::take_rules_off(part);
    auto engine = stage_engine(core, model, place, divides, part);
    if (cut) {
      engine = std::make_shared<model_parallel::TensorParallelEngine>(
          std::move(engine), part, place.tensor, place.data, core.options.drift_check);
    }
    return engine;
  };
}

}  // namespace

bool steps_by_megatron(const AcceleratorCore& core) {
  return core.state.distributed_type() == DistributedType::kMegatronLm;
}

void refuse_without_pipeline(const AcceleratorCore& core) {
  if (!steps_by_megatron(core)) return;
  throw UnsupportedError(
      "prepare: MegatronLMPlugin trains a model by calls that are whole steps, but this model is "
      "no "
      "Pipeline. Python builds its own from a Transformers configuration; in C++ give prepare an "
      "accelerate::Pipeline (accelerate/parallel.h) of the model and its loss.");
}

void follow_megatron(const AcceleratorCore& core, optim::OptimizerCore& optimizer) {
  if (!steps_by_megatron(core)) return;
  MegatronLMArguments(*core.state.megatron_lm_plugin()).set_optimizer_type(*optimizer.optimizer);
  optimizer.stepped_in_backward = true;
}

void follow_megatron(const AcceleratorCore& core, optim::SchedulerCore& scheduler) {
  if (!steps_by_megatron(core)) return;
  auto* const ours = dynamic_cast<MegatronLMDummyScheduler*>(scheduler.parts.ours);
  if (ours == nullptr) {
    throw ArgumentError(
        "You can't use a custom scheduler with Megatron-LM. Please use the "
        "`accelerate::MegatronLMDummyScheduler` instead.");
  }
  const auto plugin = core.state.megatron_lm_plugin();
  if (plugin->train_samples && !ours->options().total_num_steps) {
    throw ConfigError(
        "train_samples of MegatronLMPlugin is set, but steps are counted: give "
        "MegatronLMDummyScheduler its total_num_steps, which counts instead.");
  }
  MegatronLMArguments arguments(*plugin);
  const auto copies = core.state.parallelism_config()->data_parallel_size();
  arguments.set_training_args(/*micro_batch_size=*/1, copies);
  arguments.set_optimizer_type(ours->optimizer());
  arguments.set_scheduler_args(ours->options().total_num_steps, ours->options().warmup_num_steps);
  ours->_follow(MegatronLMSchedule::from(arguments.megatron_lm_default_args()));
  scheduler.stepped_in_backward = true;
}

bool is_pipeline(const torch::nn::Module& module) {
  return dynamic_cast<const PipelineImpl*>(&module) != nullptr;
}

void prepare_pipeline(AcceleratorCore& core, ModelCore& model) {
  check_run(core);
  auto& pipeline = dynamic_cast<PipelineImpl&>(*model.module);
  check_own_stage(core, pipeline);
  if (steps_by_megatron(core)) configure(*core.state.megatron_lm_plugin(), pipeline);
  const auto steps = steps_of(core, model.shared_from_this());
  pipeline::RunnerPlace place{.device = model.device, .drift_check = core.options.drift_check};
  if (!core.state.use_distributed()) {
    pipeline.to(state::tensor_device(model.device));
    pipeline._prepare(std::make_shared<pipeline::StageRunner>(pipeline, place), steps);
    return;
  }
  if (core.mesh->has("pp")) place.pipeline = core.mesh->get_group("pp");
  if (core.mesh->has("dp_replicate")) place.data = core.mesh->get_group("dp_replicate");
  if (core.mesh->has("tp")) {
    place.tensor = core.mesh->get_group("tp");
    if (!model_parallel::is_cut(pipeline)) model_parallel::refuse_uncut(place.tensor->getSize());
  }
  auto engine =
      std::make_shared<pipeline::PipelineEngine>(pipeline, place, part_engines(core, model, place));
  model.moves_inputs = !model.device.is_cpu();
  pipeline._prepare(engine->runner(), steps);
  model.use(std::move(engine));
}

}  // namespace accelerate::detail::accelerator
