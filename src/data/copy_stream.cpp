#include "data/copy_stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <mutex>
#include <utility>

#include "accelerate/operations/tensors.h"

namespace accelerate::detail::data {
namespace {

c10::impl::VirtualGuardImpl driver_of(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

/// Only dense tensors can keep their memory for a stream (`record_stream`).
bool is_strided(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_nested();
}

}  // namespace

const CopyStream& CopyStream::to(at::Device device) {
  if (!device.has_index()) device = driver_of(device).getDevice();
  // Never destroyed: the driver may have gone before.
  static auto& mutex = *new std::mutex;
  static auto& streams = *new std::map<c10::DeviceIndex, CopyStream>;
  const std::lock_guard lock(mutex);
  return streams.try_emplace(device.index(), device).first->second;
}

CopyStream::CopyStream(at::Device device)
    : stream_(driver_of(device).getStreamFromGlobalPool(device)) {}

c10::StreamGuard CopyStream::enter() const {
  const auto driver = driver_of(stream_.device());
  c10::Event queued(stream_.device_type());
  queued.record(driver.getStream(stream_.device()));
  queued.block(stream_);
  return c10::StreamGuard(stream_);
}

std::vector<at::Tensor> CopyStream::copy(std::vector<at::Tensor> tensors) const {
  const c10::StreamGuard on_stream(stream_);
  for (auto& tensor : tensors) {
    if (is_strided(tensor) && tensor.is_cpu()) {
      tensor = comm::to_device(tensor, stream_.device(), /*non_blocking=*/true);
    }
  }
  return tensors;
}

c10::Event CopyStream::mark() const {
  c10::Event event(stream_.device_type());
  event.record(stream_);
  return event;
}

void CopyStream::take_over(const c10::Event& mark, const std::vector<at::Tensor>& tensors) const {
  const auto stream = driver_of(stream_.device()).getStream(stream_.device());
  mark.block(stream);
  for (const auto& tensor : tensors) {
    if (is_strided(tensor) && tensor.device() == stream_.device()) tensor.record_stream(stream);
  }
}

}  // namespace accelerate::detail::data
