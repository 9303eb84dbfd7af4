// src/training/group_memory.h - what schedulers note about a parameter group.
//
// Python keeps these in the group itself, where the schedulers of one optimizer share them. The
// groups of LibTorch have no room for them, so they lie here, found by the address of the group's
// options, which stays when an optimizer is moved.
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <string_view>

namespace accelerate::detail {

struct GroupMemory {
  explicit GroupMemory(const torch::optim::OptimizerOptions* options) : key(options) {}
  GroupMemory(const GroupMemory&) = delete;
  GroupMemory& operator=(const GroupMemory&) = delete;
  ~GroupMemory();

  const torch::optim::OptimizerOptions* key;
  std::optional<double> initial_lr;
  std::optional<double> max_lr;
  std::optional<double> min_lr;
  std::optional<double> max_momentum;
  std::optional<double> base_momentum;
  /// The learning rate that a scheduler set last. A group with another one may belong to a new
  /// optimizer at the old address.
  std::optional<double> lr_set;
};

/// What the schedulers of this group share; new when none of them is left, or when the learning
/// rate is not what they set.
[[nodiscard]] std::shared_ptr<GroupMemory> memory_of(
    const torch::optim::OptimizerParamGroup& group);

/// Takes `memory` along to `group`, which takes the place of the one that it was for.
[[nodiscard]] std::shared_ptr<GroupMemory> memory_moved(
    const std::shared_ptr<GroupMemory>& memory, const torch::optim::OptimizerParamGroup& group);

/// The learning rate of a group. Throws `UnsupportedError` for options that do not tell it.
[[nodiscard]] double group_lr(const torch::optim::OptimizerParamGroup& group);

}  // namespace accelerate::detail
