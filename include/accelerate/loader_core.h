// accelerate/loader_core.h - what the copies of a data loader share: recipe, workers, where it is.
//
// Internal to accelerate/data_loader.h.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "accelerate/data_loader_state.h"
#include "accelerate/gather_for_metrics.h"
#include "accelerate/gradient_state.h"
#include "accelerate/load_pipeline.h"
#include "accelerate/loader_position.h"
#include "accelerate/loader_recipe.h"
#include "accelerate/sampler_adaptors_detail.h"

namespace accelerate::detail {

/// A stream that begins where it is read: in worker 0, behind whatever an abandoned pass over the
/// same dataset still does there.
template <class Batch>
class StreamSource final : public LoadSource<Batch> {
 public:
  StreamSource(std::shared_ptr<StreamFactory<Batch>> factory, const StreamShard& shard,
               std::int64_t epoch)
      : factory_(std::move(factory)), shard_(shard), epoch_(epoch) {}

  std::optional<PlannedLoad<Batch>> next() override {
    if (!stream_) stream_ = factory_->begin(shard_, epoch_);
    return stream_->next();
  }

 private:
  std::shared_ptr<StreamFactory<Batch>> factory_;
  StreamShard shard_;
  std::int64_t epoch_;
  std::unique_ptr<LoadSource<Batch>> stream_ = nullptr;
};

/// A loader as it is before `prepare`: one process, all batches. Prepared loaders derive from it.
template <class Batch>
class LoaderCore : public DataLoaderStateMixin,
                   public UnevenLoader,
                   public std::enable_shared_from_this<LoaderCore<Batch>> {
 public:
  explicit LoaderCore(std::shared_ptr<const LoaderRecipe<Batch>> recipe)
      : recipe_(std::move(recipe)) {}

  /// A new walk through the data. Passes may be under way side by side. The loader outlives them.
  [[nodiscard]] std::unique_ptr<Pass<Batch>> start_pass() {
    end_of_dataloader_ = false;
    remainder_ = -1;
    padded_size_ = -1;
    set_parts(nullptr);
    auto start = position_.next_start();
    auto pass = make_pass(start);
    pass->set_start(std::move(start));
    return pass;
  }

  /// The next batch of a pass. Marks the end of data. `complete` says that the pass has handed out
  /// its last batch: then it counts. An empty pass does not, as in Python.
  [[nodiscard]] std::optional<LoadedBatch<Batch>> advance(Pass<Batch>& pass, bool complete) {
    auto loaded = pass.next();
    if (!loaded) {
      if (complete) position_.end_epoch();
      return loaded;
    }
    if (loaded->last) {
      remainder_ = loaded->remainder;
      padded_size_ = loaded->padded_size;
      end_of_dataloader_ = true;
    }
    set_parts(std::move(loaded->parts));
    position_.remember(pass.start(), {.batches_yielded = loaded->sequence + 1,
                                      .samples_yielded = loaded->samples_after,
                                      .sampler_batches = loaded->batches_after,
                                      .finished = loaded->last,
                                      .num_processes = num_processes(),
                                      .dataset_state = std::move(loaded->dataset_state)});
    return loaded;
  }

  /// Batches of this process in a pass, where that is known.
  [[nodiscard]] std::optional<std::int64_t> size() const {
    const auto whole = whole_size();
    return whole ? std::optional(std::max<std::int64_t>(0, *whole - skip_batches())) : std::nullopt;
  }
  [[nodiscard]] LoaderPosition& position() { return position_; }
  [[nodiscard]] std::int64_t skip_batches() const { return position_.skip_batches(); }
  /// A loader like this one that leaves out so many batches more of each pass.
  [[nodiscard]] std::shared_ptr<LoaderCore> skipping(std::int64_t batches) const {
    auto core = like_this();
    core->position_.follow(position_, batches);
    return core;
  }

  void set_sampler(std::shared_ptr<Sampler> sampler) {
    auto recipe = std::make_shared<LoaderRecipe<Batch>>(*recipe_);
    recipe->batch_sampler = with_sampler(recipe->batch_sampler, std::move(sampler));
    recipe_ = std::move(recipe);
  }

  /// How many processes share the data, and whether they cut each batch into parts.
  [[nodiscard]] virtual int num_processes() const { return 1; }
  [[nodiscard]] virtual bool split_batches() const { return false; }
  /// Samples of all processes together, where that is known.
  [[nodiscard]] virtual std::optional<std::int64_t> total_samples() const {
    return recipe_->dataset_size;
  }

  [[nodiscard]] bool end_of_dataloader() const override { return end_of_dataloader_; }
  [[nodiscard]] std::int64_t remainder() const override { return remainder_; }
  [[nodiscard]] std::int64_t padded_size() const override { return padded_size_; }
  [[nodiscard]] std::shared_ptr<const UnevenParts> uneven_parts() const override {
    const std::lock_guard lock(parts_mutex_);
    return parts_;
  }
  [[nodiscard]] const std::shared_ptr<const LoaderRecipe<Batch>>& recipe() const { return recipe_; }

 protected:
  /// The pass that begins at `start`, where it notes what it draws.
  [[nodiscard]] virtual std::unique_ptr<Pass<Batch>> make_pass(PassStart& start) {
    return load_from(start, PlanOptions(), StreamShard(), recipe_->options.generator);
  }
  /// Another loader of the same kind and recipe.
  [[nodiscard]] virtual std::shared_ptr<LoaderCore> like_this() const {
    return std::make_shared<LoaderCore>(recipe_);
  }
  /// While it lives, all processes draw their order from one state of the default generator.
  [[nodiscard]] virtual std::unique_ptr<DefaultGeneratorAt> agree_on_order() { return nullptr; }
  /// Batches of this process in a pass of which none are left out, where that is known.
  [[nodiscard]] virtual std::optional<std::int64_t> whole_size() const {
    return shared_size(PlanOptions(), StreamShard());
  }

  [[nodiscard]] std::optional<std::int64_t> shared_size(const PlanOptions& plan,
                                                        const StreamShard& shard) const {
    if (recipe_->stream) return stream_batches(recipe_->dataset_size, recipe_->options, shard);
    return planned_size(*recipe_->batch_sampler, plan);
  }

  /// Loads the batches of one process. The base seed is drawn before the sampler draws, as in
  /// Python, also where an earlier one takes its place.
  [[nodiscard]] std::unique_ptr<Pass<Batch>> load_from(
      PassStart& start, const PlanOptions& plan, const StreamShard& shard,
      const std::optional<at::Generator>& generator) {
    const auto drawn = draw_base_seed(generator);
    start.base_seed = start.base_seed.value_or(drawn);
    const PassSeed seed{*start.base_seed, start.epoch, start.first_sequence};
    return load(source(start, plan, shard), seed);
  }

  [[nodiscard]] std::unique_ptr<LoadSource<Batch>> source(PassStart& start, const PlanOptions& plan,
                                                          StreamShard shard) {
    if (recipe_->stream) {
      shard.skip_samples = start.from.samples + start.skip * stream_group(recipe_->options, shard);
      shard.skip_groups = start.from.batches + start.skip;
      // Processes that share out a stream need its start, to fill up their last batches.
      if (shard.num_processes == 1 && recipe_->stream->keeps_state()) {
        shard.dataset_state = start.dataset_state;
      }
      if (start.from.samples > 0 && !shard.dataset_state) warn_about_reading_again();
      return std::make_unique<StreamSource<Batch>>(recipe_->stream, shard, start.epoch);
    }
    tell_dataset(start.epoch);
    const auto agreed = agree_on_order();
    BatchPlan batches(recipe_->batch_sampler, plan, start.epoch, start.from);
    batches.skip(start.skip);
    start.from.generator_state = batches.generator_state();
    return std::make_unique<IndexedSource<Batch>>(recipe_, std::move(batches));
  }

  /// Loads what `source` plans: in this thread or by the workers.
  [[nodiscard]] std::unique_ptr<Pass<Batch>> load(std::unique_ptr<LoadSource<Batch>> source,
                                                  const PassSeed& seed) {
    const bool direct = recipe_->options.num_workers == 0;
    const bool pinned = use_pinned_memory(recipe_->options.pin_memory || recipe_->for_device);
    LoadContext context{.pinned = pinned, .parallel = direct, .memory = memory_};
    if (direct) {
      return std::make_unique<DirectPass<Batch>>(std::move(source), std::move(context), seed);
    }
    return std::make_unique<WorkerPass<Batch>>(recipe_, std::move(source), workers(),
                                               std::move(context), seed);
  }

  /// Tells an indexed dataset the epoch, once no worker reads it for a pass that was abandoned.
  void tell_dataset(std::int64_t epoch) {
    if (!recipe_->set_epoch) return;
    if (recipe_->options.num_workers > 0) workers()->wait_idle();
    recipe_->set_epoch(epoch);
  }

 private:
  void set_parts(std::shared_ptr<const UnevenParts> parts) {
    const std::lock_guard lock(parts_mutex_);
    parts_ = std::move(parts);
  }

  std::shared_ptr<WorkerPool> workers() {
    const std::lock_guard lock(workers_mutex_);
    if (!workers_) workers_ = std::make_shared<WorkerPool>(recipe_->options.num_workers);
    return workers_;
  }

  std::shared_ptr<const LoaderRecipe<Batch>> recipe_;
  LoaderPosition position_ = {};
  std::atomic<bool> end_of_dataloader_ = false;
  std::atomic<std::int64_t> remainder_ = -1;
  std::atomic<std::int64_t> padded_size_ = -1;
  std::shared_ptr<ReusedMemory> memory_ = std::make_shared<ReusedMemory>();
  mutable std::mutex parts_mutex_ = {};
  std::shared_ptr<const UnevenParts> parts_ = nullptr;  // of the batch handed out last
  std::mutex workers_mutex_ = {};
  std::shared_ptr<WorkerPool> workers_ = nullptr;
};

}  // namespace accelerate::detail
