// src/accelerator/step_checks.h - what a prepared optimizer is about to step, on several processes.
//
// A step with gradients that no engine has averaged lets the processes drift apart. What can be
// seen before the step is reported here; the rest is found by src/parallel/drift_watch.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "accelerate/prepared_model.h"

namespace accelerate::detail::accelerator {

/// Called before each step of one optimizer.
class StepChecks {
 public:
  /// Not `checks`: engines are told all the same, since some must wait before a step.
  explicit StepChecks(bool checks) : checks_(checks) {}

  /// Tells the engines of the step. Throws `StateError` for a prepared model whose gradients come
  /// from `loss.backward()`, and for parameters that a prepared model got after `prepare`. Warns
  /// once of parameters that no prepared model has.
  void operator()(const torch::optim::Optimizer& optimizer);

 private:
  using Models = std::vector<std::shared_ptr<ModelCore>>;

  /// Parameters of the optimizer that no engine trains.
  struct Unheld {
    std::vector<at::Tensor> tensors = {};
    std::vector<std::string> names = {};
  };

  [[nodiscard]] bool is_held(const at::Tensor& parameter) const;
  void check(const torch::optim::Optimizer& optimizer);
  void find_unheld(const torch::optim::Optimizer& optimizer);
  void check_added() const;
  void check_others();
  /// Those that the step changes, by name.
  [[nodiscard]] std::vector<std::string> trained(const Unheld& unheld) const;

  bool checks_;
  Models models_ = {};
  /// The engines and the parameters, as a number and a hash, that `added_` and `others_` were made
  /// of.
  std::vector<std::weak_ptr<parallel::Engine>> engines_ = {};
  std::size_t parameters_ = 0;
  std::size_t hash_ = 0;
  /// The modules of prepared models have them: they came, or were unfrozen, after `prepare`.
  Unheld added_ = {};
  /// No prepared model has them.
  Unheld others_ = {};
  bool warned_ = false;
};

}  // namespace accelerate::detail::accelerator
