// accelerate/nn/activation_checkpoint.h - less memory for more time: activations that backward
// computes again.
//
//     x = accelerate::activation_checkpoint(block, x);        // instead of block(x)
//     x = accelerate::maybe_activation_checkpoint(block, x);  // if the block is marked
//
// Part of accelerate/nn.h.
#pragma once

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <concepts>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/detail/modeling/checkpointed_call.h"
#include "accelerate/detail/modeling/module_of.h"

namespace accelerate {

/// How `activation_checkpoint` calls a function again.
struct ActivationCheckpointOptions {
  /// The second call draws the same random numbers: Torch's default generators of the CPU and of
  /// the devices of the inputs, `host_rng` and `numpy_rng`. False saves the time of that, for
  /// functions without random numbers.
  bool preserve_rng_state = true;
  /// The second call ends, by an exception that is no std::exception, as soon as all tensors are
  /// there. False for functions that are noexcept.
  bool early_stop = true;

  bool operator==(const ActivationCheckpointOptions&) const = default;
};

/// Returns `f(inputs...)`. What `f` saves for backward is not kept: backward calls `f` again with
/// the same inputs. Gradients have the bits of the plain call.
///
/// `f` is a function, a module holder or a shared pointer to a module. A copy of it is kept as long
/// as the graph, so it must own what it uses: capture by value, not by reference. Called again it
/// must compute the same, from its inputs and from random numbers, whose states are restored. It
/// runs under the autocast settings of the forward, on the thread that runs backward.
///
/// Inputs are copied; tensors are found in all trees (accelerate/tree.h). Parameters that `f` uses
/// get gradients whether an input requires one or not. Calls nest. If no gradients are recorded,
/// this is the plain call.
///
/// Backward throws `ArgumentError` if the second call of `f` saves other tensors than the first, or
/// if an input was changed in place, and passes on what `f` throws. Throws `UnsupportedError` in a
/// process of Python, whose autograd engine has hooks of its own.
template <class F, class... Inputs>
auto activation_checkpoint(const ActivationCheckpointOptions& options, F&& f, Inputs&&... inputs) {
  using Call = detail::modeling::CheckpointedCall<std::decay_t<F>, Inputs...>;
  detail::modeling::CheckpointScope::install();
  std::decay_t<F> function(std::forward<F>(f));
  if (!at::GradMode::is_enabled()) {
    return detail::modeling::call_block(function, std::forward<Inputs>(inputs)...);
  }
  const auto call = std::make_shared<Call>(std::move(function), inputs...);
  const detail::modeling::CheckpointScope scope(
      options, call->take_tensors(), typeid(F),
      [call](std::span<const at::Tensor> tensors) { call->repeat(tensors); });
  return detail::modeling::call_block(call->function, std::forward<Inputs>(inputs)...);
}
template <class F, class... Inputs>
  requires(!std::same_as<std::remove_cvref_t<F>, ActivationCheckpointOptions>)
auto activation_checkpoint(F&& f, Inputs&&... inputs) {
  return activation_checkpoint(ActivationCheckpointOptions{}, std::forward<F>(f),
                               std::forward<Inputs>(inputs)...);
}

/// Marks the modules below `model` for which `check_fn` returns true, and returns their names.
/// Throws `ArgumentError` if there are none. `activation_checkpointing` of
/// `FullyShardedDataParallelPlugin` marks the units of the model.
///
/// torch::nn has no hooks around a forward: a mark has an effect where the forward of the model
/// calls the module by `maybe_activation_checkpoint`, or asks `should_checkpoint`. If no marked
/// module was asked for, the first `Accelerator::backward` of the model warns.
ACCELERATE_API std::vector<std::string> apply_activation_checkpointing(
    torch::nn::Module& model, const std::function<bool(const torch::nn::Module&)>& check_fn);

/// Returns true if the module is marked.
[[nodiscard]] ACCELERATE_API bool should_checkpoint(const torch::nn::Module& module);

/// Returns `block(inputs...)`; by `activation_checkpoint` if the block is marked.
template <detail::modeling::ModelHolder Block, class... Inputs>
auto maybe_activation_checkpoint(const Block& block, Inputs&&... inputs) {
  if (should_checkpoint(*block)) {
    return activation_checkpoint(block, std::forward<Inputs>(inputs)...);
  }
  Block function(block);
  return detail::modeling::call_block(function, std::forward<Inputs>(inputs)...);
}

}  // namespace accelerate
