// src/offload/store.h - where the bytes of parameters are while they are not on their device.
//
// A group of storages is filled and released together. Its bytes, one storage behind the other, are
// described by a `GroupPlan`; a store brings them into memory of that layout. Further stores
// (packed weights with a decoder, shards with an all-gather) implement the same interface: `fill`
// may run kernels on the current stream.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/state_dict.h"

namespace accelerate::detail::offload {

/// A tensor of the model, inside a storage.
struct TensorPlan {
  std::string name;
  std::size_t offset = 0;  ///< in the storage, in bytes
  std::size_t bytes = 0;
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> shape = {};
};

/// One storage of a group. Tied parameters, and RNN weights in one flat storage, are several
/// tensors of one storage.
struct StoragePlan {
  std::size_t offset = 0;  ///< in the group, in bytes
  std::size_t bytes = 0;
  std::vector<TensorPlan> tensors;
};

struct GroupPlan {
  std::string name;
  std::vector<StoragePlan> storages;
  std::size_t bytes = 0;
};

class ACCELERATE_API Store {
 public:
  virtual ~Store() = default;

  /// Returns false if operators may not write to the parameters.
  [[nodiscard]] virtual bool is_writable() const { return true; }
  /// Returns true if `fill` keeps the calling thread for long: then it is called on another one.
  [[nodiscard]] virtual bool is_slow() const { return false; }
  /// Returns true if `map` gives the bytes without a copy; then `fill` is not called.
  [[nodiscard]] virtual bool is_mapped() const { return false; }
  [[nodiscard]] virtual c10::DataPtr map(std::size_t storage);

  /// Queues on the current stream what brings the bytes of the group into `memory`: bytes, on the
  /// device of the group. Throws with the parameter, the place and the cause.
  virtual void fill(const at::Tensor& memory) = 0;
  /// Queues on the current stream a copy of `bytes`, on the device of the group, to the store.
  virtual void write_back(std::size_t storage, const at::Tensor& bytes) = 0;
  /// The bytes of one storage, in host memory of their own.
  [[nodiscard]] virtual at::Tensor bytes(std::size_t storage) const = 0;
  /// How a tensor is kept; the dtype that it computes in unless the store is of lower precision.
  [[nodiscard]] virtual at::ScalarType storage_dtype(at::ScalarType dtype) const { return dtype; }
};

using MakeStore = std::function<std::unique_ptr<Store>(const GroupPlan&)>;

/// The value of a tensor of the model by its name. Throws if there is none.
using ValueOf = std::function<at::Tensor(const std::string& name)>;

/// How much host memory may be pinned for an engine; copies from pinned memory are fast and run
/// beside the computation.
struct PinnedBudget {
  std::int64_t left = 0;
};

/// In host memory, pinned as far as the budget goes if a GPU is there. Copies all of it there.
[[nodiscard]] ACCELERATE_API std::unique_ptr<Store> make_host_store(const GroupPlan& plan,
                                                                    const ValueOf& value_of,
                                                                    PinnedBudget& budget);

/// A tensor in a file.
struct FileRange {
  std::filesystem::path path;
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
  at::ScalarType dtype = at::kFloat;
  /// The file has nothing else in it: its size is checked.
  bool is_whole_file = false;
  /// Unset: any that has as many elements.
  std::optional<std::vector<std::int64_t>> shape = std::nullopt;
};
using FileRanges = std::map<std::string, FileRange>;

struct FileStoreOptions {
  /// Where the group computes. On the CPU files are mapped, not copied.
  c10::Device device = c10::kCPU;
  bool writable = false;
};
/// In files. A tensor with several names may have any of them in `ranges`. Throws `CheckpointError`
/// for a tensor that is not there, or is of another size or shape than the model expects.
[[nodiscard]] ACCELERATE_API std::unique_ptr<Store> make_file_store(
    const GroupPlan& plan, const FileRanges& ranges, const FileStoreOptions& options);

/// On the device of the group, as `dtype`; converted at each use.
[[nodiscard]] ACCELERATE_API std::unique_ptr<Store> make_cast_store(const GroupPlan& plan,
                                                                    const ValueOf& value_of,
                                                                    at::ScalarType dtype);

}  // namespace accelerate::detail::offload
