// accelerate/parallel/pipeline_layers.h - a model as the list of layers that a pipeline cuts.
//
// A `torch::nn::Sequential` is such a list already. Any other model says how its forward falls into
// parts:
//
//     class GptImpl : public torch::nn::Module, public accelerate::StageList {
//       std::vector<accelerate::PipelineLayer> pipeline_layers() override {
//         using accelerate::pipeline_layer;
//         std::vector<accelerate::PipelineLayer> layers;
//         layers.push_back(pipeline_layer("embed", {tokens_.ptr(), positions_.ptr()},
//                                         [this](const torch::Tensor& ids) { return embed(ids);
//                                         }));
//         ...
//       }
//     };
//
// Part of accelerate/parallel.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/detail/modeling/module_of.h"

namespace accelerate {

/// What goes from one layer to the next. Most models have one tensor there.
using PipelineTensors = std::vector<at::Tensor>;

/// A part of a model that one process computes.
struct PipelineLayer {
  /// For split points and messages.
  std::string name = {};
  /// The modules with the parameters and buffers that `forward` uses. A parameter that layers of
  /// several stages use is tied: its gradients are added up.
  std::vector<std::shared_ptr<torch::nn::Module>> modules = {};
  std::function<PipelineTensors(const PipelineTensors&)> forward = {};
};

/// A model of which `pipeline_layers` in their order are the forward.
class ACCELERATE_API StageList {
 public:
  virtual ~StageList();
  [[nodiscard]] virtual std::vector<PipelineLayer> pipeline_layers() = 0;
};

/// Stage `stage` (from 0) of a model that is cut into `stages` already: a process builds its own
/// layers only, that is those of `accelerator.pipeline_parallel_rank()`, and an optimizer of their
/// parameters. Names must be those of the whole model, so that no two stages have the same one.
struct PipelineStage {
  /// A `torch::nn::Sequential` or a `StageList`.
  std::shared_ptr<torch::nn::Module> module = nullptr;
  std::int64_t stage = 0;
  std::int64_t stages = 1;
};

namespace detail::pipeline {

template <class F>
concept TensorFunction = std::is_invocable_r_v<at::Tensor, F&, const at::Tensor&>;

/// The one tensor of a list. Throws `ArgumentError` if there are more, or none.
[[nodiscard]] ACCELERATE_API const at::Tensor& only_tensor(const PipelineTensors& tensors);

/// The layers of a `StageList` or of a `torch::nn::Sequential`. Throws `ArgumentError` for another
/// module, and if there are none.
[[nodiscard]] ACCELERATE_API std::vector<PipelineLayer> layers_of(
    const std::shared_ptr<torch::nn::Module>& model);

}  // namespace detail::pipeline

/// A layer whose function takes and returns one tensor, or `PipelineTensors`.
template <class F>
[[nodiscard]] PipelineLayer pipeline_layer(std::string name,
                                           std::vector<std::shared_ptr<torch::nn::Module>> modules,
                                           F forward) {
  PipelineLayer layer{.name = std::move(name), .modules = std::move(modules)};
  if constexpr (detail::pipeline::TensorFunction<F>) {
    layer.forward = [f = std::move(forward)](const PipelineTensors& inputs) mutable {
      return PipelineTensors{f(detail::pipeline::only_tensor(inputs))};
    };
  } else {
    layer.forward = std::move(forward);
  }
  return layer;
}

}  // namespace accelerate
