// src/sharding/flat_unit.h - the parameters of a unit as flat buffers, of which each process keeps
// a shard.
//
// A unit has one flat buffer for each kind of parameters: trained or frozen, by types. The
// optimizer steps on slices of the shard, one per parameter. The tensors of the module either are
// views of a whole buffer that stays (levels 1 and 2), or have storages of their own without bytes,
// which get them from a slot while the unit is gathered (level 3).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lazy/slot_ring.h"
#include "sharding/flat_layout.h"
#include "sharding/shard_collectives.h"
#include "sharding/units.h"

namespace accelerate::detail::sharding {

/// A tensor of the module.
struct Leaf {
  at::Tensor tensor;
  /// Kept alive: else a parameter makes a new one for each graph, without the hook. A shared or an
  /// intrusive pointer, by the version of LibTorch.
  decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>())) accumulator =
      nullptr;
  std::uintptr_t hook = 0;
  bool has_arrived = false;  // its gradient, in this backward
};

/// A parameter in a flat buffer.
struct FlatSlice {
  std::vector<std::string> names;
  std::vector<Leaf> leaves;
  std::vector<std::int64_t> sizes;
  std::int64_t size = 0;
  std::int64_t offset = 0;
  Range part = {};  ///< of its elements, that this process holds
  /// What the optimizer steps on: that part, 1-D, perhaps without elements.
  at::Tensor local;
  /// Of level 3: shared by the leaves; null otherwise.
  c10::intrusive_ptr<c10::StorageImpl> storage = nullptr;
  /// What `grad()` of a leaf is after backward: the right shape, and reading it throws.
  at::Tensor token;
  bool is_in_buffer = false;  // a gradient, in the reduce buffer
  bool is_used = false;       // a gradient has come since there was none
  bool is_written = false;    // inside of `gathered_parameters`

  [[nodiscard]] const std::string& name() const { return names.front(); }
  [[nodiscard]] bool has_gradient() const { return local.grad().defined(); }
};

struct Flat {
  std::size_t index = 0;  ///< among all of the engine
  std::size_t unit = 0;
  bool is_trained = true;
  /// The tensors of the module are views of `whole`, which stays.
  bool is_resident = false;
  at::ScalarType compute_dtype = at::kFloat;
  at::ScalarType reduce_dtype = at::kFloat;
  FlatLayout layout;
  std::vector<FlatSlice> slices;

  at::Tensor shard;     // [shard_size] the masters of this process
  at::Tensor whole;     // [padded_size] if resident
  at::Tensor gradient;  // [shard_size] like `shard`; undefined until the first one
  /// Bytes of a slot before this buffer.
  std::size_t slot_offset = 0;
  /// `shard._version()` when it was sent last.
  std::int64_t sent_version = 0;

  // Of gradients, in a backward.
  at::Tensor buffer;        // [padded_size] what has come
  std::size_t arrived = 0;  // leaves
  bool is_reduced = false;
  WorkPtr reduction = nullptr;
  at::Tensor reduced;  // [shard_size] what the reduction writes to

  [[nodiscard]] std::size_t leaf_count() const;
  /// The masters are a part of `whole`.
  [[nodiscard]] bool is_alias() const { return is_resident && shard.is_alias_of(whole); }
  [[nodiscard]] std::size_t whole_bytes() const;
};

/// A gather that no operator has used yet.
struct Arrival {
  lazy::Slot* slot = nullptr;
  std::vector<WorkPtr> works = {};    // empty when it is complete
  std::vector<at::Tensor> sent = {};  // kept until then
  /// Of the gather, among those of the tape.
  std::size_t ordinal = 0;
};

struct Unit {
  std::string name;
  std::vector<std::unique_ptr<Flat>> flats;
  /// Of those that come and go.
  std::size_t slot_bytes = 0;
  std::size_t index = 0;
  /// Stays gathered from its first use in forward to the end of backward, in a slot of its own.
  bool stays = false;
  /// Where whole parameters are now; null if they are not here.
  lazy::Slot* slot = nullptr;
  std::vector<Arrival> arrivals = {};
  lazy::Slot* own_slot = nullptr;
  int pins = 0;          // operators that use it
  bool is_open = false;  // for `gathered_parameters`: it may be used outside of a pass

  /// "block.3", or "(root)".
  [[nodiscard]] std::string title() const { return name.empty() ? "(root)" : name; }
  [[nodiscard]] bool comes_and_goes() const { return slot_bytes > 0; }
};

/// Where the processes and the values are.
struct Placement {
  c10::Device device = c10::kCPU;
  /// Masters, gradients and the state of optimizers are in the host's memory.
  bool masters_on_host = false;
  bool pin_memory = false;
  std::int64_t processes = 1;  // that share a flat buffer
  std::int64_t rank = 0;       // among them
};

/// The unit without values: layouts and types. `first_index` numbers its buffers.
[[nodiscard]] std::unique_ptr<Unit> make_unit(PlannedUnit plan, const ShardSpec& spec,
                                              const Placement& placement, std::size_t first_index);

/// Copies the parameters, as the module has them, into a new flat buffer of the masters' type on
/// the device. What has no values is zero.
[[nodiscard]] at::Tensor flatten(const Flat& flat, at::ScalarType dtype, c10::Device device);
[[nodiscard]] at::ScalarType master_dtype(const Flat& flat, const ShardSpec& spec);

/// Gives the leaves their new storages and the optimizer its slices. `shard` and, if resident,
/// `whole` are set.
void take_over(Flat& flat, const Placement& placement);

/// The part of a slot for one buffer.
[[nodiscard]] at::Tensor memory_of(const lazy::Slot& slot, const Flat& flat);
/// Leaves use the bytes of the slot; `forbid_leaves` takes them away.
void allow_leaves(const Flat& flat, const lazy::Slot& slot);
void forbid_leaves(const Flat& flat, std::int64_t processes);

}  // namespace accelerate::detail::sharding
