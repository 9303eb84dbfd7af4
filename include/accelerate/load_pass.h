// accelerate/load_pass.h - one pass over the data, and what its random numbers depend on.
//
// Internal to accelerate/data_loader.h.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "accelerate/api.h"
#include "accelerate/data_loader_options.h"
#include "accelerate/gather_for_metrics.h"
#include "accelerate/loader_recipe.h"
#include "accelerate/value.h"
#include "accelerate/worker_generator.h"

namespace accelerate::detail {

/// A batch as a pass hands it out.
template <class Batch>
struct LoadedBatch {
  Batch batch;
  /// No other batch follows in this pass.
  bool last = false;
  std::int64_t sequence = 0;
  /// As in `PlannedLoad`; with `last` those of the pass.
  std::int64_t remainder = -1;
  std::int64_t padded_size = -1;
  std::int64_t samples_after = 0;
  std::int64_t batches_after = 0;
  std::optional<Value> dataset_state = std::nullopt;
  /// Where the processes hold unequally many samples of this batch, or some repeat theirs.
  std::shared_ptr<const UnevenParts> parts = nullptr;
};

/// Where a pass begins, and what it draws from there on: with the batch handed out last, all that
/// is needed to take it up again.
struct PassStart {
  std::int64_t epoch = 0;
  /// Unset until drawn.
  std::optional<std::uint64_t> base_seed = std::nullopt;
  /// Where all processes were, and the generator state that repeats their order.
  PlanPosition from = {};
  /// Of a stream that keeps one.
  std::optional<Value> dataset_state = std::nullopt;
  /// Batches of this process to leave out from there on.
  std::int64_t skip = 0;
  /// The number of the first batch: batches that are left out count.
  std::int64_t first_sequence = 0;
};

/// One walk through the data. Ends with the first nothing, or the first exception.
template <class Batch>
class Pass {
 public:
  virtual ~Pass() = default;
  virtual std::optional<LoadedBatch<Batch>> next() = 0;

  [[nodiscard]] const PassStart& start() const { return start_; }
  void set_start(PassStart start) { start_ = std::move(start); }

 private:
  PassStart start_ = {};
};

/// What the random numbers of a pass depend on.
struct PassSeed {
  std::uint64_t base_seed = 0;
  std::int64_t epoch = 0;
  /// The number of the first batch: batches that are skipped count.
  std::int64_t first_sequence = 0;

  [[nodiscard]] std::uint64_t of_batch(std::int64_t sequence) const noexcept {
    return batch_seed(base_seed, epoch, sequence);
  }
  /// What a stream draws while it reads ahead must not shift what the batch's own thread draws.
  [[nodiscard]] std::uint64_t of_reading(std::int64_t sequence) const noexcept {
    return batch_seed(base_seed, epoch, -1 - sequence);
  }
};

template <class Batch>
std::optional<PlannedLoad<Batch>> read_load(LoadSource<Batch>& source, const PassSeed& seed,
                                            std::int64_t sequence) {
  const BatchSeedScope seeded(seed.of_reading(sequence));
  return source.next();
}

/// How many batches workers may hold, queued, being made or waiting to be taken.
[[nodiscard]] inline std::size_t batches_in_flight(const DataLoaderOptions& options) {
  return static_cast<std::size_t>(options.num_workers * options.prefetch_factor.value_or(2));
}

/// Draws the base seed of a pass as Python's `DataLoader` does.
[[nodiscard]] ACCELERATE_API std::uint64_t draw_base_seed(
    const std::optional<at::Generator>& generator);

/// Whether batches are to be page-locked: where asked for and possible. Warns once where not.
[[nodiscard]] ACCELERATE_API bool use_pinned_memory(bool asked);

}  // namespace accelerate::detail
