// accelerate/detail/data/item_reader.h - iterable datasets, read item by item.
//
// Internal to accelerate/data_loader.h.
#pragma once

#include <ATen/core/Generator.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <ranges>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/datasets.h"
#include "accelerate/value.h"

namespace accelerate::detail::data {

template <class D>
concept HasNext = requires(D& dataset) {
  { dataset.next().has_value() } -> std::convertible_to<bool>;
};
/// LibTorch's stateful, stream and chunk datasets: `get_batch(count)`.
template <class D>
concept HasGetBatch = requires(D& dataset) { dataset.get_batch(std::size_t{}); };
template <class D>
concept Callable = requires(D& dataset) {
  { dataset().has_value() } -> std::convertible_to<bool>;
};
template <class D>
concept IterableDataset = !IndexedDataset<D> && (HasNext<D> || HasGetBatch<D> || Callable<D> ||
                                                 std::ranges::input_range<D>);

/// A dataset that can be taken up in the middle. Only where items come one by one: a reader that
/// asks for several would hold some that the state counts as read.
template <class D>
concept KeepsState = (HasNext<D> || Callable<D>) && requires(D& dataset, const Value& state) {
  { dataset.state_dict() } -> std::convertible_to<Value>;
  dataset.load_state_dict(state);
};

/// The generator that a dataset owns, if it has one.
template <class D>
std::optional<at::Generator> generator_of(D& dataset) {
  if constexpr (requires { std::optional<at::Generator>(dataset.generator()); }) {
    return dataset.generator();
  } else {
    return std::nullopt;
  }
}

/// Processes that share out a stream must all draw the same one: the epoch seeds the generator of a
/// dataset that is not told the epoch. As Python's `IterableDatasetShard`.
template <class D>
void seed_generator(D& dataset, std::int64_t epoch) {
  if constexpr (!requires { dataset.set_epoch(epoch); }) {
    if (auto own = generator_of(dataset)) {
      const std::lock_guard lock(own->mutex());
      own->set_current_seed(static_cast<std::uint64_t>(epoch));
    }
  }
}

/// The items of an iterable dataset, in one pass. The dataset itself holds the position, except in
/// ranges.
template <IterableDataset D>
class ItemReader {
 public:
  ItemReader(std::shared_ptr<D> dataset, std::size_t /*batch_size*/, std::int64_t epoch)
      : dataset_(std::move(dataset)) {
    tell_epoch(*dataset_, epoch);
    if constexpr (requires { dataset_->reset(); }) dataset_->reset();
  }
  auto next() {
    if constexpr (HasNext<D>) {
      return dataset_->next();
    } else {
      return (*dataset_)();
    }
  }

 private:
  std::shared_ptr<D> dataset_;
};

template <IterableDataset D>
  requires(!HasNext<D> && HasGetBatch<D>)
class ItemReader<D> {
  using Given = decltype(std::declval<D&>().get_batch(std::size_t{}));
  static constexpr bool kEnds = tree::detail::kIs<Given, std::optional>;

  static auto batch_type() {
    if constexpr (kEnds) {
      return std::type_identity<typename Given::value_type>{};
    } else {
      return std::type_identity<Given>{};
    }
  }
  using Items = typename decltype(batch_type())::type;

 public:
  /// Whether the dataset joins samples itself, so that an item is a whole batch.
  static constexpr bool kWhole = !kIsVector<Items>;

  ItemReader(std::shared_ptr<D> dataset, std::size_t batch_size, std::int64_t epoch)
      : dataset_(std::move(dataset)), batch_size_(batch_size) {
    tell_epoch(*dataset_, epoch);
    if constexpr (kEnds) {
      dataset_->reset();
    } else {
      left_ = dataset_length(*dataset_);  // such a stream never says that it has ended
    }
  }

  auto next() {
    if constexpr (kWhole) {
      return read();
    } else {
      using Item = typename Items::value_type;
      while (items_.empty()) {
        auto some = read();
        if (!some || (!kEnds && some->empty())) return std::optional<Item>();
        for (auto& item : *some) items_.push_back(std::move(item));
      }
      std::optional<Item> item = std::move(items_.front());
      items_.pop_front();
      return item;
    }
  }

 private:
  std::optional<Items> read() {
    auto count = batch_size_;
    if (left_) {
      count = std::min(count, static_cast<std::size_t>(*left_));
      if (count == 0) return std::nullopt;
      *left_ -= static_cast<std::int64_t>(count);
    }
    return dataset_->get_batch(count);
  }

  template <class Batch>
  struct Buffer {};
  template <class Item>
  struct Buffer<std::vector<Item>> : std::deque<Item> {};

  std::shared_ptr<D> dataset_;
  std::size_t batch_size_;
  std::optional<std::int64_t> left_ = std::nullopt;
  [[no_unique_address]] Buffer<Items> items_ = {};
};

template <IterableDataset D>
  requires(!HasNext<D> && !HasGetBatch<D> && !Callable<D>)
class ItemReader<D> {
 public:
  ItemReader(std::shared_ptr<D> dataset, std::size_t /*batch_size*/, std::int64_t epoch)
      : dataset_(std::move(dataset)) {
    tell_epoch(*dataset_, epoch);
  }
  std::optional<std::ranges::range_value_t<D>> next() {
    // Moves on only when asked: the step may wait for data.
    at_ ? void(++*at_) : void(at_.emplace(std::ranges::begin(*dataset_)));
    if (*at_ == std::ranges::end(*dataset_)) return std::nullopt;
    return **at_;
  }

 private:
  std::shared_ptr<D> dataset_;
  std::optional<std::ranges::iterator_t<D>> at_ = std::nullopt;
};

/// Whether items are whole batches whatever the batch size.
template <class D>
constexpr bool yields_whole_batches() {
  if constexpr (requires { ItemReader<D>::kWhole; }) {
    return ItemReader<D>::kWhole;
  } else {
    return false;
  }
}

template <class D>
using ItemOf =
    typename std::remove_cvref_t<decltype(std::declval<ItemReader<D>&>().next())>::value_type;

}  // namespace accelerate::detail::data
