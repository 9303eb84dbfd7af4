#include "pipeline/own_stages.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>

#include "accelerate/errors.h"
#include "accelerate/operations/objects.h"
#include "accelerate/state_dict.h"
#include "core/text.h"

namespace accelerate::detail::pipeline {
namespace {

/// Name, sizes, type, whether it is a parameter, whether it is trained.
using TensorCard = std::tuple<std::string, std::vector<std::int64_t>, int, bool, bool>;

/// What a process says of its stage: number, number of stages, parameters and buffers.
using StageCard = std::tuple<std::int64_t, std::int64_t, std::vector<TensorCard>>;

StageCard card_of(const PipelineImpl& pipeline) {
  std::vector<TensorCard> tensors;
  const auto add = [&](const std::string& name, const at::Tensor& tensor, bool is_parameter) {
    if (!tensor.defined()) return;
    tensors.emplace_back(name, tensor.sizes().vec(), static_cast<int>(tensor.scalar_type()),
                         is_parameter, tensor.requires_grad());
  };
  for (const auto& entry : pipeline.model()->named_parameters()) {
    add(entry.key(), entry.value(), true);
  }
  for (const auto& entry : pipeline.model()->named_buffers()) {
    add(entry.key(), entry.value(), false);
  }
  const auto [stage, stages] = pipeline._own_stage();
  return {stage, stages, std::move(tensors)};
}

void check_cards(const std::vector<StageCard>& cards) {
  std::map<std::string, std::size_t> owners;
  for (std::size_t rank = 0; rank < cards.size(); ++rank) {
    const auto& [stage, stages, tensors] = cards[rank];
    if (stage != static_cast<std::int64_t>(rank) ||
        stages != static_cast<std::int64_t>(cards.size())) {
      throw ArgumentError(
          str("prepare: process ", rank, " of a pipeline of ", cards.size(),
              " processes has stage ", stage, " of ", stages,
              ". Give each process the PipelineStage of its pipeline_parallel_rank, "
              "and as many stages as pp_size."));
    }
    for (const auto& card : tensors) {
      const auto [known, is_new] = owners.emplace(std::get<0>(card), rank);
      if (is_new) continue;
      throw ArgumentError(str("prepare: the stages ", known->second, " and ", rank,
                              " both have a '", known->first,
                              "'. Register modules under the names that they have in the whole "
                              "model; weights that stages share need a Pipeline of the whole "
                              "model."));
    }
  }
}

/// All layers of a stage as one.
PipelineLayer stage_layer(std::size_t stage, const std::shared_ptr<torch::nn::Module>& module,
                          std::vector<PipelineLayer> layers) {
  return {.name = str("stage ", stage),
          .modules = {module},
          .forward = [layers = std::move(layers)](const PipelineTensors& inputs) {
            auto values = inputs;
            for (const auto& layer : layers) values = layer.forward(values);
            return values;
          }};
}

}  // namespace

void put(torch::nn::Module& root, const std::string& name, const at::Tensor& tensor,
         bool is_parameter) {
  auto* module = &root;
  const auto parts = split(name, '.');
  for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
    const auto children = module->named_children();
    const auto* const known = children.find(parts[i]);
    module = known != nullptr
                 ? known->get()
                 : module->register_module(parts[i], std::make_shared<torch::nn::Module>()).get();
  }
  if (is_parameter) {
    module->register_parameter(parts.back(), tensor, tensor.requires_grad());
  } else {
    module->register_buffer(parts.back(), tensor);
  }
}

void join_stages(PipelineImpl& pipeline, const StageMessages::GroupHandle& group) {
  const auto rank = static_cast<std::size_t>(group ? group->getRank() : 0);
  const std::vector<StageCard> own{card_of(pipeline)};
  const auto cards = group ? accelerate::gather_object(own, group) : own;
  check_cards(cards);
  std::vector<PipelineLayer> layers;
  for (std::size_t stage = 0; stage < cards.size(); ++stage) {
    const bool is_own = stage == rank;
    const auto module = is_own ? pipeline.model() : std::make_shared<torch::nn::Module>();
    std::map<std::string, at::Tensor> known;
    for (const auto& entry : module->named_parameters()) known[entry.key()] = entry.value();
    for (const auto& entry : module->named_buffers()) known[entry.key()] = entry.value();
    for (const auto& [name, sizes, type, is_parameter, trained] : std::get<2>(cards[stage])) {
      const auto options = at::device(at::kMeta).dtype(static_cast<at::ScalarType>(type));
      const auto tensor =
          is_own ? known.at(name) : at::empty(sizes, options).set_requires_grad(trained);
      put(pipeline, name, tensor, is_parameter);
      if (!is_own) put(*module, name, tensor, is_parameter);
    }
    layers.push_back(stage_layer(stage, module, is_own ? pipeline._layers() : decltype(layers)()));
  }
  pipeline._join(std::move(layers));
}

void join_groups(torch::optim::Optimizer& optimizer, const PipelineImpl& pipeline,
                 const StageMessages::GroupHandle& group) {
  std::map<const c10::TensorImpl*, std::string> names;
  std::map<std::string, at::Tensor> tensors;
  for (const auto& entry : pipeline.named_parameters()) {
    names[entry.value().unsafeGetTensorImpl()] = entry.key();
    tensors[entry.key()] = entry.value();
  }
  // By group, what this process has of the pipeline.
  std::vector<std::vector<std::string>> own;
  for (auto& one : optimizer.param_groups()) {
    auto& listed = own.emplace_back();
    std::erase_if(one.params(), [&](const at::Tensor& parameter) {
      const auto found = names.find(parameter.unsafeGetTensorImpl());
      if (found == names.end()) return false;
      if (!parameter.is_meta()) listed.push_back(found->second);
      return true;
    });
  }
  const auto all = group ? accelerate::gather_object(
                               std::vector<std::vector<std::vector<std::string>>>{own}, group)
                         : std::vector<std::vector<std::vector<std::string>>>{own};
  for (const auto& of_stage : all) {
    if (of_stage.size() != own.size()) {
      throw ArgumentError(str("prepare: an optimizer has ", own.size(),
                              " groups of parameters on "
                              "one stage of the pipeline and ",
                              of_stage.size(),
                              " on another. Give it the same groups on all stages, also empty "
                              "ones."));
    }
    for (std::size_t i = 0; i < of_stage.size(); ++i) {
      for (const auto& name : of_stage[i]) {
        optimizer.param_groups()[i].params().push_back(tensors.at(name));
      }
    }
  }
}

}  // namespace accelerate::detail::pipeline
