// src/pipeline/stage_plan.h - which layers, and which parameters, belong to which stage.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "accelerate/parallel/pipeline_layers.h"
#include "accelerate/parallel/pipeline_schedule.h"

namespace accelerate::detail::pipeline {

/// The first stage begins with layer 0; element i is the first layer of stage i + 1.
using Cuts = std::vector<std::size_t>;

/// Cuts that make the largest stage as small as can be, the leftmost ones of several. Each stage
/// has one layer at least. Throws `ArgumentError` for fewer layers than stages.
[[nodiscard]] ACCELERATE_API Cuts balanced_cuts(const std::vector<std::int64_t>& layer_bytes,
                                                std::int64_t stages);
/// The cuts before the layers of these names. Throws `ArgumentError` for a name that is no layer or
/// not behind the one before it, and if they do not make `stages` stages.
[[nodiscard]] Cuts cuts_at(std::span<const PipelineLayer> layers,
                           std::span<const std::string> names, std::int64_t stages);
/// Of parameters and buffers of each layer.
[[nodiscard]] std::vector<std::int64_t> bytes_of(std::span<const PipelineLayer> layers);

/// The layers from `begin` to before `end`.
struct LayerRange {
  std::size_t begin = 0;
  std::size_t end = 0;
};

struct ACCELERATE_API StagePlan {
  PipelineShape shape = {};
  std::int64_t rank = 0;
  /// By stage.
  std::vector<LayerRange> stages = {};
  /// The stages that use a parameter or buffer, ascending.
  std::unordered_map<const c10::TensorImpl*, std::vector<std::int64_t>> used_by = {};

  [[nodiscard]] std::int64_t rank_of(std::int64_t stage) const { return stage % shape.ranks; }
  [[nodiscard]] std::int64_t stage_of(std::int64_t chunk) const {
    return chunk * shape.ranks + rank;
  }
  [[nodiscard]] std::int64_t last_stage() const { return shape.stages() - 1; }
  /// The ranks that hold a tensor, by the stages that use it; empty for a tensor of no layer.
  [[nodiscard]] std::vector<std::int64_t> holders(const at::Tensor& tensor) const;
  [[nodiscard]] bool is_held(const at::Tensor& tensor) const;
};

[[nodiscard]] ACCELERATE_API StagePlan make_plan(std::span<const PipelineLayer> layers,
                                                 std::span<const std::string> split_points,
                                                 const PipelineShape& shape, std::int64_t rank);

}  // namespace accelerate::detail::pipeline
