#include "nccl_group.h"

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace accelerate::detail {

c10::intrusive_ptr<c10d::Backend> make_nccl_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                  const GroupOptions& options) {
  auto nccl = c10d::ProcessGroupNCCL::Options::create();
  nccl->timeout = options.timeout;
  auto backend =
      c10::make_intrusive<c10d::ProcessGroupNCCL>(store, options.rank, options.world_size, nccl);
  // Bound to its device, so that barriers need not guess which GPU is meant.
  backend->setBoundDeviceId(options.device);
  return backend;
}

}  // namespace accelerate::detail
