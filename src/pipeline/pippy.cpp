#include "accelerate/parallel/pippy.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "accelerate/errors.h"
#include "accelerate/operations/tensors.h"
#include "accelerate/state/partial_state.h"
#include "comm/peers.h"
#include "core/call_site.h"
#include "core/text.h"
#include "pipeline/pipeline_engine.h"

namespace accelerate {

using detail::str;

namespace {

std::vector<std::string> names_of(const PreparePippyOptions& options) {
  if (const auto* names = std::get_if<std::vector<std::string>>(&options.split_points)) {
    return *names;
  }
  const auto& text = std::get<std::string>(options.split_points);
  if (text == "auto") return {};
  throw ArgumentError(str("prepare_pippy: split_points is '", text,
                          "'. Use \"auto\", or a list of the layers that begin a stage."));
}

/// The rows of a batch, filled up with copies of its last row to a multiple of `chunks`; 0 if no
/// input has rows.
std::int64_t pad(PipelineTensors& inputs, std::int64_t chunks) {
  const auto rows = ignorant_find_batch_size(inputs).value_or(0);
  if (rows > 0) {
    inputs = pad_input_tensors(std::move(inputs), rows, chunks, 0, PadFill::kRepeatLast);
  }
  return rows;
}

}  // namespace

PippyModel make_pippy(const std::shared_ptr<torch::nn::Module>& model,
                      const PreparePippyOptions& options, std::source_location where) {
  const detail::AtCallSite here(where);
  const PartialState state;
  PippyModel result;
  result.num_chunks_ = options.num_chunks.value_or(state.num_processes());
  result.gather_output_ = options.gather_output;
  if (result.num_chunks_ < 1) {
    throw ArgumentError(str("prepare_pippy: num_chunks is ", result.num_chunks_,
                            ", but a batch has one part at least."));
  }
  result.pipeline_ = Pipeline(model, PipelineLoss(),
                              PipelineOptions{.schedule = PipelineSchedule::kGPipe,
                                              .num_micro_batches = result.num_chunks_,
                                              .split_points = names_of(options)});
  detail::pipeline::RunnerPlace place{.device = state.device()};
  if (state.use_distributed()) place.pipeline = state.process_group();
  const detail::pipeline::PipelineEngine engine(*result.pipeline_, place, {});
  result.pipeline_->_prepare(engine.runner(), {});
  if (!options.example_args.empty()) static_cast<void>(result.run(options.example_args, where));
  return result;
}

at::Tensor PippyModel::run(const PipelineTensors& inputs, std::source_location where) const {
  const detail::AtCallSite here(where);
  auto given = inputs;
  std::int64_t rows = 0;
  if (pipeline_->is_first_stage()) rows = pad(given, num_chunks_);
  const PartialState state;
  if (state.use_distributed()) {
    const auto group = state.process_group();
    auto message = at::tensor({rows}, at::kLong);
    const detail::comm::Peers peers("prepare_pippy", {&group, where});
    peers.broadcast(message, 0);
    rows = message.item<std::int64_t>();
  }
  if (rows < 1) {
    throw ArgumentError(
        "Could not find batch size from args or kwargs: no input of the first process has rows.");
  }
  const auto outputs = pipeline_.ptr()->_infer(given, num_chunks_, gather_output_);
  if (outputs.empty()) return {};
  const auto& output = detail::pipeline::only_tensor(outputs);
  return output.dim() == 0 ? output : output.narrow(0, 0, std::min(rows, output.size(0)));
}

std::vector<std::string> PippyModel::hf_split_points() const {
  std::vector<std::string> names;
  for (const auto& stage : pipeline_->stages()) names.push_back(stage.front());
  names.erase(names.begin());
  return names;
}

}  // namespace accelerate
