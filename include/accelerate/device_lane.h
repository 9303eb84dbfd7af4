// accelerate/device_lane.h - copies to a device beside the work that is queued there.
//
// Internal to accelerate/prepared_loader.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <vector>

#include "accelerate/api.h"

namespace accelerate::detail {

/// A stream of its own for what comes from the host, so that it moves while the device computes.
///
/// There is one per device: memory of one stream serves no other, so that a lane for each pass
/// would keep the memory of all the passes before.
class ACCELERATE_API DeviceLane {
 public:
  /// The one that leads to `device`. Lives as long as the process.
  [[nodiscard]] static const DeviceLane& to(at::Device device);

  /// Whether `device` computes beside the host.
  [[nodiscard]] static bool leads_to(at::Device device) { return device.is_cuda(); }

  explicit DeviceLane(at::Device device);

  /// To the end of the guard this thread queues on the lane what it queues for the device, after
  /// what it has queued on its own stream.
  [[nodiscard]] c10::StreamGuard enter() const;

  /// Starts to move what is in host memory. The rest is returned as it is.
  [[nodiscard]] std::vector<at::Tensor> move(std::vector<at::Tensor> tensors) const;

  /// The point behind all that is queued on the lane now.
  [[nodiscard]] c10::Event mark() const;

  /// What this thread queues on its own stream from now on comes behind `mark`. The memory of
  /// `tensors`, which came on the lane, is not used again before that work is done.
  void take_over(const c10::Event& mark, const std::vector<at::Tensor>& tensors) const;

 private:
  c10::Stream stream_;
};

}  // namespace accelerate::detail
