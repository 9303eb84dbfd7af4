// src/commands/memory_estimate.h - what `accelerate estimate-memory` computes and shows.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/value.h"
#include "commands/model_layout.h"

namespace accelerate::detail::commands {

struct ModelSizes {
  std::int64_t parameters = 0;
  /// Bytes of all parameters and buffers; floating types count as float32.
  std::int64_t total = 0;
  std::int64_t largest_layer = 0;
  /// The layers of that size, in their order.
  std::vector<std::string> largest_names = {};
};

/// A layer is a module that holds tensors itself, or one that `layout.no_split` names with all
/// inside of it. Throws `ConfigError` if a sum does not fit into 64 bits.
[[nodiscard]] ModelSizes measure(const ModelLayout& layout);

/// What training with Adam holds, in bytes. Python's numbers.
struct TrainingUsage {
  std::int64_t model = 0;
  std::int64_t gradients = 0;
  std::int64_t optimizer = 0;
  std::int64_t step = 0;

  /// Python's column: the largest of the four.
  [[nodiscard]] std::int64_t peak() const;
};
/// nullopt for a dtype that cannot be trained: all but "float32" and "float16".
[[nodiscard]] std::optional<TrainingUsage> training_usage(std::int64_t total,
                                                          const std::string& dtype);

struct EstimateOptions {
  std::string model = {};
  std::vector<std::string> dtypes = {"float32", "float16", "int8", "int4"};
  std::vector<std::int64_t> num_processes = {1, 2, 4, 8};
  std::int64_t batch_size = 1;
  /// Unset: the longest of the model, 2048 at most.
  std::optional<std::int64_t> sequence_length = std::nullopt;
};

/// Bytes that the forward pass of one process keeps for the backward pass, with attention that
/// keeps its scores and without activation checkpointing (Korthikanti et al., "Reducing Activation
/// Recomputation in Large Transformer Models", 2022, equation 2, for any width of elements).
[[nodiscard]] double activation_bytes(const TransformerShape& shape, const std::string& dtype,
                                      std::int64_t batch_size, std::int64_t sequence_length);

/// One process with ZeRO of a stage over a number of processes.
struct ShardedUsage {
  std::string dtype;
  int zero_stage = 0;
  std::int64_t num_processes = 1;
  double parameters = 0;
  double gradients = 0;
  double optimizer = 0;
  std::optional<double> activations = std::nullopt;

  [[nodiscard]] double total() const;
};

struct MemoryEstimate {
  EstimateOptions options;
  ModelSizes sizes;
  std::vector<ShardedUsage> sharded;
  std::optional<std::int64_t> sequence_length = std::nullopt;

  /// Both tables.
  [[nodiscard]] std::string text() const;
  [[nodiscard]] Value::Dict to_dict() const;
};
[[nodiscard]] MemoryEstimate estimate(const ModelLayout& layout, const EstimateOptions& options);

/// A table with lines around its cells, which are centred as Python's str.center does it.
[[nodiscard]] std::string box_table(const std::string& title,
                                    const std::vector<std::string>& headers,
                                    const std::vector<std::vector<std::string>>& rows);

}  // namespace accelerate::detail::commands
