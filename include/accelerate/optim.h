// accelerate/optim.h - optimizers with PyTorch's numbers, names and defaults.
//
//     accelerate::AdamW adamw(net->parameters(), {.lr = 2e-5, .weight_decay = 0.1});
//     adamw.step();
//
//     // Two groups, the second without weight decay:
//     accelerate::AdamW adamw({accelerate::param_group(weights, AdamWOptions{.lr = 2e-5}),
//                              accelerate::param_group(biases, AdamWOptions{.weight_decay = 0})});
//
// They are `torch::optim::Optimizer`s: schedulers, `prepare` and your own code take them as they
// take LibTorch's. A step is a few kernels over all parameters, not several for each of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/value.h"

namespace accelerate {

// Fields have Python's names, order and defaults. How the work is done (foreach, fused) is not for
// the caller to say, and differentiable steps are not offered.
//
// `capturable`: the learning rate and the step count live on the device of the parameters, so that
// a captured graph does not freeze them. Nothing changes for parameters on the CPU.

struct ACCELERATE_API AdamOptions {
  double lr = 1e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  bool amsgrad = false;
  bool maximize = false;
  bool capturable = false;
  bool decoupled_weight_decay = false;
};

struct ACCELERATE_API AdamWOptions {
  double lr = 1e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool amsgrad = false;
  bool maximize = false;
  bool capturable = false;
};

struct ACCELERATE_API SGDOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool maximize = false;
  bool capturable = false;  // ours
};

struct ACCELERATE_API AdagradOptions {
  double lr = 1e-2;
  double lr_decay = 0;
  double weight_decay = 0;
  double initial_accumulator_value = 0;
  double eps = 1e-10;
  bool maximize = false;
  bool capturable = false;  // ours
};

struct ACCELERATE_API RMSpropOptions {
  double lr = 1e-2;
  double alpha = 0.99;
  double eps = 1e-8;
  double weight_decay = 0;
  double momentum = 0;
  bool centered = false;
  bool capturable = false;
  bool maximize = false;
};

struct ACCELERATE_API NAdamOptions {
  double lr = 2e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  double momentum_decay = 4e-3;
  bool decoupled_weight_decay = false;
  bool maximize = false;
  bool capturable = false;
};

struct ACCELERATE_API RAdamOptions {
  double lr = 1e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  bool decoupled_weight_decay = false;
  bool maximize = false;
  bool capturable = false;
};

struct ACCELERATE_API AdamaxOptions {
  double lr = 2e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  bool maximize = false;
  bool capturable = false;
};

/// "Symbolic Discovery of Optimization Algorithms" (2023), algorithm 2. PyTorch has none.
struct ACCELERATE_API LionOptions {
  double lr = 1e-4;
  std::pair<double, double> betas{0.9, 0.99};
  double weight_decay = 0;
  bool maximize = false;
  bool capturable = false;
};

struct ACCELERATE_API AdafactorOptions {
  double lr = 1e-2;
  double beta2_decay = -0.8;
  /// The first is the smallest difference of the parameters' type from 1 where not set.
  std::pair<std::optional<double>, double> eps{std::nullopt, 1e-3};
  double d = 1;
  double weight_decay = 0;
  bool maximize = false;
  bool capturable = false;  // ours
};

namespace detail {
class TensorBuckets;
struct GradScaling;

/// A learning rate, and the same as a tensor (float32) where kernels shall read it on the device.
struct LearningRate {
  double value = 0;
  at::Tensor tensor;
};
}  // namespace detail

/// What the options of all our parameter groups can do.
class ACCELERATE_API ParamGroupOptions : public torch::optim::OptimizerOptions {
 public:
  ~ParamGroupOptions() override;

  /// The options under Python's names, in its order.
  [[nodiscard]] virtual Value::Dict to_dict() const = 0;
  /// Changes the options that `values` names and leaves the rest. Throws `ArgumentError` for a name
  /// or a value that these options cannot have, and then changes nothing.
  virtual void update(const Value::Dict& values) = 0;

  /// `momentum`, or the first of `betas`: what cyclic schedules move against the learning rate.
  [[nodiscard]] virtual std::optional<double> momentum() const = 0;
  /// Throws `ArgumentError` where `momentum()` is nothing.
  virtual void set_momentum(double momentum) = 0;

  /// The learning rate for parameters on `device`.
  [[nodiscard]] virtual detail::LearningRate learning_rate(c10::Device device) = 0;
};

/// The options of one parameter group. Change `values` freely between steps; a graph that was
/// captured sees only what `set_lr` changes.
template <class Options>
class ACCELERATE_API GroupOptions final : public ParamGroupOptions {
 public:
  /// Throws `ArgumentError` for options that cannot be.
  explicit GroupOptions(Options options);
  GroupOptions(const GroupOptions& other);
  GroupOptions& operator=(const GroupOptions&) = delete;
  ~GroupOptions() override;

  [[nodiscard]] std::unique_ptr<torch::optim::OptimizerOptions> clone() const override;
  [[nodiscard]] double get_lr() const override { return values.lr; }
  void set_lr(double lr) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  void serialize(torch::serialize::InputArchive& archive) override;

  [[nodiscard]] Value::Dict to_dict() const override;
  void update(const Value::Dict& changes) override;
  [[nodiscard]] std::optional<double> momentum() const override;
  void set_momentum(double momentum) override;
  [[nodiscard]] detail::LearningRate learning_rate(c10::Device device) override;

