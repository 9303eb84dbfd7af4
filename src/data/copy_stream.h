// src/data/copy_stream.h - copies to a device beside the work that is queued there.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <vector>

namespace accelerate::detail::data {

/// A stream for copies from the host, so that they run while the device computes.
///
/// There is one per device: the allocator reuses memory within one stream only, so that a stream
/// for each pass would keep the memory of all passes before.
class CopyStream {
 public:
  /// The stream that copies to `device`. Lives as long as the process.
  [[nodiscard]] static const CopyStream& to(at::Device device);

  /// Whether `device` computes beside the host.
  [[nodiscard]] static bool leads_to(at::Device device) { return device.is_cuda(); }

  explicit CopyStream(at::Device device);

  /// While the guard lives, what this thread queues for the device goes to this stream, behind what
  /// it has queued on its own.
  [[nodiscard]] c10::StreamGuard enter() const;

  /// Starts to copy dense tensors that are in host memory. Others are returned as they are.
  [[nodiscard]] std::vector<at::Tensor> copy(std::vector<at::Tensor> tensors) const;

  /// The point behind all that is queued on this stream now.
  [[nodiscard]] c10::Event mark() const;

  /// What this thread queues on its own stream from now on waits for `mark`. The memory of
  /// `tensors`, which were copied on this stream, is not reused before that work is done.
  void take_over(const c10::Event& mark, const std::vector<at::Tensor>& tensors) const;

 private:
  c10::Stream stream_;
};

}  // namespace accelerate::detail::data
