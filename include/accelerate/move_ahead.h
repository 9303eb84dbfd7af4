// accelerate/move_ahead.h - batches on their way to the device.
//
// Internal to accelerate/prepared_loader.h.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "accelerate/device_lane.h"
#include "accelerate/load_pass.h"
#include "accelerate/tensor_operations.h"
#include "accelerate/tree.h"

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

/// Starts to move a batch when the one before it is handed out, so that it travels while that one
/// is computed with. What goes wrong with it is told when its turn comes.
template <class Batch>
class AheadPass final : public Pass<Batch> {
 public:
  AheadPass(std::unique_ptr<Pass<Batch>> pass, at::Device device)
      : pass_(std::move(pass)), device_(device), lane_(DeviceLane::to(device)) {}

  std::optional<LoadedBatch<Batch>> next() override {
    auto now = ahead_ ? std::move(*ahead_) : begin_move();
    ahead_.reset();
    if (now.failure) std::rethrow_exception(std::move(now.failure));
    if (!now.loaded) return std::nullopt;
    if (!now.loaded->last) ahead_ = begin_move();

    auto& batch = now.loaded->batch;
    lane_.take_over(*now.mark, tree::leaves(batch));
    // What the lane does not take: sparse tensors, objects that move themselves.
    batch = send_to_device(std::move(batch), device_, {.non_blocking = true});
    return std::move(now.loaded);
  }

 private:
  struct Moving {
    std::optional<LoadedBatch<Batch>> loaded = std::nullopt;
    std::optional<c10::Event> mark = std::nullopt;
    std::exception_ptr failure = nullptr;
  };

  Moving begin_move() {
    Moving moving;
    try {
      moving.loaded = pass_->next();
      if (!moving.loaded) return moving;
      auto& batch = moving.loaded->batch;
      auto tensors = lane_.move(tree::leaves(batch));
      batch = tree::unflatten(std::move(batch), tensors);
      moving.mark = lane_.mark();
    } catch (...) {
      moving.failure = std::current_exception();
    }
    return moving;
  }

  std::unique_ptr<Pass<Batch>> pass_;
  at::Device device_;
  const DeviceLane& lane_;
  std::optional<Moving> ahead_ = std::nullopt;
};

/// The pass with its batches on `device`. What is no tensor stays as it is.
template <class Batch>
std::unique_ptr<Pass<Batch>> move_ahead(std::unique_ptr<Pass<Batch>> pass,
                                        [[maybe_unused]] at::Device device,
                                        [[maybe_unused]] bool non_blocking) {
  if constexpr (TensorTree<Batch>) {
    if (DeviceLane::leads_to(device)) {
      return std::make_unique<AheadPass<Batch>>(std::move(pass), device);
    }
  }
  if constexpr (Sendable<Batch>) {
    return std::make_unique<MovingPass<Batch>>(std::move(pass), device, non_blocking);
  } else {
    return pass;
  }
}

}  // namespace accelerate::detail