  Options values;

 private:
  at::Tensor lr_tensor_;
  double lr_written_ = 0;
};

/// A parameter group with options of its own.
template <class Options>
[[nodiscard]] torch::optim::OptimizerParamGroup param_group(std::vector<at::Tensor> params,
                                                            Options options) {
  return {std::move(params), std::make_unique<GroupOptions<Options>>(std::move(options))};
}

/// What an optimizer knows of one parameter: tensors by name, in PyTorch's order.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// What all our optimizers can do. Not for several threads at once.
class ACCELERATE_API FusedOptimizer : public torch::optim::Optimizer {
 public:
  FusedOptimizer(FusedOptimizer&&) noexcept;
  FusedOptimizer& operator=(FusedOptimizer&&) noexcept;
  ~FusedOptimizer() override;

  /// One step for all parameters that have a gradient. The closure, where given, computes the
  /// gradients anew; its loss is returned. Throws `ArgumentError` for gradients that are sparse or
  /// complex.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// One step with gradients that are `grad_scale` times too large (they are divided in place), and
  /// none at all where `found_inf` is 1. Both are one float32; not defined: 1 and 0. AdamW, Adam,
  /// SGD and Adagrad leave both to the kernels; the others read `found_inf`, which waits for a GPU.
  void step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf);

  /// The names of all tensors that the state of a parameter may have.
  [[nodiscard]] virtual std::span<const std::string_view> state_names() const = 0;
  /// The state of a parameter; empty before its first step.
  [[nodiscard]] NamedTensors state_of(const at::Tensor& parameter) const;
  /// Puts copies of `tensors` in place of the state of a parameter, on the devices where steps want
  /// them. Throws `ArgumentError` for a parameter that is not in a group, an unknown name or a
  /// shape that does not fit.
  void set_state_of(const at::Tensor& parameter, const NamedTensors& tensors);

  void save(torch::serialize::OutputArchive& archive) const override;
  /// Throws `ArgumentError` where groups or parameters are others than those that were saved.
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                 std::unique_ptr<ParamGroupOptions> defaults);

 private:
  /// The work of a step for one group. False when there shall be no step; `scaling.found_inf` is
  /// dropped when it was read and is 0.
  virtual bool step_group(torch::optim::OptimizerParamGroup& group, detail::TensorBuckets& buckets,
                          detail::GradScaling& scaling) = 0;
  /// Where the step count of `parameter` belongs.
  [[nodiscard]] virtual c10::Device step_device(const torch::optim::OptimizerParamGroup& group,
                                                const at::Tensor& parameter) const = 0;

  /// Empty between steps, kept for its memory.
  std::unique_ptr<detail::TensorBuckets> buckets_;
};

/// `AdamW`, `Adam` and so on, below, by their options.
template <class Options>
class ACCELERATE_API OptimizerWith final : public FusedOptimizer {
 public:
  /// Groups without options of their own take `defaults`. Throws `ArgumentError` for options that
  /// cannot be or are of another optimizer.
  explicit OptimizerWith(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                         Options defaults = {});
  explicit OptimizerWith(std::vector<at::Tensor> params, Options defaults = {});

  [[nodiscard]] std::span<const std::string_view> state_names() const override;

  /// The options of a group, to be read and changed.
  [[nodiscard]] Options& options(std::size_t group = 0);

 private:
  bool step_group(torch::optim::OptimizerParamGroup& group, detail::TensorBuckets& buckets,
                  detail::GradScaling& scaling) override;
  [[nodiscard]] c10::Device step_device(const torch::optim::OptimizerParamGroup& group,
                                        const at::Tensor& parameter) const override;
};

using Adam = OptimizerWith<AdamOptions>;
using AdamW = OptimizerWith<AdamWOptions>;
using SGD = OptimizerWith<SGDOptions>;
using Adagrad = OptimizerWith<AdagradOptions>;
using RMSprop = OptimizerWith<RMSpropOptions>;
using NAdam = OptimizerWith<NAdamOptions>;
using RAdam = OptimizerWith<RAdamOptions>;
using Adamax = OptimizerWith<AdamaxOptions>;
using Lion = OptimizerWith<LionOptions>;
using Adafactor = OptimizerWith<AdafactorOptions>;

#define ACCELERATE_DECLARE_OPTIMIZER(Options)  \
  extern template class GroupOptions<Options>; \
  extern template class OptimizerWith<Options>;
ACCELERATE_DECLARE_OPTIMIZER(AdamOptions)
ACCELERATE_DECLARE_OPTIMIZER(AdamWOptions)
ACCELERATE_DECLARE_OPTIMIZER(SGDOptions)
ACCELERATE_DECLARE_OPTIMIZER(AdagradOptions)
ACCELERATE_DECLARE_OPTIMIZER(RMSpropOptions)
ACCELERATE_DECLARE_OPTIMIZER(NAdamOptions)
ACCELERATE_DECLARE_OPTIMIZER(RAdamOptions)
ACCELERATE_DECLARE_OPTIMIZER(AdamaxOptions)
ACCELERATE_DECLARE_OPTIMIZER(LionOptions)
ACCELERATE_DECLARE_OPTIMIZER(AdafactorOptions)
#undef ACCELERATE_DECLARE_OPTIMIZER

}  // namespace accelerate
