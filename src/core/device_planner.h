// src/core/device_planner.h - from the sizes of a model's parts to a device map.
//
// The rules are those of Python's planner, to the last module: docs/big_models.md describes them.
// A model is an outline here: names and sizes, in integers of bits, so that sums are exact.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/modeling/device_map.h"

namespace accelerate::detail::inline core {

enum class PartKind : std::uint8_t { kModule, kParameter, kBuffer };

/// A module or a tensor.
struct ModelPart {
  /// Dotted, from the root, whose name is "".
  std::string name;
  PartKind kind = PartKind::kModule;
  /// A module that is placed as a whole.
  bool no_split = false;
  /// A tensor that was met before under another name. It has no bits.
  bool alias = false;
  std::int64_t bits = 0;         ///< of a module with all inside
  std::int64_t buffer_bits = 0;  ///< the part of `bits` that is in buffers
  /// The parts below this one are those up to here. Own parameters and buffers come first.
  std::size_t end = 0;
};

struct ModelOutline {
  /// The root, then all below it, depth first.
  std::vector<ModelPart> parts;
  /// Parameters that are the same tensor, in the order of names.
  std::vector<std::vector<std::size_t>> ties = {};

  [[nodiscard]] bool is_inside(std::size_t part, std::size_t module) const {
    return module <= part && part < parts[module].end;
  }
  [[nodiscard]] bool has_children(std::size_t part) const;
  /// Direct parts of one of these kinds, in order.
  [[nodiscard]] std::vector<std::size_t> inside(std::size_t module,
                                                std::initializer_list<PartKind> kinds) const;
  /// The direct parts of the root as they are placed: parameters, modules, then buffers.
  [[nodiscard]] std::vector<std::size_t> top_parts() const;
};

/// GPUs by number, then "mps", "cpu" and "disk". Throws `ArgumentError` for other names.
[[nodiscard]] MaxMemory in_planning_order(const MaxMemory& max_memory);

struct BalanceRules {
  bool low_zero = false;
  /// The budgets were measured, not chosen: leave a tenth of an only GPU free.
  bool leave_reserve = false;
  /// The largest of the classes that are not split.
  std::int64_t block_bits = 0;
};
/// Budgets that give each GPU about the same share of the model. `budgets` are in planning order.
[[nodiscard]] MaxMemory balanced_memory(const ModelOutline& outline, const MaxMemory& budgets,
                                        const BalanceRules& rules);

struct PlanRules {
  bool offload_buffers = false;
  bool fallback_allocation = false;
  /// Write each step to the log.
  bool verbose = false;
};
struct DevicePlan {
  /// One entry per part that was placed as a whole.
  DeviceMap map = {};
  /// Bytes of buffers whose modules are offloaded, if no GPU has room for them.
  std::optional<double> homeless_buffer_bytes = std::nullopt;
  /// Places on which nothing could be put, and the bytes that would have been enough.
  std::vector<std::pair<MapDevice, double>> required_bytes = {};
};
/// `budgets` are in planning order. All parts that do not fit elsewhere are on "disk".
[[nodiscard]] DevicePlan plan_device_map(const ModelOutline& outline, const MaxMemory& budgets,
                                         const PlanRules& rules);

}  // namespace accelerate::detail::inline core
