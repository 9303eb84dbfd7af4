// src/parallel/engine.h - how the processes of a run train one model together.
//
// `prepare` gives a model an engine: data parallelism (data_parallel.h) is the first one; sharding,
// offload and pipelines will be others. Backward, clipping, optimizers, state dictionaries and
// `join_uneven_inputs` know this interface alone. A model that one process trains by itself has no
// engine: `ModelCore::engine` is null.
//
// The calls of a step, in order:
//
//     enter_forward, after_forward      for each call of the prepared model
//     reached_by                        for each `Accelerator::backward`; if it returns true:
//     before_backward, after_backward
//     found_inf_over_processes          in float16, when the gradients of an optimizer are unscaled
//     shards_of, norm_over_processes    for each `clip_grad_norm_`
//     before_step                       for each step of a prepared optimizer
//     after_step                        for each step of a prepared optimizer that was carried out
//     after_zero_grad                   for each `zero_grad` of a prepared optimizer
//
// Functions marked "Collective" are called by all processes in the same order.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "accelerate/fwd.h"
#include "accelerate/state_dict.h"
#include "parallel/reached_leaves.h"

namespace accelerate::detail::parallel {

class Joinable;

/// A backward that is about to run.
struct BackwardPass {
  const at::Tensor& loss;
  const ReachedLeaves& leaves;
  /// False under `no_sync` and for batches that are only accumulated: the gradients of this
  /// backward stay with the process until a later one synchronizes them.
  bool synchronizes = true;
};

/// The gradients of some parameters, where each process holds a part of them.
struct GradientShards {
  /// What this process holds; may be empty.
  std::vector<at::Tensor> gradients = {};
  /// One flag per parameter that was asked for: whether its gradient is sharded.
  std::vector<bool> sharded = {};
  /// How many of `gradients`, the first ones, are parts by tensor parallelism.
  std::size_t cut = 0;
};

/// What an optimizer keeps for a parameter of its groups, by Python's names.
struct ParameterState {
  at::Tensor parameter;
  std::vector<std::pair<std::string, at::Tensor>> tensors = {};
};

class Engine {
 public:
  virtual ~Engine() = default;

  // ---- forward

  /// Called before each forward of the prepared model. The guard that it returns is destroyed when
  /// the forward has ended, by an exception or not; its destructor must not communicate: what it
  /// would have sent goes out before the next collective (state/pending_messages.h). Null if there
  /// is nothing to do.
  [[nodiscard]] virtual std::shared_ptr<void> enter_forward() { return nullptr; }
  /// Collective if parameters are sharded. Called when `model(...)` has computed its results,
  /// before the guard is destroyed; not after an exception, and not for `model->member()`.
  virtual void after_forward() {}

  // ---- backward

  /// Returns true if a backward that comes to `leaves` gives the model gradients.
  [[nodiscard]] virtual bool reached_by(const ReachedLeaves& leaves) const = 0;
  /// Returns true if all backward passes train the same parameters. Then a loss whose graph hides
  /// its parameters, because it is computed again in backward, counts as one that reaches the model
  /// if no other model is prepared.
  [[nodiscard]] virtual bool is_static() const { return false; }
  /// Returns true if the engine is told of backward passes that do not synchronize.
  [[nodiscard]] virtual bool wants_local_backward() const { return false; }

  /// Prepares for a backward. May throw `ArgumentError` for a loss that cannot be synchronized;
  /// then the backward does not run.
  virtual void before_backward(const BackwardPass& pass) = 0;
  /// Collective if the pass synchronizes. Completes gradients and buffers. Not called after an
  /// exception: the model then counts as unfinished and refuses the next backward.
  virtual void after_backward() = 0;

  // ---- optimizer

  /// Called for each prepared optimizer, and again when it has got a group of parameters. May
  /// replace parameters of the model in its groups, and what its state is stored under, by the
  /// tensors that this process updates.
  virtual void attach(torch::optim::Optimizer& optimizer) { static_cast<void>(optimizer); }
  /// Returns true if `parameter`, of an optimizer, is one that the engine trains: all processes
  /// step it with the same gradient, or it is what `attach` gave this process.
  [[nodiscard]] virtual bool holds(const at::Tensor& parameter) const {
    static_cast<void>(parameter);
    return true;
  }
  /// Returns true if `attach` gave each process parts of the parameters, so that it keeps a part of
  /// the optimizer states only.
  [[nodiscard]] virtual bool divides_states() const { return false; }
  /// Collective if it replaced parameters. The state of parameters of an optimizer is that of the
  /// tensors which `attach` gave this process; it becomes that of whole parameters on the first
  /// process of each host, in host memory, and nothing on the others.
  virtual void gather_states(std::span<ParameterState> states) { static_cast<void>(states); }
  /// The reverse of `gather_states`, without communication: all processes have the whole state.
  virtual void cut_state(ParameterState& state) { static_cast<void>(state); }
  /// The gradients of the optimizer were dropped: so are those that backward passes without
  /// synchronization have left elsewhere.
  virtual void after_zero_grad(const torch::optim::Optimizer& optimizer) {
    static_cast<void>(optimizer);
  }
  /// Some optimizer is about to step, outside of `no_sync`.
  virtual void before_step() {}
  /// The optimizer has changed the parameters.
  virtual void after_step(torch::optim::Optimizer& optimizer) { static_cast<void>(optimizer); }

