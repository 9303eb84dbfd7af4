// accelerate/detail/data/sample_stream.h - iterable data: samples read one after the other, grouped
// to batches.
//
// Internal to accelerate/data_loader.h.
#pragma once

#include <ATen/core/Generator.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iterator>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/detail/data/indexed_fetch.h"
#include "accelerate/detail/data/item_reader.h"
#include "accelerate/detail/data/loader_recipe.h"

namespace accelerate::detail::data {

/// One pass over a stream as one process sees it.
template <class D, class Collate, class Batch>
class SampleStream final : public LoadSource {
  using Item = ItemOf<D>;

 public:
  SampleStream(std::shared_ptr<D> dataset, std::shared_ptr<Collate> collate,
               const DataLoaderOptions& options, const StreamShard& shard, std::int64_t epoch)
      : dataset_(std::move(dataset)),
        collate_(std::move(collate)),
        items_at_once_(static_cast<std::size_t>(options.batch_size.value_or(1))),
        unbatched_(!options.batch_size || yields_whole_batches<D>()),
        drop_last_(options.drop_last),
        samples_per_item_(yields_whole_batches<D>() ? options.batch_size.value_or(1) : 1),
        cut_(options, shard, yields_whole_batches<D>()),
        shard_(shard),
        epoch_(epoch),
        groups_(shard.skip_groups) {}

  std::optional<PlannedLoad> next() override {
    if (!reader_) begin();
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    if (!ahead_) return std::nullopt;
    Group group = std::move(*ahead_);
    look_ahead();
    PlannedLoad load;
    load.indices = std::move(group.positions);
    load.make = [samples = std::make_shared<std::vector<Item>>(std::move(group.samples)),
                 collate = collate_,
                 unbatched = unbatched_](const IndexBatch&, const LoadContext& context) {
      return AnyBatch(new Batch(make(*collate, std::move(*samples), unbatched, context)));
    };
    auto& facts = load.facts;
    facts.last = !ahead_ && !failure_;
    if (facts.last && !drop_last_) {
      facts.remainder = group.genuine == cut_.group ? 0 : group.genuine;
      facts.padded_size = cut_.group;
    }
    facts.samples_after = group.end * samples_per_item_;
    facts.batches_after = ++groups_;
    facts.dataset_state = std::move(group.dataset_state);
    return load;
  }

 private:
  struct Group {
    std::vector<Item> samples = {};
    IndexBatch positions = {};
    std::int64_t genuine = 0;
    std::int64_t end = 0;
    std::optional<Value> dataset_state = std::nullopt;
  };

  static Batch make(Collate& collate, std::vector<Item> samples, bool unbatched,
                    const LoadContext& context) {
    if constexpr (yields_whole_batches<D>()) {
      return make_batch(collate, std::move(samples.front()), context);
    } else {
      return Batching<Collate, Item>::make(collate, std::move(samples), unbatched, context);
    }
  }

  /// Touches the dataset with the first `next` only. With workers that is in worker 0, behind
  /// whatever an abandoned pass over the same dataset still does there.
  void begin() {
    if (shard_.num_processes > 1) seed_generator(*dataset_, epoch_);
    reader_.emplace(dataset_, items_at_once_, epoch_);
    go_to_start();
    look_ahead();
  }

  /// Whole batches count as full ones: how many samples are in them only the dataset knows.
  void go_to_start() {
    const auto items = shard_.skip_samples / samples_per_item_;
    if constexpr (KeepsState<D>) {
      if (shard_.dataset_state) {
        dataset_->load_state_dict(*shard_.dataset_state);
        position_ = items;
        return;
      }
    }
    while (position_ < items && read()) {
    }
  }

  std::optional<Item> read() {
    SampleChecks::stop_if_cancelled();
    std::optional<Item> item = reader_->next();
    if (!item) return item;
    ++position_;
    if constexpr (std::copy_constructible<Item>) {
      if (cut_.fills_up && std::ssize(first_) < cut_.group) first_.push_back(*item);
    }
    return item;
  }

  /// An exception while reading ahead is kept for the next call: the batch before it is good.
  void look_ahead() {
    ahead_.reset();
    try {
      ahead_ = read_group();
    } catch (...) {
      failure_ = std::current_exception();
    }
  }

