// src/offload/placement.h - the tensors of a model, each to its place.
#pragma once

#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "offload/lazy_params.h"
#include "offload/store.h"

namespace accelerate::detail::offload {

enum class Keep : std::uint8_t { kResident, kInHostMemory, kOnDisk };

struct Place {
  Keep keep = Keep::kResident;
  /// Where it computes.
  c10::Device device = c10::kCPU;

  bool operator==(const Place&) const = default;
};

struct PlacementOptions {
  /// Of a tensor, by its name.
  std::function<Place(const std::string& name)> place_of;
  bool offload_buffers = false;
  /// Modules of these classes are one group with all below them; else the tensors of each module.
  std::vector<std::string> preload_module_classes = {};
  /// The values of tensors that are kept in host memory, if not those of the model.
  const StateDict* values = nullptr;
  /// Of the tensors on disk.
  FileRanges ranges = {};
  bool writable = false;
  /// Resident tensors are on several devices, to which the arguments of operators must be moved.
  bool several_devices = false;
  PinnedBudget* pinned = nullptr;
};

/// A buffer that a forward in training changes: of batch and instance norms. Files that are not
/// writable cannot take that, so it stays resident instead.
[[nodiscard]] bool is_running_statistic(std::string_view buffer_name);

/// Moves resident tensors, and lets `engine` manage the others. Throws `StateError` for a tensor
/// without a value.
void place_model(torch::nn::Module& model, const PlacementOptions& options, LazyParams& engine);

}  // namespace accelerate::detail::offload
