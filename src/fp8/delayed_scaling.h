// src/fp8/delayed_scaling.h - scales that follow the maxima of earlier steps.
//
// Transformer Engine's recipe. Each layer has a scale for its input, its weight and its gradient.
// A step computes with the scales that it finds and records its maxima; `update` then makes the
// scales of the next step from a window of maxima. So no product waits for the maximum of its own
// operands.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/kwargs/fp8_recipes.h"
#include "accelerate/value.h"
#include "modeling/forward_context.h"

namespace accelerate::detail::fp8 {

class DelayedScaling;

/// A forward that computes in 8 bits. Its scales do not change while it lasts, nor when activation
/// checkpoints repeat a part of it.
struct Region final : modeling::ForwardContext {
  const DelayedScaling* owner = nullptr;
  /// Its own copy, one for each tensor of each layer.
  at::Tensor scales;
};

class ACCELERATE_API DelayedScaling {
 public:
  enum Role : std::uint8_t { kInput, kWeight, kGradient, kRoles };
  /// Of a step. Each has its own scales, and its own `interval`.
  enum Phase : std::uint8_t { kForward, kBackward, kPhases };

  /// `kwargs` are resolved.
  explicit DelayedScaling(TERecipeKwargs kwargs);

  [[nodiscard]] const TERecipeKwargs& kwargs() const { return kwargs_; }
  [[nodiscard]] c10::ScalarType dtype(Role role) const;
  /// Returns the number of the layer.
  std::int64_t add_layer(const std::string& name);
  /// Makes the tensors, when all layers are there.
  void allocate(c10::Device device);

  /// While the result lives, layers of this thread compute in 8 bits. Null if they do not: in
  /// evaluation, unless `use_autocast_during_eval` is set.
  [[nodiscard]] std::shared_ptr<void> enter(bool training) const;
  /// The region of this thread, if it belongs to this object, else null.
  [[nodiscard]] const Region* region() const;

  [[nodiscard]] at::Tensor scale(const at::Tensor& scales, std::int64_t layer, Role role) const {
    return scales[layer * kRoles + role];
  }
  /// The scales of the next forward.
  [[nodiscard]] const at::Tensor& scales() const { return scales_; }
  void record(std::int64_t layer, Role role, const at::Tensor& amax);

  /// Makes the maximum of each element over all processes; does nothing by default.
  std::function<void(at::Tensor&)> reduce_max = {};
  /// Collective if `reduce_max` is. Takes the recorded maxima into the windows, and computes the
  /// scales, every `interval` calls of a phase. What was not used since the last call stays as it
  /// is.
  void update(Phase phase);

  /// Scales and maxima of each layer by name.
  [[nodiscard]] Value state_dict() const;
  /// Layers that `state` does not have keep theirs. A longer or shorter window keeps the newest
  /// maxima.
  void load_state_dict(const Value& state);

 private:
  TERecipeKwargs kwargs_;
  std::vector<std::string> layers_ = {};
  mutable std::mutex mutex_ = {};
  // Written to and not replaced, so that a captured step finds them.
  at::Tensor scales_ = {};
  /// What a scale brings the maximum to.
  at::Tensor targets_ = {};
  /// The maxima since the last update.
  at::Tensor current_ = {};
  /// [amax_history_len - 1, tensors], the newest last.
  at::Tensor history_ = {};
  std::array<std::int64_t, kPhases> updates_ = {};
};

}  // namespace accelerate::detail::fp8
