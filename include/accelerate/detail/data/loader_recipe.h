// accelerate/detail/data/loader_recipe.h - what a data loader is made of once the types of dataset,
// sample, collate function and batch are erased.
//
// Internal to accelerate/data_loader.h.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <typeinfo>

#include "accelerate/api.h"
#include "accelerate/data/batch_samplers.h"
#include "accelerate/data/options.h"
#include "accelerate/detail/data/batch_tensors.h"
#include "accelerate/detail/data/batch_type.h"
#include "accelerate/value.h"

namespace accelerate::detail::data {

/// What is known about a batch beside its content. Each stage of the pipeline hands it on as a
/// whole.
struct BatchFacts {
  /// No other batch follows on this process.
  bool last = false;
  /// With `last`: genuine samples of the last round, 0 when it is complete, -1 when not known.
  std::int64_t remainder = -1;
  /// With `last`: samples of the last round, repeated ones included, -1 when not known.
  std::int64_t padded_size = -1;
  /// Samples, repeated ones not counted, and batches of the batch sampler that all processes
  /// together have been given at the end of this round: where a later pass can go on.
  std::int64_t samples_after = 0;
  std::int64_t batches_after = 0;
  /// State of an iterable dataset behind this batch, where the dataset keeps one.
  std::optional<Value> dataset_state = std::nullopt;
};

/// Makes the batch with these samples. Called by several workers at once.
using FetchFunction = std::function<AnyBatch(const IndexBatch&, const LoadContext&)>;

/// A batch that is decided on and not made yet.
struct PlannedLoad {
  /// The samples: indices into a dataset, or positions in a stream.
  IndexBatch indices = {};
  FetchFunction make = {};
  BatchFacts facts = {};
};

/// The batches of one pass on one process, in order.
class LoadSource {
 public:
  virtual ~LoadSource() = default;
  virtual std::optional<PlannedLoad> next() = 0;
};

/// The part of a stream of samples that one of several processes takes, as Python's
/// `IterableDatasetShard`: groups of one batch per process, the last one filled up from the start.
struct StreamShard {
  int num_processes = 1;
  int process_index = 0;
  /// A group is one batch of the loader, cut into equal parts.
  bool split_batches = false;
  /// Samples to read and pass over, of all processes together, and the groups they were in.
  std::int64_t skip_samples = 0;
  std::int64_t skip_groups = 0;
  /// If set, the dataset resumes from this state and no sample is passed over.
  std::optional<Value> dataset_state = std::nullopt;
};

/// Throws `ArgumentError` if a few samples would be repeated without measure to make `size` of
/// them.
ACCELERATE_API void check_filling(std::int64_t genuine, std::int64_t size);

/// Where the groups of a stream begin and end, and which part of them belongs to this process.
struct StreamCut {
  StreamCut(const DataLoaderOptions& options, const StreamShard& shard, bool whole_batches) {
    const auto batch = whole_batches ? 1 : options.batch_size.value_or(1);
    const auto share = shard.split_batches ? batch / shard.num_processes : batch;
    group = share * shard.num_processes;
    begin = share * shard.process_index;
    end = begin + share;
    fills_up = shard.num_processes > 1 && !options.drop_last;
  }

  std::int64_t group;  ///< samples that all processes take together
  std::int64_t begin;  ///< first sample of this process in the group
  std::int64_t end;    ///< one behind its last sample
  bool fills_up;       ///< a last group that is not full is filled up from the start of the stream
};

/// Iterable data.
class StreamFactory {
 public:
  virtual ~StreamFactory() = default;
  /// Starts a pass.
  virtual std::unique_ptr<LoadSource> begin(const StreamShard& shard, std::int64_t epoch) const = 0;
  /// Whether the dataset has `state_dict()` and `load_state_dict(state)`.
  [[nodiscard]] virtual bool keeps_state() const { return false; }
  /// The generator that the dataset owns, if it has one.
  [[nodiscard]] virtual std::optional<at::Generator> generator() const { return std::nullopt; }
  /// Whether there are samples to deal out. False where the dataset yields whole batches, and where
  /// samples cannot be copied: then `begin` serves one process only.
  [[nodiscard]] virtual bool deals_samples() const = 0;
  /// Into how many parts the dataset itself can cut its data; 0 when it cannot.
  [[nodiscard]] virtual std::int64_t num_shards() const { return 0; }
  /// Part `index` of `count`, cut by the dataset itself.
  [[nodiscard]] virtual std::shared_ptr<StreamFactory> shard(std::int64_t count,
                                                             std::int64_t index) const = 0;
};

/// Immutable, and shared by the loaders that are derived from it.
struct LoaderRecipe {
  DataLoaderOptions options = {};
  /// Indexed data; null for iterable ones. With `options.batch_size` unset: one index per batch.
  std::shared_ptr<BatchIndexSampler> batch_sampler = nullptr;
  FetchFunction fetch = {};
  /// Iterable data; null for indexed ones.
  std::shared_ptr<StreamFactory> stream = nullptr;
  /// The class of the dataset, for messages.
  const std::type_info* dataset_type = nullptr;
  /// Samples, where that is known.
  std::optional<std::int64_t> dataset_size = std::nullopt;
  /// Tells an indexed dataset the epoch; empty where it has no `set_epoch`. Streams are told when
  /// they begin.
  std::function<void(std::int64_t)> set_epoch = {};
  /// A hash of the first and the last rows of a dataset of tensors; empty for other datasets.
  std::function<std::uint64_t()> fingerprint = {};
  /// Batches are copied to a device, which is faster from page-locked memory.
  bool for_device = false;
};

}  // namespace accelerate::detail::data
