#include "accelerate/device_lane.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <mutex>
#include <utility>

#include "accelerate/tensor_operations.h"

namespace accelerate::detail {
namespace {

c10::impl::VirtualGuardImpl driver_of(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

/// Its memory can be kept for a stream, which only ordinary tensors know how to.
bool is_strided(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_nested();
}

}  // namespace

const DeviceLane& DeviceLane::to(at::Device device) {
  if (!device.has_index()) device = driver_of(device).getDevice();
  // Never destroyed: the driver may have gone before.
  static auto& mutex = *new std::mutex;
  static auto& lanes = *new std::map<c10::DeviceIndex, DeviceLane>;
  const std::lock_guard lock(mutex);
  return lanes.try_emplace(device.index(), device).first->second;
}

DeviceLane::DeviceLane(at::Device device)
    : stream_(driver_of(device).getStreamFromGlobalPool(device)) {}

c10::StreamGuard DeviceLane::enter() const {
  const auto driver = driver_of(stream_.device());
  c10::Event queued(stream_.device_type());
  queued.record(driver.getStream(stream_.device()));
  queued.block(stream_);
  return c10::StreamGuard(stream_);
}

std::vector<at::Tensor> DeviceLane::move(std::vector<at::Tensor> tensors) const {
  const c10::StreamGuard on_lane(stream_);
  for (auto& tensor : tensors) {
    if (is_strided(tensor) && tensor.is_cpu()) {
      tensor = to_device(tensor, stream_.device(), /*non_blocking=*/true);
    }
  }
  return tensors;
}

c10::Event DeviceLane::mark() const {
  c10::Event event(stream_.device_type());
  event.record(stream_);
  return event;
}

void DeviceLane::take_over(const c10::Event& mark, const std::vector<at::Tensor>& tensors) const {
  const auto stream = driver_of(stream_.device()).getStream(stream_.device());
  mark.block(stream);
  for (const auto& tensor : tensors) {
    if (is_strided(tensor) && tensor.device() == stream_.device()) tensor.record_stream(stream);
  }
}

}  // namespace accelerate::detail
