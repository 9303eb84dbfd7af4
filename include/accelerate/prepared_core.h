// accelerate/prepared_core.h - a data loader whose data several processes share.
//
// Internal to accelerate/prepared_loader.h.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "accelerate/gradient_state.h"
#include "accelerate/loader_core.h"
#include "accelerate/move_ahead.h"
#include "accelerate/name_collectives.h"
#include "accelerate/own_data.h"
#include "accelerate/prepare_options.h"
#include "accelerate/random.h"
#include "accelerate/samplers.h"
#include "accelerate/stateful.h"

namespace accelerate::detail {

/// Tells the gradient state which loader is iterated, until the pass is over or left.
template <class Batch>
class ObservedPass final : public Pass<Batch> {
 public:
  ObservedPass(std::unique_ptr<Pass<Batch>> pass,
               const std::shared_ptr<DataLoaderStateMixin>& loader)
      : pass_(std::move(pass)), loader_(loader.get()) {
    gradient_state_._add_dataloader(loader);
  }
  ~ObservedPass() override { gradient_state_._remove_dataloader(loader_); }
  ObservedPass(const ObservedPass&) = delete;
  ObservedPass& operator=(const ObservedPass&) = delete;

  std::optional<LoadedBatch<Batch>> next() override { return pass_->next(); }

 private:
  std::unique_ptr<Pass<Batch>> pass_;
  const DataLoaderStateMixin* loader_;  // outlives its passes
  GradientState gradient_state_ = {};
};

/// A prepared loader without the type of its batches. Its state is that of `DataLoaderState`.
class AnyPreparedLoader : public Stateful {
 public:
  /// Whether the passes to come end with repeated samples; returns what was so before. Nothing
  /// happens, and nothing is returned, where samples are not dealt out by index.
  virtual std::optional<bool> exchange_even_batches(bool even) = 0;
};

template <class Batch>
class PreparedCore : public LoaderCore<Batch>, public AnyPreparedLoader {
 public:
  PreparedCore(std::shared_ptr<const LoaderRecipe<Batch>> recipe, Preparation preparation)
      : LoaderCore<Batch>(std::move(recipe)), preparation_(std::move(preparation)) {}

  [[nodiscard]] int num_processes() const override { return preparation_.num_processes; }
  [[nodiscard]] bool split_batches() const override { return preparation_.split_batches; }
  [[nodiscard]] std::optional<std::int64_t> total_samples() const override {
    return preparation_.already_sharded ? preparation_.total_samples
                                        : LoaderCore<Batch>::total_samples();
  }
  [[nodiscard]] Value state_dict() override { return Value(this->position().state()); }
  void load_state_dict(const Value& state) override {
    this->position().load(from_value<DataLoaderState>(state));
  }
  std::optional<bool> exchange_even_batches(bool even) override {
    if (preparation_.sharing != Sharing::kDeal || !this->recipe()->batch_sampler) {
      return std::nullopt;
    }
    return std::exchange(preparation_.even_batches, even);
  }

 protected:
  [[nodiscard]] const Preparation& preparation() const { return preparation_; }

  [[nodiscard]] std::unique_ptr<Pass<Batch>> observed(std::unique_ptr<Pass<Batch>> pass) {
    return std::make_unique<ObservedPass<Batch>>(std::move(pass), this->shared_from_this());
  }

  /// The pass that `start` belongs to, once more from its first batch on. The generator of the
  /// order stays where it is for the pass that follows.
  [[nodiscard]] std::unique_ptr<Pass<Batch>> load_again(const PassStart& start) {
    PassStart first;
    first.epoch = start.epoch;
    first.from.generator_state = start.from.generator_state;
    const KeptGenerator kept(this->recipe()->batch_sampler.get());
    const PassSeed seed{start.base_seed.value_or(0), start.epoch, 0};
    return this->load(this->source(first, PlanOptions(), StreamShard()), seed);
  }

 private:
  Preparation preparation_;
};

/// Each process loads its own part: Python's `DataLoaderShard`.
template <class Batch>
class ShardCore final : public PreparedCore<Batch> {
 public:
  using PreparedCore<Batch>::PreparedCore;

 protected:
  [[nodiscard]] std::unique_ptr<Pass<Batch>> make_pass(PassStart& start) override {
    const auto& how = this->preparation();
    if (!how.rng_types.empty()) {
      const auto named = name_collectives("DataLoaderShard");
      synchronize_rng_states(std::span<const RNGType>(how.rng_types), how.synchronized_generator);
    }
    const bool began_before = start.from.samples > 0 || start.skip > 0;
    auto pass = this->load_from(start, how.plan_options(), stream_shard(),
                                this->recipe()->options.generator);
    if (how.may_end_apart) pass = of_own_data(std::move(pass), start, began_before);
    if (how.device) pass = move_ahead(std::move(pass), *how.device, how.non_blocking);
    return this->observed(std::move(pass));
  }
  [[nodiscard]] std::unique_ptr<DefaultGeneratorAt> agree_on_order() override {
    if (!this->preparation().agrees_on_order) return nullptr;
    return accelerate::detail::agree_on_order(*this->recipe()->batch_sampler);
  }
  [[nodiscard]] std::shared_ptr<LoaderCore<Batch>> like_this() const override {
    return std::make_shared<ShardCore>(this->recipe(), this->preparation());
  }
  [[nodiscard]] std::optional<std::int64_t> whole_size() const override {
    // A dataset that cuts itself does not say where.
    if (this->preparation().sharing == Sharing::kNative) return std::nullopt;
    return this->shared_size(this->preparation().plan_options(), stream_shard());
  }

 private:
  [[nodiscard]] StreamShard stream_shard() const {
    const auto& how = this->preparation();
    if (how.sharing != Sharing::kDeal) return {};
    return {.num_processes = how.num_processes,
            .process_index = how.process_index,
            .split_batches = how.split_batches};
  }

  /// What decides how long the last batch is; nothing where that is not known.
  [[nodiscard]] std::optional<std::int64_t> samples_of_pass() const {
    const auto& recipe = *this->recipe();
    if (recipe.stream) return recipe.dataset_size;
    const auto sampler = recipe.batch_sampler->sampler();
    return sampler ? sampler->size() : std::nullopt;
  }

  [[nodiscard]] std::unique_ptr<Pass<Batch>> of_own_data(std::unique_ptr<Pass<Batch>> pass,
                                                         const PassStart& start,
                                                         bool began_before) {
    typename OwnDataPass<Batch>::Again again;
    if (this->preparation().even_batches && !equally_many(this->size(), samples_of_pass())) {
      again = [this, start] { return this->load_again(start); };
    }
    return std::make_unique<OwnDataPass<Batch>>(std::move(pass), std::move(again), began_before);
  }
};

}  // namespace accelerate::detail
