// cuda/nccl_group.h - the NCCL process group; the only file that sees ProcessGroupNCCL is
// nccl_group.cpp.
#pragma once

#include <memory>

#include "comm/guard.h"
#include "state/process_group.h"

namespace accelerate::detail::cuda {

[[nodiscard]] c10::intrusive_ptr<c10d::Backend> make_nccl_group(
    const c10::intrusive_ptr<c10d::Store>& store, const state::ProcessGroupOptions& options,
    std::shared_ptr<comm::DeviceCallGuard> guard);

}  // namespace accelerate::detail::cuda
