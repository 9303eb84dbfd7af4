#include "pipeline/stage_plan.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::pipeline {
namespace {

/// Calls `f(tensor)` for the parameters and buffers of a layer, which may come several times.
template <class F>
void for_each_tensor(const PipelineLayer& layer, F&& f) {
  for (const auto& module : layer.modules) {
    for (const auto& parameter : module->parameters()) f(parameter);
    for (const auto& buffer : module->buffers()) f(buffer);
  }
}

void check_count(std::size_t layers, std::int64_t stages) {
  if (static_cast<std::int64_t>(layers) >= stages) return;
  throw ArgumentError(str("The model has ", layers, " layers, too few for a pipeline of ", stages,
                          " stages. Use fewer stages, or divide the model into more layers."));
}

/// Stages if each is filled with layers up to `limit` bytes, from the last one: what is left for
/// the first one is the rest, which makes cuts leftmost. Empty if that takes more stages.
Cuts filled_from_the_end(const std::vector<std::int64_t>& bytes, std::int64_t stages,
                         std::int64_t limit) {
  Cuts cuts;
  std::int64_t filled = 0;
  std::int64_t in_stage = 0;
  for (std::size_t layer = bytes.size(); layer-- > 0;) {
    // Each of the stages before this one needs a layer.
    const auto stages_before = stages - 1 - static_cast<std::int64_t>(cuts.size());
    const bool must_close = static_cast<std::int64_t>(layer) + 1 == stages_before;
    if (in_stage > 0 && (filled + bytes[layer] > limit || must_close)) {
      cuts.push_back(layer + 1);
      filled = 0;
      in_stage = 0;
    }
    filled += bytes[layer];
    ++in_stage;
  }
  if (static_cast<std::int64_t>(cuts.size()) != stages - 1) return {};
  std::ranges::reverse(cuts);
  return cuts;
}

}  // namespace

Cuts balanced_cuts(const std::vector<std::int64_t>& layer_bytes, std::int64_t stages) {
  check_count(layer_bytes.size(), stages);
  if (stages == 1) return {};
  auto low = *std::ranges::max_element(layer_bytes);
  auto high = std::accumulate(layer_bytes.begin(), layer_bytes.end(), std::int64_t{0});
  while (low < high) {
    const auto middle = low + (high - low) / 2;
    if (filled_from_the_end(layer_bytes, stages, middle).empty()) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return filled_from_the_end(layer_bytes, stages, low);
}

Cuts cuts_at(std::span<const PipelineLayer> layers, std::span<const std::string> names,
             std::int64_t stages) {
  check_count(layers.size(), stages);
  if (static_cast<std::int64_t>(names.size()) != stages - 1) {
    throw ArgumentError(str("A pipeline of ", stages, " stages has ", stages - 1,
                            " split points, not ", names.size(),
                            ". Give the first layer of each stage, without that of the first "
                            "stage, or none to have the model split by its size."));
  }
  Cuts cuts;
  for (const auto& name : names) {
    const auto found = std::ranges::find(layers, name, &PipelineLayer::name);
    if (found == layers.end()) {
      std::vector<std::string> all;
      for (const auto& layer : layers) all.push_back(layer.name);
      throw ArgumentError(str("The split point '", name,
                              "' is no layer of the model. Choose among: ", join(all), "."));
    }
    const auto index = static_cast<std::size_t>(found - layers.begin());
    if (index <= (cuts.empty() ? 0 : cuts.back())) {
      throw ArgumentError(str("The split point '", name,
                              "' leaves a stage without layers: split points are in the order of "
                              "the layers, and none is the first layer."));
    }
    cuts.push_back(index);
  }
  return cuts;
}

std::vector<std::int64_t> bytes_of(std::span<const PipelineLayer> layers) {
  std::vector<std::int64_t> bytes;
  for (const auto& layer : layers) {
    std::int64_t sum = 0;
    for_each_tensor(layer, [&](const at::Tensor& one) {
      sum += one.defined() ? one.numel() * static_cast<std::int64_t>(one.element_size()) : 0;
    });
    bytes.push_back(sum);
  }
  return bytes;
}

std::vector<std::int64_t> StagePlan::holders(const at::Tensor& tensor) const {
  std::vector<std::int64_t> ranks;
  const auto found = used_by.find(tensor.unsafeGetTensorImpl());
  if (found == used_by.end()) return ranks;
  for (const auto stage : found->second) {
    const auto holder = rank_of(stage);
    if (std::ranges::find(ranks, holder) == ranks.end()) ranks.push_back(holder);
  }
  return ranks;
}

bool StagePlan::is_held(const at::Tensor& tensor) const {
  const auto ranks = holders(tensor);
  return std::ranges::find(ranks, rank) != ranks.end();
}

StagePlan make_plan(std::span<const PipelineLayer> layers,
                    std::span<const std::string> split_points, const PipelineShape& shape,
                    std::int64_t rank) {
  StagePlan plan{.shape = shape, .rank = rank};
  const auto cuts = split_points.empty() || shape.stages() == 1
                        ? balanced_cuts(bytes_of(layers), shape.stages())
                        : cuts_at(layers, split_points, shape.stages());
  std::size_t begin = 0;
  for (std::size_t stage = 0; stage <= cuts.size(); ++stage) {
    const auto end = stage < cuts.size() ? cuts[stage] : layers.size();
    plan.stages.push_back({begin, end});
    for (auto i = begin; i < end; ++i) {
      for_each_tensor(layers[i], [&](const at::Tensor& one) {
        auto& stages = plan.used_by[one.unsafeGetTensorImpl()];
        const auto number = static_cast<std::int64_t>(stage);
        if (stages.empty() || stages.back() != number) stages.push_back(number);
      });
    }
    begin = end;
  }
  return plan;
}

}  // namespace accelerate::detail::pipeline
