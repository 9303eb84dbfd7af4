// src/accelerator/gradient_watch.h - detects gradients not made by `Accelerator::backward`.
//
// `loss.backward()` synchronizes nothing, and processes that step with such gradients drift apart:
// step_checks.h refuses that. One parameter of each model is watched. That is enough, since each
// backward must reach all of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "accelerate/prepared_model.h"

namespace accelerate::detail::accelerator {

class GradientWatch {
 public:
  explicit GradientWatch(const std::shared_ptr<ModelCore>& model);
  ~GradientWatch();
  GradientWatch(const GradientWatch&) = delete;
  GradientWatch& operator=(const GradientWatch&) = delete;

  /// Watches again, after parameters were given other data or were frozen.
  void renew();

  /// The watched parameter; undefined if the model trains nothing.
  [[nodiscard]] const at::Tensor& parameter() const { return parameter_; }
  [[nodiscard]] const std::string& name() const { return name_; }

 private:
  void stop();

  std::weak_ptr<ModelCore> model_;
  at::Tensor parameter_ = {};
  std::string name_ = {};
  /// Kept alive: else a parameter makes a new one for each graph, without the hook.
  // A shared or an intrusive pointer, by the version of LibTorch.
  decltype(torch::autograd::impl::grad_accumulator(
      std::declval<const at::Tensor&>())) accumulator_ = nullptr;
  std::uintptr_t hook_ = 0;
};

/// Whether a model may have got such gradients; false is certain.
[[nodiscard]] bool any_stray() noexcept;
/// To be set after the gradients of all models were looked at.
void set_any_stray(bool any) noexcept;

}  // namespace accelerate::detail::accelerator
