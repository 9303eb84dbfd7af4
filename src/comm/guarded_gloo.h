// src/comm/guarded_gloo.h - Gloo with collectives that are announced to a guard.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/group_guard.h"
#include "state/process_group.h"

namespace accelerate::detail::comm {

/// Collective. Serves tensors of the CPU and, through the host's memory, of GPUs.
[[nodiscard]] c10::intrusive_ptr<c10d::Backend> make_guarded_gloo(
    const c10::intrusive_ptr<c10d::Store>& store, const state::ProcessGroupOptions& options,
    const std::shared_ptr<GroupGuard>& guard);

/// Collective. Without a guard, for messages that are part of an announced call.
[[nodiscard]] c10::intrusive_ptr<c10d::Backend> make_gloo(
    const c10::intrusive_ptr<c10d::Store>& store, const state::ProcessGroupOptions& options);

}  // namespace accelerate::detail::comm
