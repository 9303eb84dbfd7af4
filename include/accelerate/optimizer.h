// accelerate/optimizer.h - an optimizer prepared by `Accelerator::prepare`.
//
//     auto optimizer = accelerator.prepare(std::move(adamw));
//     optimizer.step();         // only when gradients are complete, with fused kernels
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

namespace detail::optim {
struct OptimizerCore;
}  // namespace detail::optim

/// Python's `AcceleratedOptimizer`. `step` and `zero_grad` do nothing while gradients are
/// accumulated, see `Accelerator::accumulate`.
class ACCELERATE_API AcceleratedOptimizer {
 public:
  using LossClosure = torch::optim::Optimizer::LossClosure;
  using ParamStates =
      std::remove_cvref_t<decltype(std::declval<torch::optim::Optimizer&>().state())>;

  /// An empty handle. Its functions throw `StateError`.
  AcceleratedOptimizer() = default;
  /// For this library.
  explicit AcceleratedOptimizer(std::shared_ptr<detail::optim::OptimizerCore> core);

  /// One step, with fused kernels if they give the results of the optimizer itself. In float16 it
  /// unscales the gradients first and skips the step if one is infinite or NaN. Returns the loss of
  /// the closure. Throws `UnsupportedError` for a closure in float16.
  at::Tensor step(const LossClosure& closure = nullptr);
  /// Drops the gradients, or sets them to zero.
  void zero_grad(bool set_to_none = true);
  /// Whether the last step was skipped because of infinite or NaN gradients.
  [[nodiscard]] bool step_was_skipped() const;

  [[nodiscard]] std::vector<torch::optim::OptimizerParamGroup>& param_groups() const;
  void add_param_group(const torch::optim::OptimizerParamGroup& group);
  /// LibTorch's states by parameter address, and the options of groups without their own.
  /// `state_dict` has Python's names.
  [[nodiscard]] ParamStates& state() const;
  [[nodiscard]] torch::optim::OptimizerOptions& defaults() const;

  /// Python's layout: {'state': {0: {'step': ..., 'exp_avg': ...}}, 'param_groups': [{'lr': ...,
  /// 'params': [0, 1]}]}. The tensors are the optimizer's own, not copies. Throws
  /// `UnsupportedError` unless the optimizer is one of accelerate/optim.h, or exactly AdamW, Adam,
  /// SGD, Adagrad or RMSprop of torch::optim.
  [[nodiscard]] Value state_dict() const;
  /// Loads options and copies of the tensors, placed on the devices of the parameters. Parameters
  /// are matched by their order. Ignores what schedulers keep in groups.
  ///
  /// Throws `ArgumentError` if groups, options or shapes differ; nothing has changed then.
  void load_state_dict(const Value& state);

  /// Calls the function of this name if the optimizer has one (schedule-free optimizers, for
  /// example).
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
  [[nodiscard]] const std::shared_ptr<detail::optim::OptimizerCore>& _core() const { return core_; }

 private:
  [[nodiscard]] detail::optim::OptimizerCore& core() const;

  std::shared_ptr<detail::optim::OptimizerCore> core_;
};

namespace detail::optim {

/// Sets the function that switches the optimizer between training and evaluation.
ACCELERATE_API void set_modes(OptimizerCore& core,
                              std::function<void(torch::optim::Optimizer&, bool training)> modes);

}  // namespace detail::optim
}  // namespace accelerate
