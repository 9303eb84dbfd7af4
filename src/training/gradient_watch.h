// src/training/gradient_watch.h - notices gradients that `Accelerator::backward` has not brought.
//
// `loss.backward()` averages nothing, and processes that step with such gradients drift apart. One
// parameter of each model is watched: where each backward has to reach all of them that is enough.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>

#include "accelerate/prepared_model.h"

namespace accelerate::detail {

/// While it lives the gradients that come are asked for by this library.
class OwnBackward {
 public:
  OwnBackward() noexcept;
  ~OwnBackward();
  OwnBackward(const OwnBackward&) = delete;
  OwnBackward& operator=(const OwnBackward&) = delete;
};

class GradientWatch {
 public:
  explicit GradientWatch(const std::shared_ptr<ModelCore>& model);
  ~GradientWatch();
  GradientWatch(const GradientWatch&) = delete;
  GradientWatch& operator=(const GradientWatch&) = delete;

  /// Begins anew, after parameters have been given other data or have been frozen.
  void renew();

  /// The one that is watched; not defined where nothing is trained.
  [[nodiscard]] const at::Tensor& parameter() const { return parameter_; }
  [[nodiscard]] const std::string& name() const { return name_; }

 private:
  void stop();

  std::weak_ptr<ModelCore> model_;
  at::Tensor parameter_ = {};
  std::string name_ = {};
  /// Kept: a parameter would make a new one for each graph.
  std::shared_ptr<torch::autograd::Node> accumulator_ = nullptr;
  std::uintptr_t hook_ = 0;
};

/// Warns once of a model whose parameters `optimizer` is about to step with gradients that were not
/// averaged, where no scope asked for that.
void warn_of_strays(const torch::optim::Optimizer& optimizer);

}  // namespace accelerate::detail
