// src/training/gradient_hooks.h - how gradients travel: in full, or in 16 bits.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "accelerate/kwargs.h"

namespace c10d {
class ProcessGroup;
}

namespace accelerate::detail {

/// Null where nothing is to be done to them. Throws `UnsupportedError` for hooks that are not
/// there.
[[nodiscard]] std::unique_ptr<c10d::CommHookInterface> make_gradient_hook(
    const DistributedDataParallelKwargs& options, c10::intrusive_ptr<c10d::ProcessGroup> group);

}  // namespace accelerate::detail
