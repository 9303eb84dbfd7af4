// accelerate/detail/accelerator/model_core.h - what the copies of a prepared model share.
//
// Part of accelerate/prepared_model.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/detail/modeling/module_of.h"
#include "accelerate/kwargs.h"
#include "accelerate/precision/autocast.h"
#include "accelerate/state_dict.h"

namespace accelerate::detail::optim {
struct OptimizerCore;
}  // namespace accelerate::detail::optim

namespace accelerate::detail::fp8 {
class DelayedScaling;
}  // namespace accelerate::detail::fp8

namespace accelerate::detail::parallel {
class Engine;
}  // namespace accelerate::detail::parallel

namespace accelerate::detail::state {
struct AttentionCall;
class AttentionRuleScope;
}  // namespace accelerate::detail::state

namespace accelerate {

/// What `replace_parameter` does with the optimizer's state of the parameter.
enum class ReplacedState : std::uint8_t {
  /// Drops it: the next step starts from the initial state.
  kDrop,
  /// Keeps it: the shape must be the same.
  kKeep
};

/// Returns the new state tensor for an old one, which has the old shape of the parameter. `name` is
/// Python's: "exp_avg", ... Counters are kept.
using CarryState = std::function<at::Tensor(const std::string& name, const at::Tensor& old_state)>;

struct ReplaceParameterOptions {
  std::variant<ReplacedState, CarryState> state = ReplacedState::kDrop;
};

namespace detail::accelerator {

class GradientWatch;

/// The autocast settings of a forward pass.
struct CastSettings {
  c10::DeviceType device_type = c10::DeviceType::CPU;
  at::ScalarType dtype = at::kFloat;
  AutocastKwargs kwargs = {};
};

/// What the copies of a prepared model and its accelerator share.
struct ACCELERATE_API ModelCore : std::enable_shared_from_this<ModelCore> {
  /// Of a dispatched model: its weights come and go as long as this lives. Goes after the module.
  std::shared_ptr<const void> dispatched = nullptr;
  std::shared_ptr<torch::nn::Module> module;
  c10::Device device = c10::Device(c10::kCPU);
  std::optional<CastSettings> cast = std::nullopt;
  /// Whether arguments are sent to the device, as Python's DistributedDataParallel does.
  bool moves_inputs = false;
  /// What tensors of floating point among the arguments and the results are converted to, for a
  /// model whose parameters have another type than its data.
  std::optional<at::ScalarType> input_dtype = std::nullopt;
  std::optional<at::ScalarType> output_dtype = std::nullopt;
  /// How processes train the model together. Null for a model that this process has for itself: one
  /// process, evaluation, no trainable parameter.
  std::shared_ptr<parallel::Engine> engine = nullptr;
  /// How the model computes attention in training mode; null: as usual.
  std::shared_ptr<const std::function<at::Tensor(const state::AttentionCall&)>> attention = nullptr;
  /// The scales of a model that multiplies in 8 bits by those of earlier steps, else null.
  std::shared_ptr<fp8::DelayedScaling> delayed_scaling = nullptr;
  /// Whether backward synchronizes gradients; false under `no_sync`.
  bool synchronizes = true;
  /// An error ended a backward before its gradients were synchronized.
  bool unfinished = false;
  /// The model got gradients outside of `Accelerator::backward` that are not synchronized, and no
  /// scope asked for that; see `watch`.
  std::atomic<bool> strayed = false;
  std::shared_ptr<GradientWatch> watch = nullptr;
  /// The optimizers of the accelerator, for parameters that are replaced.
  std::function<std::vector<std::shared_ptr<optim::OptimizerCore>>()> optimizers = {};

  /// Gives the model its engine, and lets every backward of the process know of it.
  void use(std::shared_ptr<parallel::Engine> new_engine);
  /// Collective if the engine shards parameters. Whole parameters and buffers.
  [[nodiscard]] StateDict state_dict() const;
  void load_state_dict(const StateDict& state, bool strict) const;
  /// Collective.
  void replace_parameter(std::string_view name, const at::Tensor& tensor,
                         const ReplaceParameterOptions& options, std::source_location where);
};

/// While it lives a model is in its forward: under autocast, and in the scope of its engine.
class ACCELERATE_API ForwardScope {
 public:
  explicit ForwardScope(const ModelCore& core);
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;
  ~ForwardScope() = default;

  /// Collective if parameters are sharded or scales are delayed. The forward has returned its
  /// results.
  void finish() const;

 private:
  parallel::Engine* engine_;
  fp8::DelayedScaling* delayed_scaling_;
  std::shared_ptr<void> in_8_bits_ = nullptr;
  std::shared_ptr<void> entered_ = nullptr;
  std::shared_ptr<state::AttentionRuleScope> attention_ = nullptr;
  std::optional<AutocastScope> autocast_ = std::nullopt;
};

using modeling::ModelHolder;
using modeling::ModuleOf;

/// Collective if parameters are sharded. The state dict of a model that is prepared (`core` is not
/// null) or not; `unwrap` takes wrappers and their prefixes off.
[[nodiscard]] ACCELERATE_API StateDict
state_dict_of(const std::shared_ptr<torch::nn::Module>& module,
              const std::shared_ptr<ModelCore>& core, bool unwrap);

/// Throws `ArgumentError`.
[[noreturn]] ACCELERATE_API void refuse_empty_holder();

}  // namespace detail::accelerator

}  // namespace accelerate
