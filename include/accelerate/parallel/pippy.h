// accelerate/parallel/pippy.h - inference with a model whose layers are spread over the processes.
//
//     auto model = accelerate::prepare_pippy(net);
//     auto output = model(input);           // the last process has it, the others have none
//     if (output.defined()) std::cout << output << '\n';
//
// Part of accelerate/parallel.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <variant>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/detail/modeling/module_of.h"
#include "accelerate/parallel/pipeline.h"

namespace accelerate {

struct PreparePippyOptions {
  /// "auto", or the names of the layers that begin a stage, without the first one. Auto makes the
  /// largest stage as small as can be.
  std::variant<std::string, std::vector<std::string>> split_points = "auto";
  /// For ported programs: layers are never cut, whatever their class is.
  std::vector<std::string> no_split_module_classes = {};
  /// Inputs with which the pipeline is run once, so that errors come early. Python traces with
  /// them.
  PipelineTensors example_args = {};
  /// Into how many parts a batch is cut. Unset: the number of processes.
  std::optional<std::int64_t> num_chunks = std::nullopt;
  /// Give the output to all processes.
  bool gather_output = false;
};

/// What `prepare_pippy` returns. Copies are handles to the same model.
class ACCELERATE_API PippyModel {
 public:
  /// Collective. The output of the model for a batch that the first process gives; inputs of the
  /// others are not looked at. Undefined on all processes but the last, unless `gather_output` is
  /// set. No gradients are recorded.
  ///
  /// A batch that is no multiple of `num_chunks` is filled up with copies of its last row, whose
  /// outputs are dropped. Throws `ArgumentError` on the first process if no input has a dimension.
  template <std::convertible_to<at::Tensor>... Inputs>
  at::Tensor operator()(const Inputs&... inputs) const {
    return run({at::Tensor(inputs)...}, std::source_location::current());
  }
  [[nodiscard]] at::Tensor run(const PipelineTensors& inputs,
                               std::source_location where = std::source_location::current()) const;

  [[nodiscard]] std::int64_t num_chunks() const { return num_chunks_; }
  /// The layers that begin a stage, without the first one.
  [[nodiscard]] std::vector<std::string> hf_split_points() const;
  /// The names of the layers of each stage.
  [[nodiscard]] std::vector<std::vector<std::string>> stages() const { return pipeline_->stages(); }

 private:
  friend ACCELERATE_API PippyModel make_pippy(const std::shared_ptr<torch::nn::Module>& model,
                                              const PreparePippyOptions& options,
                                              std::source_location where);
  PippyModel() = default;

  Pipeline pipeline_ = nullptr;
  std::int64_t num_chunks_ = 1;
  bool gather_output_ = false;
};

[[nodiscard]] ACCELERATE_API PippyModel make_pippy(const std::shared_ptr<torch::nn::Module>& model,
                                                   const PreparePippyOptions& options,
                                                   std::source_location where);

/// Collective. Gives each process a part of the layers of a `torch::nn::Sequential` or `StageList`,
/// with the weights of the first process, and frees the others; stage i is on rank i. A single
/// process keeps all.
///
/// Throws `ArgumentError` for fewer layers than processes, for split points that are unknown or not
/// in order, and for `num_chunks` below 1.
template <detail::modeling::ModelHolder Model>
[[nodiscard]] PippyModel prepare_pippy(
    const Model& model, const PreparePippyOptions& options = {},
    std::source_location where = std::source_location::current()) {
  return make_pippy(detail::modeling::ModuleOf<Model>::pointer(model), options, where);
}

}  // namespace accelerate
