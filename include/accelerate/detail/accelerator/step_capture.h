// accelerate/detail/accelerator/step_capture.h - steps of `Accelerator::capture`, without the types
// of their batches.
//
// Part of accelerate/accelerator/captured_step.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <source_location>
#include <vector>

#include "accelerate/api.h"

namespace accelerate {

struct CaptureOptions;

namespace detail::accelerator {

struct AcceleratorCore;

/// What a step returns: a tree, and its tensors.
struct StepOutput {
  std::shared_ptr<void> tree = nullptr;
  std::vector<at::Tensor> tensors = {};
};

class ACCELERATE_API StepCapture {
 public:
  /// Runs the step on these tensors in place of those of its arguments.
  using Body = std::function<StepOutput(const std::vector<at::Tensor>& inputs)>;

  StepCapture(std::shared_ptr<AcceleratorCore> core, const CaptureOptions& options,
              std::source_location where);
  StepCapture(const StepCapture&) = delete;
  StepCapture& operator=(const StepCapture&) = delete;
  ~StepCapture();

  /// Runs, records or replays `body`, which is kept with a recording. Throws `UnsupportedError` for
  /// a step that cannot be recorded.
  [[nodiscard]] StepOutput run(const std::vector<at::Tensor>& inputs, const Body& body);
  [[nodiscard]] std::int64_t num_graphs() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace detail::accelerator
}  // namespace accelerate
