// src/parallel/gradient_hooks.h - how gradients travel: in full, in 16 bits, or compressed.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "accelerate/kwargs.h"

namespace c10d {
class ProcessGroup;
}

namespace accelerate::detail::parallel {

using GradientHook = std::shared_ptr<c10d::CommHookInterface>;

/// Returns null if gradients are sent as they are. Throws `ConfigError` for options of a hook that
/// cannot be used.
[[nodiscard]] GradientHook make_gradient_hook(const DistributedDataParallelKwargs& options,
                                              c10::intrusive_ptr<c10d::ProcessGroup> group);

/// A Reducer owns its hook. This one shares `hook`, so that its memory outlives the Reducer.
[[nodiscard]] std::unique_ptr<c10d::CommHookInterface> shared_hook(GradientHook hook);

/// Collective. The mean of each gradient over all processes, in place, outside of a Reducer: one
/// message per dtype and device. `hook` may be null.
void average_gradients(const std::vector<at::Tensor>& gradients, const GradientHook& hook,
                       const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace accelerate::detail::parallel
