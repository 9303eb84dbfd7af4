// accelerate/loader_recipe.h - what a data loader is made of once the types of dataset, sample and
// collate function are forgotten.
//
// Internal to accelerate/data_loader.h.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "accelerate/batch_plan.h"
#include "accelerate/batch_samplers.h"
#include "accelerate/batch_tensors.h"
#include "accelerate/data_loader_options.h"
#include "accelerate/value.h"

namespace accelerate::detail {

/// Makes the batch with these samples. Called by several workers at once.
template <class Batch>
using FetchFunction = std::function<Batch(const IndexBatch&, const LoadContext&)>;

/// A batch that is decided on and not made yet.
template <class Batch>
struct PlannedLoad {
  /// The samples: indices into a dataset, or positions in a stream.
  IndexBatch indices = {};
  FetchFunction<Batch> make = {};
  /// Nothing follows on this process.
  bool last = false;
  /// With `last`: genuine samples of the last round, 0 when it is complete, -1 when not known.
  std::int64_t remainder = -1;
  /// With `last`: samples of the last round, repeated ones included, -1 when not known.
  std::int64_t padded_size = -1;
  /// As in `PlannedBatch`: where all processes are at the end of this round.
  std::int64_t samples_after = 0;
  std::int64_t batches_after = 0;
  /// What a stream that keeps a state says of itself behind this batch.
  std::optional<Value> dataset_state = std::nullopt;
};

/// The batches of one pass on one process, in order.
template <class Batch>
class LoadSource {
 public:
  virtual ~LoadSource() = default;
  virtual std::optional<PlannedLoad<Batch>> next() = 0;
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
  /// Where the dataset goes on by itself: then nothing is passed over.
  std::optional<Value> dataset_state = std::nullopt;
};

/// Iterable data.
template <class Batch>
class StreamFactory {
 public:
  virtual ~StreamFactory() = default;
  /// Starts a pass.
  virtual std::unique_ptr<LoadSource<Batch>> begin(const StreamShard& shard,
                                                   std::int64_t epoch) const = 0;
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
template <class Batch>
struct LoaderRecipe {
  DataLoaderOptions options = {};
  /// Indexed data; null for iterable ones. With `options.batch_size` unset: one index per batch.
  std::shared_ptr<BatchIndexSampler> batch_sampler = nullptr;
  FetchFunction<Batch> fetch = {};
  /// Iterable data; null for indexed ones.
  std::shared_ptr<StreamFactory<Batch>> stream = nullptr;
  /// Samples, where that is known.
  std::optional<std::int64_t> dataset_size = std::nullopt;
  /// Tells an indexed dataset the epoch; empty where it does not want to know. Streams are told
  /// when they begin.
  std::function<void(std::int64_t)> set_epoch = {};
  /// A number that says which rows the tensors of a dataset in memory begin and end with; empty for
  /// other datasets.
  std::function<std::uint64_t()> fingerprint = {};
  /// Batches go on to a device, which fetches them from page-locked memory.
  bool for_device = false;
};

/// The batches of a plan, fetched by index.
template <class Batch>
class IndexedSource final : public LoadSource<Batch> {
 public:
  IndexedSource(std::shared_ptr<const LoaderRecipe<Batch>> recipe, BatchPlan plan)
      : recipe_(std::move(recipe)), plan_(std::move(plan)) {}

  std::optional<PlannedLoad<Batch>> next() override {
    auto planned = plan_.next();
    if (!planned) return std::nullopt;
    PlannedLoad<Batch> load;
    load.indices = std::move(planned->indices);
    load.make = std::cref(recipe_->fetch);
    load.last = planned->last;
    if (load.last) {
      load.remainder = plan_.remainder();
      load.padded_size = plan_.padded_size();
    }
    load.samples_after = planned->samples_after;
    load.batches_after = planned->batches_after;
    return load;
  }

 private:
  std::shared_ptr<const LoaderRecipe<Batch>> recipe_;
  BatchPlan plan_;
};

/// The batches of another sampler. Throws `ArgumentError` where there is none to be replaced.
[[nodiscard]] ACCELERATE_API std::shared_ptr<BatchIndexSampler> with_sampler(
    const std::shared_ptr<BatchIndexSampler>& batches, std::shared_ptr<Sampler> sampler);

/// Samples that all processes together take of a stream at once.
[[nodiscard]] ACCELERATE_API std::int64_t stream_group(const DataLoaderOptions& options,
                                                       const StreamShard& shard);
/// Batches that one process makes of a stream of `samples`, where that is known.
[[nodiscard]] ACCELERATE_API std::optional<std::int64_t> stream_batches(
    std::optional<std::int64_t> samples, const DataLoaderOptions& options,
    const StreamShard& shard);

}  // namespace accelerate::detail
