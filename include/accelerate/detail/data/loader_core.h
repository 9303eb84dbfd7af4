// accelerate/detail/data/loader_core.h - a data loader and its passes without the type of the
// batches.
//
// Internal to accelerate/data_loader.h. The pipeline behind it is compiled: src/data.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/data/state.h"
#include "accelerate/detail/data/batch_type.h"
#include "accelerate/detail/data/loader_recipe.h"
#include "accelerate/samplers.h"
#include "accelerate/state/gradient_state.h"

namespace accelerate {

struct DispatchSlice;
struct PrepareDataLoaderOptions;

namespace detail::data {

struct UnevenParts;

/// Cuts the part of a process out of a dispatched round.
using AnySlice = std::function<AnyBatch(const AnyBatch& round, const DispatchSlice& slice)>;
/// Makes several batches of one.
using SplitBatch = std::function<std::vector<AnyBatch>(const AnyBatch&)>;

/// Which processes see the same samples: those whose `rank / together % processes`, the `index`,
/// are equal, or none where `together` is 0.
struct DataPlace {
  std::int64_t processes = 1;
  std::int64_t index = 0;
  std::int64_t together = 0;
};

/// What the copies of a data loader share, prepared or not: recipe, workers, position.
/// `DataLoader<Batch>` documents the functions that have its names.
class ACCELERATE_API LoaderCore final : public DataLoaderStateMixin,
                                        public std::enable_shared_from_this<LoaderCore> {
 public:
  /// A loader of one process over all batches.
  explicit LoaderCore(LoaderRecipe recipe);
  ~LoaderCore() override;
  LoaderCore(const LoaderCore&) = delete;
  LoaderCore& operator=(const LoaderCore&) = delete;

  [[nodiscard]] std::int64_t size() const;
  [[nodiscard]] std::int64_t dataset_size() const;
  [[nodiscard]] std::int64_t total_dataset_length() const;
  [[nodiscard]] std::optional<std::int64_t> batch_size() const;
  [[nodiscard]] std::optional<std::int64_t> total_batch_size() const;
  [[nodiscard]] std::int64_t iteration() const;
  void set_epoch(std::int64_t epoch);
  void set_sampler(std::shared_ptr<Sampler> sampler);
  [[nodiscard]] DataLoaderState state_dict() const;
  void load_state_dict(const DataLoaderState& state);
  [[nodiscard]] const std::shared_ptr<const LoaderRecipe>& recipe() const;

  [[nodiscard]] bool end_of_dataloader() const override;
  [[nodiscard]] std::int64_t remainder() const override;
  [[nodiscard]] std::int64_t padded_size() const override;
  /// How unequal the parts of the processes are in the batch handed out last; null where all hold
  /// equally many genuine samples.
  [[nodiscard]] std::shared_ptr<const UnevenParts> uneven_parts() const;

  [[nodiscard]] DataPlace data_place() const;

  /// A loader like this one that leaves out so many batches more of each pass. Throws
  /// `ArgumentError` for a negative number.
  [[nodiscard]] std::shared_ptr<LoaderCore> skipping(std::int64_t batches) const;
  /// A loader like this one that hands out, for each batch, the `factor` batches that `split` makes
  /// of it.
  [[nodiscard]] std::shared_ptr<LoaderCore> splitting(std::int64_t factor, SplitBatch split) const;
  /// Whether the processes of a sequence parallel group are given the same batches.
  [[nodiscard]] bool same_in_sequence_group() const;
  /// Whether it was made by `splitting`.
  [[nodiscard]] bool splits() const;
  /// Collective. `prepare_data_loader`; `type` outlives the loader.
  [[nodiscard]] std::shared_ptr<LoaderCore> prepare(const PrepareDataLoaderOptions& options,
                                                    const BatchType& type, AnySlice slice);
  /// Calls `f` in the loop over the loader whenever the program is through with a batch, before
  /// the next one is taken.
  void when_batch_done(std::function<void()> f);
  /// Sets whether the passes to come end with repeated samples, and returns the setting before.
  /// Returns nullopt and changes nothing unless this loader is prepared and shares samples by
  /// index.
  std::optional<bool> exchange_even_batches(bool even);

  /// Throws `StateError`: the loader was reset.
  [[noreturn]] static void throw_freed();

 private:
  friend class LoaderPass;
  struct Impl;
  explicit LoaderCore(std::unique_ptr<Impl> impl);
  [[nodiscard]] std::unique_ptr<Impl> copied(std::int64_t skipped_batches) const;

  std::unique_ptr<Impl> impl_;
};

/// One walk through the data of a loader, and the batch it is at. Move only.
class ACCELERATE_API LoaderPass {
 public:
  /// A pass that is over.
  LoaderPass() noexcept;
  /// Begins a pass and loads its first batch.
  explicit LoaderPass(std::shared_ptr<LoaderCore> loader);
  ~LoaderPass();
  LoaderPass(LoaderPass&&) noexcept;
  LoaderPass& operator=(LoaderPass&&) noexcept;

  /// Frees the batch and loads the next one. The pass is over after the last one and after an
  /// exception.
  void advance();
  /// Empty when the pass is over.
  [[nodiscard]] const AnyBatch& batch() const noexcept { return batch_; }

 private:
  struct State;
  std::unique_ptr<State> state_;
  AnyBatch batch_ = {};
};

}  // namespace detail::data
}  // namespace accelerate
