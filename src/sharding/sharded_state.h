// src/sharding/sharded_state.h - the inside of a ShardedEngine.
//
// gathering.cpp: units come before operators use them, and go. reducing.cpp: gradients arrive, are
// reduced and handed to optimizers. sharded_state.cpp: a model is taken over.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "accelerate/state_dict.h"
#include "lazy/trigger.h"
#include "parallel/drift_watch.h"
#include "sharding/flat_unit.h"
#include "sharding/shard_collectives.h"
#include "sharding/spec.h"
#include "sharding/swap_files.h"
#include "sharding/tape.h"

namespace accelerate::detail::sharding {

/// What a program does between two calls of the engine.
enum class Phase : std::uint8_t { kForward, kEvaluation, kBackward, kLocalBackward };

/// Where a tensor of the module, or of an optimizer, belongs.
struct SlicePlace {
  Unit* unit = nullptr;
  Flat* flat = nullptr;
  std::size_t index = 0;

  [[nodiscard]] FlatSlice& slice() const { return flat->slices[index]; }
};

struct ShardedState {
  /// Collective. The module gets the values of the first process.
  ShardedState(torch::nn::Module& net, ShardSpec wanted, ShardProcesses groups, c10::Device device,
               std::int64_t drift_check);
  ~ShardedState();
  ShardedState(const ShardedState&) = delete;
  ShardedState& operator=(const ShardedState&) = delete;

  // ---- gathering.cpp; the mutex is held, except by `pin` and `unpin`

  /// For an operator that is about to use a parameter of the unit.
  void pin(Unit& unit, FlatSlice& slice, lazy::Access access);
  void unpin(Unit& unit) noexcept;
  /// Collective. Completes the phase before, if an error ended it.
  void begin(Phase phase, int number = 0);
  /// Collective. Carries out what is left of the tape, or agrees on what was recorded.
  void finish_phase();
  /// Collective. The same for a forward, and releases what was evaluated.
  void finish_forward();
  void bring(Unit& unit, const FlatSlice& slice);
  /// Gathers the unit at once, outside of a phase.
  void gather_alone(Unit& unit);
  void run_until(std::size_t position);
  void issue(Unit& unit, std::size_t ordinal);
  /// Lets operators use what was gathered.
  void bind(Unit& unit, std::size_t ordinal);
  void drop(Unit& unit);
  void discard(const Unit& unit, Arrival& arrival);
  void discard_before(std::size_t ordinal);
  void make_room_for(const Unit& unit);
  void release_all();
  void wait_for_oldest();
  [[nodiscard]] bool agree(const Tape& made, Phase of);
  /// Collective. Units that an optimizer, or a load, has changed since they were gathered.
  void drop_stale();
  /// Collective. Gives all processes the masters of resident buffers that `of` has.
  void publish(const std::vector<Flat*>& of);
  /// Collective. All resident buffers.
  void publish_all();

  // ---- reducing.cpp

  void install_hooks();
  void remove_hooks() noexcept;
  /// By a hook: the gradient of a leaf is complete.
  void arrived(Flat& flat, FlatSlice& slice, Leaf& leaf);
  void take_back_tokens();
  void hand_out_tokens();
  void launch(Flat& flat);
  void finish(Flat& flat);
  void flush();
  void end_backward();
  void average_whole();
  void forget_unused();
  [[nodiscard]] at::Tensor take_buffer(const Flat& flat);
  void give_back_buffer(Flat& flat);
  /// For the mean of a buffer, where its shard is.
  [[nodiscard]] at::Tensor empty_gradient(const Flat& flat) const;

  // ---- sharded_state.cpp

  void take_values(Unit& unit, Flat& flat);
  void take_buffers(torch::nn::Module& module);
  /// Throws `StateError` if the tensors of the module are not those that were prepared, or were
  /// moved, frozen or unfrozen since.
  void check_leaves() const;
  [[nodiscard]] at::Tensor at_home(const at::Tensor& shard) const;
  /// With offload to nvme: tensors of the optimizer's state that are in memory go to files.
  void place_state(torch::optim::Optimizer& optimizer, const at::Tensor& parameter) const;
  void place_states(torch::optim::Optimizer& optimizer) const;
  [[nodiscard]] SwapFiles& states_swap() const {
    return own_states_swap ? *own_states_swap : *swap;
  }
  [[nodiscard]] const SlicePlace* find_leaf(const at::Tensor& tensor) const;
  [[nodiscard]] const SlicePlace* find_local(const at::Tensor& tensor) const;

  const torch::nn::Module& module;
  /// All parameters of the module, in its order.
  std::vector<at::Tensor> registered;
  ShardSpec spec;
  Placement placement;
  ShardCollectives collectives;
  /// With offload to nvme, else null.
  std::unique_ptr<SwapFiles> swap;
  /// For the states of optimizers, if they have a folder of their own.
  std::unique_ptr<SwapFiles> own_states_swap;
  std::vector<std::unique_ptr<Unit>> units;
  std::vector<Flat*> flats;
  std::vector<PlannedParameter> whole;  // not sharded
  std::unordered_map<const c10::TensorImpl*, SlicePlace> by_leaf;
  std::unordered_map<const c10::TensorImpl*, SlicePlace> by_local;
  /// The names of the module in order, and where they are; null for what is not sharded.
  std::vector<std::pair<std::string, const SlicePlace*>> names;
  /// Buffers and parameters that are not sharded.
  StateDict whole_tensors{"Tensor"};
  /// Stand in the groups of optimizers for tensors whose elements another parameter has.
  std::vector<std::pair<at::Tensor, std::string>> stand_ins;
  /// The resident buffers that each optimizer steps.
  std::unordered_map<const torch::optim::Optimizer*, std::vector<Flat*>> stepped;

  /// Recursive: a gradient may be a view of a parameter.
  std::recursive_mutex mutex;
  lazy::SlotRing ring;
  std::map<std::pair<Phase, int>, Tape> tapes;
  Tape* tape = nullptr;  // of the phase that runs
  Phase phase = Phase::kForward;
  int forward_depth = 0;   // of nested forwards
  int forward_number = 0;  // since the last backward
  bool in_backward = false;
  bool reduces = false;          // this backward
  bool is_accumulating = false;  // gradients of this process are not reduced yet
  bool has_lazy_units = false;
  bool has_unpublished = false;  // masters that were loaded

  Flat* in_flight = nullptr;  // its reduction
  std::vector<at::Tensor> free_buffers;
  /// Compares replicas; null if there are none.
  std::unique_ptr<parallel::DriftWatch> drift;
};

/// Those of all sharded models of the process, in the order of preparation.
[[nodiscard]] std::vector<ShardedState*> living_states();

}  // namespace accelerate::detail::sharding
