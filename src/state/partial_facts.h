// src/state/partial_facts.h - the data behind the handles of accelerate/state/partial_state.h.
//
// Internal. One slot holds the facts of this process, another the group that it belongs to: the
// group outlives `_reset_state()`, and the next state adopts it.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/enums.h"
#include "accelerate/state/partial_state_options.h"
#include "core/processes.h"
#include "core/world.h"

namespace accelerate::detail::state {

/// Fixed when the state is made, except for the atomic members.
struct PartialFacts {
  bool cpu = false;
  std::optional<std::string> backend = std::nullopt;
  c10::Device device = c10::Device(c10::kCPU);
  /// `base_type` by device, and `type` as `AcceleratorState` refines it (kMultiGpu becomes kFsdp).
  DistributedType base_type = DistributedType::kNo;
  std::atomic<DistributedType> type = DistributedType::kNo;
  int num_processes = 1;
  int process_index = 0;
  int local_process_index = 0;
  std::optional<int> local_num_processes = 1;
  std::optional<int> num_machines = 1;
  std::string host_name = {};
  std::chrono::milliseconds timeout = {};
  std::atomic<bool> debug = false;
  std::atomic<bool> fork_launched = false;
  /// Counts the `*_process_first` calls, which all processes make in the same order.
  std::atomic<std::int64_t> sections = 0;

  [[nodiscard]] bool use_distributed() const noexcept {
    return type != DistributedType::kNo && num_processes > 1;
  }
  [[nodiscard]] bool is_last_process() const noexcept { return process_index == num_processes - 1; }
  [[nodiscard]] bool is_main_process() const noexcept {
    return type == DistributedType::kMegatronLm ? is_last_process() : process_index == 0;
  }
  [[nodiscard]] bool is_local_main_process() const noexcept {
    return type == DistributedType::kMegatronLm ? is_last_process() : local_process_index == 0;
  }
};

/// The group of all processes, and the settings it was made with.
struct DefaultGroup {
  c10::intrusive_ptr<c10d::ProcessGroup> group = {};
  c10::intrusive_ptr<c10d::Store> store = {};
  /// The group belongs to the host program and is never shut down by the library.
  bool lent = false;
  World world = {};
  std::string backend = {};
  std::chrono::milliseconds timeout = {};
  /// The meeting point that was asked for; the store is compared only.
  std::string init_method = {};
  const c10d::Store* told_store = nullptr;
  /// The process that made or took the group; a forked copy of it must not use the group.
  OwnerProcess owner = {};
};

/// The group of this process; `group` is null when there is none. Under the lock of the slot only.
[[nodiscard]] DefaultGroup& default_group();

/// New facts, and warnings to log once they are in place.
struct Startup {
  std::unique_ptr<PartialFacts> facts;
  std::vector<std::string> warnings;
};

/// Collective when there are several processes. Finds the others and chooses a device; fills
/// `default_group()`. Leaves that untouched when it throws.
[[nodiscard]] Startup start_up(const PartialStateOptions& options);

/// Throws `ConfigError` that names the first of `options` that the current state was not made with.
/// There must be one. Store, timeout, backend and init_method count only if it has a group, the
/// latter two only if that is not lent.
void check_as_made(const PartialStateOptions& options);

/// The current facts, or null.
[[nodiscard]] PartialFacts* current_facts() noexcept;

/// The default device of a single process.
[[nodiscard]] c10::Device choose_default_device();

/// Ends a group: NCCL aborts its communicators, Gloo closes its connections with the last
/// reference.
void shut_down(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

/// Whether there is an accelerator state, and its precision.
[[nodiscard]] bool accelerator_state_exists() noexcept;
[[nodiscard]] std::optional<PrecisionType> accelerator_precision();

/// ACCELERATE_MIXED_PRECISION in any case, else `kNo`. Throws `ConfigError`.
[[nodiscard]] PrecisionType precision_from_environment();

}  // namespace accelerate::detail::state
