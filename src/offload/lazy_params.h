// src/offload/lazy_params.h - the engine: groups of parameters that are there when they are used.
//
// A group is Released (no bytes), Filling (a store brings them into a slot), Filled (they are in
// the slot), Resident (its storages point to them) or Failed. Operators bring groups through the
// trigger (trigger.h). Groups live in a ring of slots of one size, which no allocator touches: the
// stream that copies waits until the stream that computes has left a slot, and the latter until
// the former has filled it. Which group follows which is learnt from the last pass.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/big_modeling/lazy_options.h"
#include "offload/store.h"

namespace accelerate::detail::offload {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

struct LazyEngine;

/// The parameters of one model. Members may be called by any thread.
class ACCELERATE_API LazyParams {
 public:
  explicit LazyParams(const LazyOptions& options);
  /// As `restore`. What is in use is restored when that ends; what cannot be restored throws when
  /// it is used, and so do tensors that were on the meta device, if their store is slow; what no
  /// model has any more is dropped.
  ~LazyParams();
  LazyParams(const LazyParams&) = delete;
  LazyParams& operator=(const LazyParams&) = delete;

  /// Takes tensors over as one group, which computes on `device`. Tensors that are managed already
  /// (tied to one of another group), and those without a dense storage, are left as they are. All
  /// names of a tensor should be given. If it throws, nothing has changed.
  void manage(const std::string& group, const std::vector<NamedTensor>& tensors, c10::Device device,
              const MakeStore& make_store);
  /// Tensors that stay on their device; the arguments of operators on them are moved there.
  void manage_resident(const std::vector<NamedTensor>& tensors);
  /// `f` is called when all else has been restored, the last one first.
  void undo_with(std::function<void()> f);
  /// What `undo_with` got is forgotten.
  void keep_moves();
  /// Called before a group is brought for an operator, without a lock.
  void before_fill(std::function<void()> f);

  void prefetch(std::int64_t depth);
  /// How much more host memory may be pinned for this model.
  [[nodiscard]] PinnedBudget& pinned_budget();
  /// Releases all groups that no operator is using, and the memory of the ring.
  void offload_now();
  /// Groups that failed are brought again when they are used.
  void reset();
  /// All tensors get their bytes back, on the device where they were before `manage`; those that
  /// were on the meta device come to the CPU. Calls what `undo_with` got. Nothing is managed
  /// afterwards. Throws `StateError` before anything changes if a tensor is in use; what a store
  /// throws once the tensors of all other groups are restored.
  void restore();

  /// Throws `StateError` that names a tensor which was moved, or got other data, by others.
  void check_not_moved() const;
  [[nodiscard]] bool is_empty() const;
  [[nodiscard]] LazyStats stats() const;

 private:
  std::shared_ptr<LazyEngine> engine_;
};

/// As tensors name it: the CPU without an index, a GPU with one, the current one of this thread.
[[nodiscard]] c10::Device with_index(c10::Device device);

/// Others cannot be put into a storage of their own, and stay where they are.
[[nodiscard]] ACCELERATE_API bool can_be_managed(const at::Tensor& tensor);
/// A managed tensor has a store: its bytes may be absent.
[[nodiscard]] ACCELERATE_API bool is_offloaded(const at::Tensor& tensor);
/// The values of any tensor, in host memory: of an offloaded one they come from its store, and
/// nothing touches the device.
[[nodiscard]] ACCELERATE_API at::Tensor host_value(const at::Tensor& tensor);
/// The same for all tensors of a state dict, in the dtypes in which they are kept. Those that share
/// a storage share it there, too. Tensors on the meta device are left out with a warning.
[[nodiscard]] ACCELERATE_API StateDict host_values(const StateDict& state);
/// How the values of a tensor are kept.
[[nodiscard]] ACCELERATE_API at::ScalarType storage_dtype(const at::Tensor& tensor);

}  // namespace accelerate::detail::offload
