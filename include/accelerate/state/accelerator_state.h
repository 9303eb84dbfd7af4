// accelerate/state/accelerator_state.h - the state of a run that an `Accelerator` has set up.
//
// Part of accelerate/state.h. Everything of `PartialState`, plus precision, plugins and the type of
// parallelism that they ask for.
#pragma once

#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/enums.h"
#include "accelerate/fwd.h"
#include "accelerate/state/partial_state.h"

namespace accelerate {

class DeviceMesh;
struct DeepSpeedPlugin;
struct FullyShardedDataParallelPlugin;
struct MegatronLMPlugin;
struct ParallelismConfig;

/// What `Accelerator` passes on to the first `AcceleratorState`.
struct AcceleratorStateOptions {
  /// Unset: ACCELERATE_MIXED_PRECISION, else `kNo`.
  std::optional<PrecisionType> mixed_precision = std::nullopt;
  /// Stay on the CPU; ACCELERATE_USE_CPU says the same.
  bool cpu = false;
  std::shared_ptr<TorchDynamoPlugin> dynamo_plugin = nullptr;
  /// By name; the first one is active at the start. A single plugin has the name "default".
  std::vector<std::pair<std::string, std::shared_ptr<DeepSpeedPlugin>>> deepspeed_plugins = {};
  std::shared_ptr<FullyShardedDataParallelPlugin> fsdp_plugin = nullptr;
  std::shared_ptr<TorchTensorParallelPlugin> torch_tp_plugin = nullptr;
  std::shared_ptr<MegatronLMPlugin> megatron_lm_plugin = nullptr;
  std::shared_ptr<ParallelismConfig> parallelism_config = nullptr;
  /// For the `PartialState`, when there is none yet.
  PartialStateOptions process_group = {};
};

namespace detail::state {

struct AcceleratorFacts;

/// The right to make the first `AcceleratorState`, and which engines its holder brings along. What
/// is asked for and not brought is refused.
struct FromAccelerator {
  bool fp8 = false;
  bool fsdp = false;
  bool deepspeed = false;
  bool megatron_lm = false;
};

}  // namespace detail::state

/// The process-wide state that an `Accelerator` has made. Copies are handles to the same state.
///
/// Every accessor throws `StateError` after `_reset_state()` until the next construction.
class ACCELERATE_API AcceleratorState : public PartialState {
 public:
  /// Attaches to the state of the `Accelerator`.
  ///
  /// Throws `StateError` when there is none yet, and `ConfigError` when the options ask for another
  /// precision, for the CPU while the state has an accelerator, or for a plugin or a
  /// parallelism_config that the state does not have: the first construction fixes them.
  explicit AcceleratorState(const AcceleratorStateOptions& options = {});
  /// Collective when it makes the `PartialState`. Makes the state, or attaches to it. Nothing is
  /// left behind when it throws: `ConfigError` for options that contradict each other,
  /// `UnsupportedError` for an engine that the accelerator does not bring along.
  AcceleratorState(const AcceleratorStateOptions& options, detail::state::FromAccelerator engines);

  [[nodiscard]] static bool initialized() noexcept;
  /// Forgets the state, for tests; `reset_partial_state` forgets the `PartialState` too.
  static void _reset_state(bool reset_partial_state = false);

  /// With DeepSpeed the one that its configuration enables.
  [[nodiscard]] PrecisionType mixed_precision() const;
  /// Whether parameters are sharded by version 2 of fully sharded data parallelism.
  [[nodiscard]] bool is_fsdp2() const;

  /// What was given at the first construction; null where nothing was.
  [[nodiscard]] std::shared_ptr<TorchDynamoPlugin> dynamo_plugin() const;
  [[nodiscard]] std::shared_ptr<FullyShardedDataParallelPlugin> fsdp_plugin() const;
  [[nodiscard]] std::shared_ptr<TorchTensorParallelPlugin> torch_tp_plugin() const;
  [[nodiscard]] std::shared_ptr<MegatronLMPlugin> megatron_lm_plugin() const;
  [[nodiscard]] std::shared_ptr<ParallelismConfig> parallelism_config() const;
  /// The mesh that an `Accelerator` has made for the parallelism_config; null without one.
  [[nodiscard]] std::shared_ptr<DeviceMesh> device_mesh() const;

  /// The active plugin; null unless the type is `kDeepspeed`.
  [[nodiscard]] std::shared_ptr<DeepSpeedPlugin> deepspeed_plugin() const;
  /// Both throw `StateError` unless the type is `kDeepspeed`, and `ArgumentError` for a name that
  /// no plugin has.
  [[nodiscard]] std::shared_ptr<DeepSpeedPlugin> get_deepspeed_plugin(
      const std::string& name) const;
  void select_deepspeed_plugin(const std::string& name);

 private:
  [[nodiscard]] detail::state::AcceleratorFacts& accelerator_facts(const char* attribute) const;
};

/// The lines of `PartialState`, an empty one, the precision, and with DeepSpeed its configuration.
ACCELERATE_API std::ostream& operator<<(std::ostream& out, const AcceleratorState& state);

/// Whether an `Accelerator` has made its state: `AcceleratorState::initialized()`.
[[nodiscard]] ACCELERATE_API bool is_initialized() noexcept;

}  // namespace accelerate
