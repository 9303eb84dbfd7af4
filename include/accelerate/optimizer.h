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

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/value.h"

namespace accelerate {

namespace detail {
struct OptimizerCore;

/// Throws `StateError`.
[[noreturn]] ACCELERATE_API void refuse_empty_optimizer();
}  // namespace detail

/// Python's `AcceleratedOptimizer`. `step` and `zero_grad` do nothing on batches whose gradients
/// are only added up, see `Accelerator::accumulate`.
class ACCELERATE_API AcceleratedOptimizer {
 public:
  using LossClosure = torch::optim::Optimizer::LossClosure;
  using ParamStates =
      std::remove_cvref_t<decltype(std::declval<torch::optim::Optimizer&>().state())>;

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
  /// What the optimizer keeps of each parameter, by address, and the options of groups without
  /// their own. As LibTorch has them; `state_dict` has Python's names.
  [[nodiscard]] ParamStates& state() const;
  [[nodiscard]] torch::optim::OptimizerOptions& defaults() const;

  /// Python's layout: {'state': {0: {'step': ..., 'exp_avg': ...}}, 'param_groups': [{'lr': ...,
  /// 'params': [0, 1]}]}. The tensors are the optimizer's own, not copies. Throws
  /// `UnsupportedError` for an optimizer whose state is not known (accelerate/optimizer_state.h).
  [[nodiscard]] Value state_dict() const;
  /// Takes options and copies of tensors over, which go to where the parameters are; parameters are
  /// matched by their order. What schedulers keep in groups is left to `AcceleratedScheduler`.
  ///
  /// Throws `ArgumentError` for other groups, options or shapes than the optimizer has; nothing has
  /// changed then.
  void load_state_dict(const Value& state);

  /// For optimizers that have functions of these names (schedule-free ones, say); nothing for
  /// others.
  void train() const;
  void eval() const;

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

/// How the optimizer goes over to training, or away from it.
ACCELERATE_API void set_modes(OptimizerCore& core,
                              std::function<void(torch::optim::Optimizer&, bool training)> modes);

/// Those of `AcceleratedOptimizer`.
[[nodiscard]] ACCELERATE_API Value optimizer_state_dict(torch::optim::Optimizer& optimizer);
ACCELERATE_API void load_optimizer_state_dict(torch::optim::Optimizer& optimizer,
                                              const Value& state);

}  // namespace detail
}  // namespace accelerate
