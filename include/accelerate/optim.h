// accelerate/optim.h - optimizers with PyTorch's numbers, names and defaults.
//
//     accelerate::AdamW adamw(net->parameters(), {.lr = 2e-5, .weight_decay = 0.1});
//     adamw.step();
//
//     // Two groups, the second without weight decay:
//     accelerate::AdamW adamw({accelerate::param_group(weights, AdamWOptions{.lr = 2e-5}),
//                              accelerate::param_group(biases, AdamWOptions{.weight_decay = 0})});
//
// They derive from `torch::optim::Optimizer`, so schedulers, `prepare` and your own code accept
// them like LibTorch's. A step runs a few kernels over all parameters instead of several per
// parameter.
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
#include "accelerate/optim/options.h"
#include "accelerate/value.h"

namespace accelerate {

namespace detail::optim {
class TensorBuckets;
struct GradScaling;
struct GroupSchedule;

/// A learning rate; `tensor` holds it as a float32 on the device if kernels must read it there.
struct LearningRate {
  double value = 0;
  at::Tensor tensor;
};
}  // namespace detail::optim

/// Base of the options of all our parameter groups.
class ACCELERATE_API ParamGroupOptions : public torch::optim::OptimizerOptions {
 public:
  ParamGroupOptions();
  /// The copy has no schedule: it belongs to another group.
  ParamGroupOptions(const ParamGroupOptions& other);
  ParamGroupOptions& operator=(const ParamGroupOptions&) = delete;
  ~ParamGroupOptions() override;

  /// The options under Python's names, in its order.
  [[nodiscard]] virtual Value::Dict to_dict() const = 0;
  /// Changes the options that `values` names and keeps the others. Throws `ArgumentError` for an
  /// unknown name or an invalid value; nothing has changed then.
  virtual void update(const Value::Dict& values) = 0;

  /// For this library: the first option but `lr` that is not as in `other`, for example
  /// "betas of AdamW"; empty if all are.
  [[nodiscard]] virtual std::string changed_option(const ParamGroupOptions& other) const = 0;

  /// `momentum`, or the first of `betas`: what cyclic schedules change with the learning rate.
  [[nodiscard]] virtual std::optional<double> momentum() const = 0;
  /// Throws `ArgumentError` if `momentum()` is nullopt.
  virtual void set_momentum(double momentum) = 0;

  /// The learning rate for parameters on `device`.
  [[nodiscard]] virtual detail::optim::LearningRate learning_rate(c10::Device device) = 0;

  /// For this library: what schedulers keep with the group; null before the first scheduler.
  [[nodiscard]] std::shared_ptr<detail::optim::GroupSchedule>& _schedule() { return schedule_; }

 private:
  std::shared_ptr<detail::optim::GroupSchedule> schedule_;
};

/// The options of one parameter group. `values` may be changed between steps; a CUDA graph of the
/// program's own sees changes made by `set_lr` only.
template <class Options>
class ACCELERATE_API GroupOptions final : public ParamGroupOptions {
 public:
  /// Throws `ArgumentError` for invalid options.
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
  [[nodiscard]] std::string changed_option(const ParamGroupOptions& other) const override;
  [[nodiscard]] std::optional<double> momentum() const override;
  void set_momentum(double momentum) override;
  [[nodiscard]] detail::optim::LearningRate learning_rate(c10::Device device) override;

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

/// The state of one parameter: tensors by name, in PyTorch's order.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Base of all our optimizers. Not thread-safe.
class ACCELERATE_API FusedOptimizer : public torch::optim::Optimizer {
 public:
  FusedOptimizer(FusedOptimizer&&) noexcept;
  FusedOptimizer& operator=(FusedOptimizer&&) noexcept;
  ~FusedOptimizer() override;

  /// One step for all parameters that have a gradient. `closure`, if given, is called first to
  /// compute the gradients; its loss is returned. Throws `ArgumentError` for sparse or complex
  /// gradients.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// One step with gradients that are `grad_scale` times too large (they are divided in place);
  /// no step if `found_inf` is 1. Both are one float32; undefined means 1 and 0. The kernels of
  /// AdamW, Adam, SGD and Adagrad read both; the others read `found_inf` on the host, which waits
  /// for a GPU.
  void step_scaled(const at::Tensor& grad_scale, const at::Tensor& found_inf);

  /// The names of all tensors that the state of a parameter can have.
  [[nodiscard]] virtual std::span<const std::string_view> state_names() const = 0;
  /// The state of a parameter; empty before its first step.
  [[nodiscard]] NamedTensors state_of(const at::Tensor& parameter) const;
  /// Replaces the state of a parameter by copies of `tensors`, on the devices that steps need.
  /// Throws `ArgumentError` for a parameter that is in no group, an unknown name or a wrong shape.
  void set_state_of(const at::Tensor& parameter, const NamedTensors& tensors);

  void save(torch::serialize::OutputArchive& archive) const override;
  /// Throws `ArgumentError` if the groups or parameters differ from those that were saved.
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                 std::unique_ptr<ParamGroupOptions> defaults);

 private:
  /// Steps one group. Returns false if the step is skipped; resets `scaling.found_inf` after
  /// reading 0 from it.
  virtual bool step_group(torch::optim::OptimizerParamGroup& group,
                          detail::optim::TensorBuckets& buckets,
                          detail::optim::GradScaling& scaling) = 0;
  /// The device of the step count of `parameter`.
  [[nodiscard]] virtual c10::Device step_device(const torch::optim::OptimizerParamGroup& group,
                                                const at::Tensor& parameter) const = 0;

  /// Empty between steps; kept to reuse its memory.
  std::unique_ptr<detail::optim::TensorBuckets> buckets_;
};

/// The optimizer of the given options; `AdamW`, `Adam` and so on below are its names.
template <class Options>
class ACCELERATE_API OptimizerWith final : public FusedOptimizer {
 public:
  /// Groups without options of their own use `defaults`. Throws `ArgumentError` for invalid options
  /// and for those of another optimizer.
  explicit OptimizerWith(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                         Options defaults = {});
  explicit OptimizerWith(std::vector<at::Tensor> params, Options defaults = {});

  [[nodiscard]] std::span<const std::string_view> state_names() const override;

  /// The options of a group, to read and to change.
  [[nodiscard]] Options& options(std::size_t group = 0);

 private:
  bool step_group(torch::optim::OptimizerParamGroup& group, detail::optim::TensorBuckets& buckets,
                  detail::optim::GradScaling& scaling) override;
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