  /// Collective. Returns whether any process has found an infinite or NaN gradient, given the flag
  /// of this process: float32, without dimensions, 0 for none. All processes must skip the step or
  /// none. Only called for an optimizer with gradients: a process whose shard is empty has a
  /// gradient without elements.
  [[nodiscard]] virtual at::Tensor found_inf_over_processes(const at::Tensor& found_inf) {
    return found_inf;  // averaged gradients are the same on all processes
  }

  // ---- clipping

  /// Returns the gradients of those of `parameters` that the engine shards; nullopt if each process
  /// holds whole gradients.
  [[nodiscard]] virtual std::optional<GradientShards> shards_of(
      std::span<const at::Tensor> parameters) {
    static_cast<void>(parameters);
    return std::nullopt;
  }
  /// Collective. Returns the norm over all processes of what `shards_of` has given. Only called if
  /// a gradient is sharded.
  [[nodiscard]] virtual at::Tensor norm_over_processes(const GradientShards& shards,
                                                       double norm_type) {
    static_cast<void>(shards);
    static_cast<void>(norm_type);
    return {};
  }

  // ---- state

  /// The gradient of a parameter of the module that backward passes without synchronization have
  /// left on this process, by whole elements; undefined if there is none.
  [[nodiscard]] virtual at::Tensor accumulated_gradient(const at::Tensor& parameter) {
    return parameter.grad();
  }
  virtual void set_accumulated_gradient(const at::Tensor& parameter, const at::Tensor& gradient) {
    parameter.mutable_grad() = gradient;
  }
  /// How many processes hold a part each of the parameter: the gradient above is then that of the
  /// whole parameter, with zeros for the parts of others.
  [[nodiscard]] virtual std::int64_t parts_of(const at::Tensor& parameter) const {
    static_cast<void>(parameter);
    return 1;
  }
  /// Returns true if the module of a process holds parts of parameters only.
  [[nodiscard]] virtual bool is_sharded() const { return false; }
  /// Collective. Returns the whole parameters and buffers of `module`, the module of the engine.
  /// An engine may return an empty dictionary on all processes but the first.
  [[nodiscard]] virtual StateDict state_dict(const torch::nn::Module& module) {
    return accelerate::state_dict(module);
  }
  /// What Python's wrapper for this engine puts before the names of its state dict.
  [[nodiscard]] virtual std::string_view wrapper_prefix() const { return {}; }
  /// Collective. Copies whole parameters and buffers into the module. Throws as
  /// `accelerate::load_state_dict`.
  virtual void load_state_dict(torch::nn::Module& module, const StateDict& state, bool strict) {
    accelerate::load_state_dict(module, state, strict);
  }
  /// Returns true if parameters may be given other data, also of another shape
  /// (`replace_parameter`).
  [[nodiscard]] virtual bool can_rebuild() const { return false; }
  /// Collective. Begins anew after parameters were given other data.
  virtual void rebuild() {}

  /// What `join_uneven_inputs` needs; null if processes without data cannot take part.
  [[nodiscard]] virtual Joinable* joinable() { return nullptr; }
};

/// An announced backward of the processes that still have data.
struct JoinedBackward {
  /// The lowest rank with data: its buffers are valid.
  int source = 0;
  /// Several models take part. A process without data has no backward that decides how their
  /// messages interleave, so each model must send its own after backward, not during it.
  bool several_models = false;
};

/// An engine whose processes may run out of data before others do; see `JoinScope`.
class Joinable {
 public:
  virtual ~Joinable() = default;

  [[nodiscard]] virtual const c10::intrusive_ptr<c10d::ProcessGroup>& group() const = 0;
  /// Returns a number for processes without data, 0 or more: what a backward to `leaves` uses.
  [[nodiscard]] virtual std::int64_t announcement(const ReachedLeaves& leaves) const = 0;
  /// Called on all processes before an announced backward.
  virtual void begin_joined(const JoinedBackward& backward) = 0;
  /// Collective. Takes part in the announced backward of other processes, with zeros.
  virtual void shadow(std::int64_t announcement) = 0;
  /// Collective. Gives all processes the parameters and buffers of rank `source`.
  virtual void broadcast_from(int source) = 0;
  /// The scope has ended, also by an error. Must not communicate.
  virtual void end_joined() noexcept = 0;
};

}  // namespace accelerate::detail::parallel
