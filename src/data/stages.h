// src/data/stages.h - the stages that a batch passes on its way from the dataset to the loader.
//
// src/README.md draws them. Each of them knows only the stage behind it, as a `Pass`.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <source_location>
#include <vector>

#include "accelerate/detail/data/batch_type.h"
#include "accelerate/detail/data/loader_core.h"
#include "accelerate/detail/data/loader_recipe.h"
#include "data/batch_plan.h"
#include "data/batch_seed.h"
#include "data/load_workers.h"
#include "data/preparation.h"

namespace accelerate::detail::data {

/// What each process holds of one batch, by rank: how many samples, and how many of them are no
/// repeats.
struct UnevenParts {
  std::vector<std::int64_t> lengths = {};
  std::vector<std::int64_t> genuine = {};
};

/// A batch as a stage hands it on.
struct LoadedBatch {
  AnyBatch batch = {};
  BatchFacts facts = {};
  /// Number of the batch in its pass.
  std::int64_t sequence = 0;
  /// Set where the processes hold unequally many samples of this batch, or some repeat theirs.
  std::shared_ptr<const UnevenParts> parts = nullptr;
};

/// Where a pass begins, and what it draws from there on: with the facts of the batch handed out
/// last, this is all that is needed to resume it.
struct PassStart {
  std::int64_t epoch = 0;
  /// Unset until drawn.
  std::optional<std::uint64_t> base_seed = std::nullopt;
  /// Where all processes were, and the generator state that repeats their order.
  PlanPosition from = {};
  /// The generator state of a pass that was complete when a state was saved: what it drew comes
  /// before what this pass draws.
  at::Tensor order_before = {};
  /// State of an iterable dataset that keeps one.
  std::optional<Value> dataset_state = std::nullopt;
  /// Batches of this process to leave out from there on.
  std::int64_t skip = 0;
  /// The number of the first batch: batches that are left out count.
  std::int64_t first_sequence = 0;

  /// Before a pass begins: whether it goes on with one that a loader of ours has begun. What that
  /// has drawn from random states, or changed of them, is not to be done again.
  [[nodiscard]] bool resumes() const { return base_seed.has_value(); }
};

/// A stage of a pass. It is over with the first nullopt, or the first exception.
class Pass {
 public:
  virtual ~Pass() = default;
  virtual std::optional<LoadedBatch> next() = 0;
};

// ---- load_pipeline.cpp: what to load, and who loads it ------------------------------------------

/// The batches of a plan, fetched by index.
[[nodiscard]] std::unique_ptr<LoadSource> indexed_source(std::shared_ptr<const LoaderRecipe> recipe,
                                                         BatchPlan plan);
/// Loads in the thread that asks.
[[nodiscard]] std::unique_ptr<Pass> load_directly(std::unique_ptr<LoadSource> source,
                                                  LoadContext context, const PassSeed& seed);
/// Loads ahead with the workers of a pool. Abandoning the pass does not wait: queued batches are
/// dropped, and a busy worker drops its batch when it has read the sample that it is at.
///
/// Plans are drawn by the thread that asks, so that generators are drawn from in Python's order.
/// Streams are read by worker 0 alone; all workers collate.
[[nodiscard]] std::unique_ptr<Pass> load_with_workers(std::shared_ptr<const LoaderRecipe> recipe,
                                                      std::unique_ptr<LoadSource> source,
                                                      std::shared_ptr<WorkerPool> pool,
                                                      LoadContext context, const PassSeed& seed);

// ---- presharded.cpp: each process reads data of its own -----------------------------------------

/// All batches are genuine. With `reopen`, which starts the data again, every `next` is collective:
/// the processes tell each other whether batches follow, and a process that is done early repeats
/// its batches until all are.
///
/// `next` throws `CommError` that names the rank where loading failed on another process, and
/// `ArgumentError` where some processes have data and others have none. `began_before` says that
/// this process was given batches before the pass was resumed.
[[nodiscard]] std::unique_ptr<Pass> presharded_pass(std::unique_ptr<Pass> pass,
                                                    const BatchType& type,
                                                    std::function<std::unique_ptr<Pass>()> reopen,
                                                    bool began_before);
/// Collective. Whether all processes know how many batches and samples they have, and have equally
/// many.
[[nodiscard]] bool equally_many(const std::optional<std::int64_t>& batches,
                                const std::optional<std::int64_t>& samples);
/// Collective. The numbers of all processes, equally many each: [processes, numbers] on the CPU.
[[nodiscard]] at::Tensor gather_numbers(
    const std::vector<std::int64_t>& mine,
    std::source_location where = std::source_location::current());
/// Rows of the first tensor of a batch, -1 if they cannot be found.
[[nodiscard]] std::int64_t known_batch_size(const BatchType& type, const AnyBatch& batch);

// ---- dispatch.cpp: process 0 reads, every process gets its part ---------------------------------

/// The data of process 0.
struct DispatchSource {
  /// Loads all batches from a start, where it notes what it draws.
  std::function<std::unique_ptr<Pass>(PassStart&)> open;
  /// The pass with this start once more, from its first batch on.
  std::function<std::unique_ptr<Pass>(const PassStart&)> reopen;
  bool drop_last = false;
};

/// Collective, as is `next`: Python's `DataLoaderDispatcher`. Process 0 opens the source, and all
/// processes take its start. What it throws is thrown by all.
[[nodiscard]] std::unique_ptr<Pass> dispatched_pass(const DispatchSource& source, PassStart& start,
                                                    const BatchType& type,
                                                    const Preparation& preparation, AnySlice slice);

// ---- device_prefetch.cpp ------------------------------------------------------------------------

/// The pass with its batches on `device`. On a device that computes beside the host, a batch is
/// copied while the one before it is in use. What is no tensor stays as it is.
[[nodiscard]] std::unique_ptr<Pass> device_prefetch(std::unique_ptr<Pass> pass,
                                                    const BatchType& type, at::Device device,
                                                    bool non_blocking);

// ---- sequence_cutter.cpp ------------------------------------------------------------------------

/// The batches that `split`, which outlives the pass, makes of each batch. `before` is where the
/// pass begins.
[[nodiscard]] std::unique_ptr<Pass> splitting_pass(std::unique_ptr<Pass> pass,
                                                   const SplitBatch& split, BatchFacts before);

}  // namespace accelerate::detail::data
