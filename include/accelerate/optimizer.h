// accelerate/optimizer.h - an optimizer that `Accelerator::prepare` has taken over.
//
//     auto optimizer = accelerator.prepare(std::move(adamw));
//     optimizer.step();         // only where gradients are complete, and with fused kernels
//     optimizer.zero_grad();
//
// Copies are handles to the same optimizer.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

#include "accelerate/api.h"

namespace accelerate {

namespace detail {
struct OptimizerCore;
}

/// Python's `AcceleratedOptimizer`. `step` and `zero_grad` do nothing on batches whose gradients
/// are only added up, see `Accelerator::accumulate`.
class ACCELERATE_API AcceleratedOptimizer {
 public:
  using LossClosure = torch::optim::Optimizer::LossClosure;

  /// An empty handle, to be assigned to. Its functions throw `StateError`.
  AcceleratedOptimizer() = default;
  /// For this library.
  explicit AcceleratedOptimizer(std::shared_ptr<detail::OptimizerCore> core);

  /// One step, by fused kernels where they give what the optimizer itself would give. With float16
  /// gradients are unscaled first, and there is no step where one of them is infinite or NaN.
  /// Returns the loss of the closure. Throws `UnsupportedError` for a closure with float16.
  at::Tensor step(const LossClosure& closure = nullptr);
  /// Forgets the gradients, or sets them to zero.
  void zero_grad(bool set_to_none = true);
  /// Whether the last step was left out because of infinite or NaN gradients.
  [[nodiscard]] bool step_was_skipped() const;

  [[nodiscard]] std::vector<torch::optim::OptimizerParamGroup>& param_groups() const;
  void add_param_group(const torch::optim::OptimizerParamGroup& group);
  /// The optimizer that was prepared. Schedulers can be built on either.
  [[nodiscard]] torch::optim::Optimizer& optimizer() const;
  operator torch::optim::Optimizer&() const {  // NOLINT(google-explicit-constructor)
    return optimizer();
  }

  explicit operator bool() const noexcept { return core_ != nullptr; }
  void reset() noexcept { core_.reset(); }
  /// For this library.
  [[nodiscard]] const std::shared_ptr<detail::OptimizerCore>& _core() const { return core_; }

 private:
  [[nodiscard]] detail::OptimizerCore& core() const;

  std::shared_ptr<detail::OptimizerCore> core_;
};

namespace detail {

/// What a prepared optimizer is made of. `moved_from` is where it was before it was moved to the
/// heap, if it was: schedulers may still point there.
[[nodiscard]] ACCELERATE_API std::shared_ptr<OptimizerCore> make_optimizer_core(
    std::shared_ptr<torch::optim::Optimizer> optimizer,
    const torch::optim::Optimizer* moved_from = nullptr);

}  // namespace detail
}  // namespace accelerate
