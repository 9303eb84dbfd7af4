// accelerate/move_ahead.h - batches on their way to the device.
//
// Internal to accelerate/prepared_loader.h.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <optional>
#include <utility>

#include "accelerate/load_pipeline.h"
#include "accelerate/tensor_operations.h"

namespace accelerate::detail {

/// Moves each batch when it is asked for.
template <class Batch>
class MovingPass final : public Pass<Batch> {
 public:
  MovingPass(std::unique_ptr<Pass<Batch>> pass, at::Device device, bool non_blocking)
      : pass_(std::move(pass)), device_(device), options_{.non_blocking = non_blocking} {}

  std::optional<LoadedBatch<Batch>> next() override {
    auto loaded = pass_->next();
    if (loaded) loaded->batch = send_to_device(std::move(loaded->batch), device_, options_);
    return loaded;
  }

 private:
  std::unique_ptr<Pass<Batch>> pass_;
  at::Device device_;
  SendOptions options_;
};

/// The pass with its batches on `device`. What is no tensor stays as it is.
template <class Batch>
std::unique_ptr<Pass<Batch>> move_ahead(std::unique_ptr<Pass<Batch>> pass,
                                        [[maybe_unused]] at::Device device,
                                        [[maybe_unused]] bool non_blocking) {
  if constexpr (Sendable<Batch>) {
    return std::make_unique<MovingPass<Batch>>(std::move(pass), device, non_blocking);
  } else {
    return pass;
  }
}

}  // namespace accelerate::detail
