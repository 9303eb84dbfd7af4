// src/optim/optimizer_state.h - the state of one parameter in any optimizer, by Python's names.
//
//     for (const auto& [name, tensor] : optimizer_state_of(adamw, weight)) ...  // step, exp_avg,
//     ...
//
// For the optimizers of accelerate/optim.h and optim/torch_optimizers.h. For all others, LBFGS
// and derived classes included, each function throws `UnsupportedError` that names the class.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/optim.h"
#include "accelerate/value.h"
#include "parallel/engine.h"

namespace accelerate::detail::optim {

/// The state of a parameter in Python's order; empty if there is none. The tensors are the
/// optimizer's own, except for `step` of LibTorch's: a new float32 without dimensions on the CPU.
[[nodiscard]] ACCELERATE_API NamedTensors optimizer_state_of(torch::optim::Optimizer& optimizer,
                                                             const at::Tensor& parameter);

/// Replaces the state of a parameter by copies of `tensors` with its device and type. An empty list
/// drops the state. Throws `ArgumentError` for a parameter that is in no group, a name that is
/// unknown or missing, and a wrong shape; nothing has changed then.
ACCELERATE_API void set_optimizer_state_of(torch::optim::Optimizer& optimizer,
                                           const at::Tensor& parameter,
                                           const NamedTensors& tensors);

/// Drops the state of a parameter: it is as before the first step.
ACCELERATE_API void drop_optimizer_state_of(torch::optim::Optimizer& optimizer,
                                            const at::Tensor& parameter);

/// Moves all states to `device`, for example after the parameters were moved. Step counts stay
/// where the optimizer reads them. Does nothing while there is no state, for any optimizer.
ACCELERATE_API void move_optimizer_state(torch::optim::Optimizer& optimizer, c10::Device device);

/// Calls `f` with each tensor of the states of `optimizer`, in the order of its parameters.
/// Undefined tensors stand for those that are not used. `optimizer` must be a `FusedOptimizer`.
void for_each_state_tensor(torch::optim::Optimizer& optimizer,
                           c10::function_ref<void(const at::Tensor&)> f);

/// Shapes agree; devices and types may differ.
struct TensorCopy {
  at::Tensor to;
  at::Tensor from;
};
/// Copies all of them; large ones in memory by several threads.
void copy_all(const std::vector<TensorCopy>& copies);

/// New contents for the tensors of states, without new memory.
class StateRefill {
 public:
  /// Notes new contents for the state of a parameter. Returns false if it needs new tensors: names,
  /// types or devices differ, or the caller's own (`optimizer_state_of`) still refer to the old
  /// ones, which must keep their contents. Throws `ArgumentError` for an invalid `step`.
  [[nodiscard]] bool add(torch::optim::Optimizer& optimizer, const at::Tensor& parameter,
                         const NamedTensors& tensors);
  /// Writes what was noted; until then nothing has changed.
  void run() const;

 private:
  struct Step {
    std::int64_t* to;
    std::int64_t value;
  };
  std::vector<TensorCopy> copies_;
  std::vector<Step> steps_;
};

/// What engines make of the states of parameters in groups, before they are saved or loaded.
using StatesFilter = std::function<void(std::span<parallel::ParameterState>)>;

/// The state and options of a whole optimizer, see `AcceleratedOptimizer::state_dict`.
[[nodiscard]] Value optimizer_state_dict(torch::optim::Optimizer& optimizer,
                                         const StatesFilter& gather = {});
void load_optimizer_state_dict(torch::optim::Optimizer& optimizer, const Value& state,
                               const StatesFilter& cut = {});

/// The group that holds `parameter`. Throws `ArgumentError` if there is none.
[[nodiscard]] const torch::optim::OptimizerParamGroup& group_of(
    const torch::optim::Optimizer& optimizer, const at::Tensor& parameter);
/// Throws `ArgumentError` for a tensor whose name is not in `known`.
void require_known_names(const NamedTensors& tensors, std::span<const std::string_view> known);
/// Throws `ArgumentError` for a state tensor that is undefined or of another shape than the state
/// of `parameter` has.
void require_shape(std::string_view name, const at::Tensor& tensor, const at::Tensor& parameter);

}  // namespace accelerate::detail::optim
