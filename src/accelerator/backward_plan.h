// src/accelerator/backward_plan.h - runs a backward and tells the engines of the models it reaches.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "accelerate/prepared_model.h"
#include "parallel/engine.h"

namespace accelerate::detail::parallel {
class JoinScope;
}  // namespace accelerate::detail::parallel

namespace accelerate::detail::accelerator {

/// What a backward starts from.
struct BackwardCall {
  const at::Tensor& loss;
  /// The leaves that gradients are added to; empty for all.
  const std::vector<at::Tensor>& inputs;
  /// The models of the accelerator that runs it.
  std::span<const std::shared_ptr<ModelCore>> own;
  /// The scope of uneven inputs, or null.
  parallel::JoinScope* join = nullptr;
};

/// One object runs all backward passes of an accelerator: it keeps its memory between them.
class BackwardPlan {
 public:
  /// Collective if gradients are synchronized. Calls `autograd`, between `before_backward` and
  /// `after_backward` of the models of the process that the loss reaches, whichever accelerator has
  /// prepared them.
  ///
  /// Throws what engines and `autograd` throw; `StateError` for a model whose last backward threw;
  /// `ArgumentError` if `inputs` has some parameters of a model only, or if a model got gradients
  /// that its engine was not told of.
  void run(const BackwardCall& call, c10::function_ref<void()> autograd);

  /// How many backward passes, or steps of a pipeline, have synchronized gradients.
  [[nodiscard]] std::int64_t synchronized() const { return synchronized_; }
  /// Processes with fewer batches than others have taken part in more than they ran; a pipeline
  /// runs its own.
  void set_synchronized(std::int64_t count) { synchronized_ = count; }

 private:
  /// Which tensor the gradient of a parameter is, and its version.
  using GradientMark = std::pair<const void*, std::uint32_t>;
  class Cleared;

  void clear();
  void arm(const BackwardCall& call);
  void find_reached(const BackwardCall& call);
  [[nodiscard]] static GradientMark mark_of(const at::Tensor& parameter);
  void check_finished() const;
  void check_unseen() const;
  [[nodiscard]] bool is_superseded(const BackwardCall& call, std::size_t index) const;
  [[nodiscard]] ModelCore* only_static(const BackwardCall& call) const;

  std::vector<std::shared_ptr<ModelCore>> models_ = {};  // all that have an engine
  std::vector<ModelCore*> candidates_ = {};              // that synchronize gradients now
  std::vector<ModelCore*> reached_ = {};                 // of the candidates
  std::vector<ModelCore*> local_ = {};  // reached, told of a backward that does not synchronize
  std::vector<parallel::Joinable*> joined_ = {};
  parallel::ReachedLeaves leaves_ = {};
  /// Parameters of candidates that the loss is not seen to reach, and their gradients before it.
  std::vector<std::pair<at::Tensor, GradientMark>> unseen_ = {};
  std::int64_t synchronized_ = 0;
};

}  // namespace accelerate::detail::accelerator