  std::optional<Group> read_group() {
    if (ended_) return std::nullopt;
    Group group;
    for (; group.genuine < cut_.group; ++group.genuine) {
      auto item = read();
      if (!item) break;
      if (group.genuine < cut_.begin || group.genuine >= cut_.end) continue;
      group.samples.push_back(std::move(*item));
      group.positions.push_back(position_ - 1);
    }
    ended_ = group.genuine < cut_.group;
    group.end = position_;
    if constexpr (KeepsState<D>) group.dataset_state = dataset_->state_dict();
    if (group.genuine == 0 || (ended_ && drop_last_)) return std::nullopt;
    if (ended_) fill_up(group);
    return group;
  }

  void fill_up([[maybe_unused]] Group& group) {
    if constexpr (std::copy_constructible<Item>) {
      if (!cut_.fills_up) return;
      check_filling(std::ssize(first_), cut_.end - cut_.begin);
      for (auto at = std::max(group.genuine, cut_.begin); at < cut_.end; ++at) {
        const auto from = (at - group.genuine) % std::ssize(first_);
        group.samples.push_back(first_[static_cast<std::size_t>(from)]);
        group.positions.push_back(from);
      }
    }
  }

  std::shared_ptr<D> dataset_;
  std::optional<ItemReader<D>> reader_ = std::nullopt;
  std::shared_ptr<Collate> collate_;
  std::size_t items_at_once_;
  bool unbatched_;
  bool drop_last_;
  std::int64_t samples_per_item_;
  StreamCut cut_;
  StreamShard shard_;
  std::int64_t epoch_;
  std::vector<Item> first_ = {};
  std::int64_t position_ = 0;
  std::int64_t groups_;
  bool ended_ = false;
  std::optional<Group> ahead_ = std::nullopt;
  std::exception_ptr failure_ = nullptr;
};

template <IterableDataset D, class Collate>
auto stream_batch_type() {
  if constexpr (yields_whole_batches<D>()) {
    return std::type_identity<decltype(make_batch(std::declval<Collate&>(),
                                                  std::declval<ItemOf<D>>(), LoadContext()))>{};
  } else {
    return std::type_identity<typename Batching<Collate, ItemOf<D>>::Batch>{};
  }
}

/// An iterable dataset with its collate function.
template <IterableDataset D, class Collate>
class IterableSource final : public StreamFactory {
 public:
  using Batch = typename decltype(stream_batch_type<D, Collate>())::type;

  IterableSource(std::shared_ptr<D> dataset, std::shared_ptr<Collate> collate,
                 DataLoaderOptions options)
      : dataset_(std::move(dataset)), collate_(std::move(collate)), options_(std::move(options)) {
    if constexpr (!yields_whole_batches<D>()) {
      using Rule = Batching<Collate, ItemOf<D>>;
      SampleChecks::batching(options_.batch_size, Rule::kJoins, Rule::kPasses);
    }
  }

  std::unique_ptr<LoadSource> begin(const StreamShard& shard, std::int64_t epoch) const override {
    return std::make_unique<SampleStream<D, Collate, Batch>>(dataset_, collate_, options_, shard,
                                                             epoch);
  }
  bool keeps_state() const override { return KeepsState<D>; }
  std::optional<at::Generator> generator() const override { return generator_of(*dataset_); }
  bool deals_samples() const override {
    return options_.batch_size && !yields_whole_batches<D>() && std::copy_constructible<ItemOf<D>>;
  }
  std::int64_t num_shards() const override {
    if constexpr (kShards) return static_cast<std::int64_t>(dataset_->num_shards());
    return 0;
  }
  std::shared_ptr<StreamFactory> shard([[maybe_unused]] std::int64_t count,
                                       [[maybe_unused]] std::int64_t index) const override {
    if constexpr (kShards) {
      return std::make_shared<IterableSource>(std::make_shared<D>(dataset_->shard(count, index)),
                                              collate_, options_);
    }
    return nullptr;
  }

 private:
  static constexpr bool kShards = requires(D& dataset, std::int64_t n) {
    static_cast<std::int64_t>(dataset.num_shards());
    D(dataset.shard(n, n));
  };

  std::shared_ptr<D> dataset_;
  std::shared_ptr<Collate> collate_;
  DataLoaderOptions options_;
};

}  // namespace accelerate::detail::data
