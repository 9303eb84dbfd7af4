// accelerate/kwargs/parallelism_handlers.h - details of tensor, context and sequence parallelism.
//
// Part of accelerate/kwargs.h and accelerate/parallelism_config.h. Variables begin with
// PARALLELISM_CONFIG_.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "accelerate/kwargs/options.h"

// Templates of the library take these structs: with GCC that needs visible arguments.
#pragma GCC visibility push(default)

namespace accelerate {

class DeviceMesh;

/// Deprecated: use `ParallelismConfig{.tp_size = ...}`, which this becomes.
struct TorchTensorParallelPlugin {
  static constexpr std::string_view kOptionsName = "TorchTensorParallelPlugin";

  std::int64_t tp_size = 1;
  std::shared_ptr<DeviceMesh> torch_device_mesh = nullptr;  ///< Refused: sizes make the mesh.

  bool operator==(const TorchTensorParallelPlugin&) const = default;
};

struct TorchTensorParallelConfig {
  static constexpr std::string_view kOptionsName = "TorchTensorParallelConfig";

  /// Accepted for Python's sake; has no effect, which is said once.
  bool enable_async_tp = false;

  bool operator==(const TorchTensorParallelConfig&) const = default;
};

struct TorchContextParallelConfig {
  static constexpr std::string_view kOptionsName = "TorchContextParallelConfig";

  /// CP_COMM_STRATEGY, allgather. allgather or alltoall: how keys and values travel.
  std::optional<std::string> cp_comm_strategy = std::nullopt;

  bool operator==(const TorchContextParallelConfig&) const = default;
};

struct DeepSpeedSequenceParallelConfig {
  static constexpr std::string_view kOptionsName = "DeepSpeedSequenceParallelConfig";

  /// SP_SEQ_LENGTH; needed when the length is not variable.
  std::optional<std::int64_t> sp_seq_length = std::nullopt;
  /// SP_SEQ_LENGTH_IS_VARIABLE, true.
  std::optional<bool> sp_seq_length_is_variable = std::nullopt;
  /// SP_ATTN_IMPLEMENTATION, unset. flash_attention_2, flash_attention_3, sdpa, or the name of a
  /// hub kernel (with '/' and flash-attn in it).
  std::optional<std::string> sp_attn_implementation = std::nullopt;

  bool operator==(const DeepSpeedSequenceParallelConfig&) const = default;
};

}  // namespace accelerate

#pragma GCC visibility pop
