// src/modeling/checkpoint_marks.h - modules that are marked for activation checkpointing.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "accelerate/api.h"

namespace accelerate::detail::modeling {

/// Modules that were marked together.
struct CheckpointMarks {
  std::vector<std::weak_ptr<torch::nn::Module>> modules = {};
  /// The first of them, for messages: "'blocks.0' of class Block".
  std::string shown = {};
};

/// Marks the modules below `model` with these dotted names; there must be one. Throws
/// `ArgumentError` for a name that leads nowhere.
ACCELERATE_API void mark_for_checkpoints(torch::nn::Module& model,
                                         const std::vector<std::string>& names);

/// The marks of modules that `should_checkpoint` was not called for yet, and that
/// `forget_unasked_marks` was not either. A few nanoseconds if there are none.
[[nodiscard]] ACCELERATE_API std::vector<std::shared_ptr<CheckpointMarks>> unasked_marks();
ACCELERATE_API void forget_unasked_marks(const CheckpointMarks& marks);

}  // namespace accelerate::detail::modeling
