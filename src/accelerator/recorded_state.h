// src/accelerator/recorded_state.h - what a recorded step takes as given: memory and options.
//
// A graph of a device has the addresses of parameters, gradients and optimizer states in it, and
// all options of the optimizers but the learning rate.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelerator/registry.h"

namespace accelerate::detail::accelerator {

class RecordedState {
 public:
  /// Before the recording. `steps`: optimizers step in it. Keeps the optimizers.
  RecordedState(const ObjectRegistry& registry, bool steps);
  /// After the recording.
  void close();

  struct Change {
    /// "betas of AdamW"; empty if memory has changed.
    std::string option;
    /// "a parameter", for example; empty if an option has changed.
    std::string memory;
  };
  /// What has changed since the recording; nullopt if a replay computes the right numbers. Writes
  /// learning rates to the device that were changed without `set_lr`.
  [[nodiscard]] std::optional<Change> change() const;

 private:
  /// A parameter or buffer.
  struct Place {
    at::Tensor tensor;
    const void* address = nullptr;
    const void* gradient = nullptr;
    /// The recording uses the gradient that was there before.
    bool needs_gradient = true;
    /// Until `close`.
    at::Tensor gradient_before = {};
    std::int64_t version_before = 0;
  };
  struct Group {
    optim::OptimizerCore* optimizer;
    std::size_t index;
    std::unique_ptr<torch::optim::OptimizerOptions> options;
    const void* learning_rate;
  };

  void add(const at::Tensor& tensor);
  [[nodiscard]] static std::string changed_option(const Group& group);

  bool steps_;
  std::vector<std::shared_ptr<optim::OptimizerCore>> optimizers_;
  std::vector<Place> places_ = {};
  std::vector<Group> groups_ = {};
  /// Of optimizers, in the order of `for_each_slot`.
  std::vector<const void*> slots_ = {};
};

}  // namespace accelerate::detail::accelerator
