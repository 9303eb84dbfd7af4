// accelerate/detail/data/indexed_fetch.h - batches of an indexed dataset: samples read by index and
// collated.
//
// Internal to accelerate/data_loader.h.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/util/ArrayRef.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <ranges>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/data/batch_samplers.h"
#include "accelerate/data/collate.h"
#include "accelerate/data/worker_generator.h"
#include "accelerate/datasets.h"
#include "accelerate/detail/data/batch_tensors.h"
#include "accelerate/tree.h"

namespace accelerate::detail::data {

struct ACCELERATE_API SampleChecks {
  /// Throws `ArgumentError` for an index that a range of `size` items does not have.
  static void index(std::int64_t index, std::int64_t size);
  /// Remembers which sample this thread could not read, for the error that names it.
  static void note_failed(std::int64_t index) noexcept;
  /// Throws in a worker whose pass was left: the batch that it loads will not be taken.
  static void stop_if_cancelled();
  /// Throws `ArgumentError` where the types are not made for the batch size: batches need a collate
  /// function that joins samples, and an unset size one that takes them singly, or none at all.
  static void batching(const std::optional<std::int64_t>& batch_size, bool joins, bool passes);
  [[noreturn]] static void refuse_joining();
};

/// One sample by its index.
template <IndexedDataset D>
auto read_sample(D& dataset, std::int64_t index) {
  const auto at = static_cast<std::size_t>(index);
  if constexpr (Columns<D>) {
    return tree::map([index](const at::Tensor& t) { return BatchTensors::row(t, index, {}); },
                     std::as_const(dataset));
  } else if constexpr (GetsWithGenerator<D>) {
    return dataset.get(at, worker_generator());
  } else if constexpr (Gets<D>) {
    return dataset.get(at);
  } else if constexpr (RandomAccess<D>) {
    SampleChecks::index(index, static_cast<std::int64_t>(std::ranges::size(dataset)));
    return std::ranges::range_value_t<D>(
        std::ranges::begin(dataset)[static_cast<std::ranges::range_difference_t<D>>(index)]);
  } else {
    return dataset[at];
  }
}

template <IndexedDataset D>
auto read_noted(D& dataset, std::int64_t index) {
  SampleChecks::stop_if_cancelled();
  try {
    return read_sample(dataset, index);
  } catch (...) {
    SampleChecks::note_failed(index);
    throw;
  }
}

/// The samples of a batch in a vector, or whatever the dataset makes of them itself.
template <IndexedDataset D>
auto read_samples(D& dataset, const IndexBatch& indices) {
  if constexpr (!Columns<D> && !GetsWithGenerator<D> && GetsBatches<D>) {
    const std::vector<std::size_t> request(indices.begin(), indices.end());
    return dataset.get_batch(c10::ArrayRef<std::size_t>(request));
  } else {
    std::vector<std::remove_cvref_t<decltype(read_sample(dataset, 0))>> samples;
    samples.reserve(indices.size());
    for (const std::int64_t index : indices) samples.push_back(read_noted(dataset, index));
    return samples;
  }
}

/// Reads samples and moves their tensors into the batch one by one.
template <IndexedDataset D>
auto read_samples(D& dataset, const IndexBatch& indices, RowsInPlace& in_place) {
  std::vector<std::remove_cvref_t<decltype(read_sample(dataset, 0))>> samples;
  samples.reserve(indices.size());
  for (const std::int64_t index : indices) {
    samples.push_back(read_noted(dataset, index));
    std::size_t leaf = 0;
    const auto move_in = [&](const TreePath&, at::Tensor& tensor) {
      in_place.move_in(leaf++, samples.size() - 1, tensor);
    };
    tree::detail::LeafVisitor<decltype(move_in)> visitor{move_in};
    tree::detail::walk<at::Tensor>(samples.back(), visitor, TreePath());
  }
  return samples;
}

template <class Collate, class Samples>
concept Collates =
    std::invocable<Collate&, Samples> || std::invocable<Collate&, Samples, at::Generator&>;

template <class Collate, class Samples>
auto call_collate(Collate& collate, Samples&& samples) {
  if constexpr (std::invocable<Collate&, Samples, at::Generator&>) {
    return std::invoke(collate, std::forward<Samples>(samples), worker_generator());
  } else {
    return std::invoke(collate, std::forward<Samples>(samples));
  }
}

/// The batch of what `read_samples` returned.
template <class Collate, class Samples>
auto make_batch(Collate& collate, Samples samples, const LoadContext& context) {
  if constexpr (!std::same_as<Collate, DefaultCollate>) {
    return pinned(call_collate(collate, std::move(samples)), context);
  } else if constexpr (kIsVector<Samples>) {
    return collate_samples(samples, context);
  } else {
    return pinned(std::move(samples), context);
  }
}

/// How samples of one type become batches: joined, or each by itself where the dataset yields
/// batches (`batch_size` unset).
template <class Collate, class Sample>
struct Batching {
  static constexpr bool kDefault = std::same_as<Collate, DefaultCollate>;
  static constexpr bool kJoins = kDefault || Collates<Collate, std::vector<Sample>>;
  static_assert(kJoins || Collates<Collate, Sample>,
                "accelerate: the collate function cannot be called with a std::vector of the "
                "samples of this dataset, nor with a single sample (for batch_size = nullopt).");

  static auto batch_type() {
    if constexpr (kJoins) {
      return std::type_identity<decltype(make_batch(
          std::declval<Collate&>(), std::declval<std::vector<Sample>>(), LoadContext()))>{};
    } else {
      return std::type_identity<decltype(call_collate(std::declval<Collate&>(),
                                                      std::declval<Sample>()))>{};
    }
  }
  using Batch = typename decltype(batch_type())::type;
  static constexpr bool kPasses = kDefault ? std::same_as<Batch, Sample> : !kJoins;

  static Batch make(Collate& collate, std::vector<Sample> samples, bool unbatched,
                    const LoadContext& context) {
    if constexpr (kPasses) {
      if (unbatched) {
        Sample sample = std::move(samples.front());
        if constexpr (kDefault) {
          return pinned(std::move(sample), context);
        } else {
          return pinned(call_collate(collate, std::move(sample)), context);
        }
      }
    }
    if constexpr (kJoins) {
      return make_batch(collate, std::move(samples), context);
    } else {
      SampleChecks::refuse_joining();
    }
  }
};

/// Makes the batches of an indexed dataset.
template <IndexedDataset D, class Collate>
class IndexedFetch {
  using Samples = decltype(read_samples(std::declval<D&>(), IndexBatch()));
  static constexpr bool kGathers = Columns<D> && std::same_as<Collate, DefaultCollate>;

  static auto batch_type() {
    if constexpr (kGathers) {
      return std::type_identity<D>{};
    } else if constexpr (kIsVector<Samples>) {
      return std::type_identity<typename Batching<Collate, typename Samples::value_type>::Batch>{};
    } else {
      return std::type_identity<decltype(make_batch(std::declval<Collate&>(),
                                                    std::declval<Samples>(), LoadContext()))>{};
    }
  }

 public:
  using Batch = typename decltype(batch_type())::type;

  IndexedFetch(std::shared_ptr<D> dataset, Collate collate,
               const std::optional<std::int64_t>& batch_size)
      : dataset_(std::move(dataset)),
        collate_(std::make_shared<Collate>(std::move(collate))),
        unbatched_(!batch_size) {
    if constexpr (!kGathers && kIsVector<Samples>) {
      using Rule = Batching<Collate, typename Samples::value_type>;
      SampleChecks::batching(batch_size, Rule::kJoins, Rule::kPasses);
    }
  }

  Batch operator()(const IndexBatch& indices, const LoadContext& context) const {
    if constexpr (kGathers) {
      const auto gather = [&](const at::Tensor& tensor) {
        return unbatched_ ? BatchTensors::row(tensor, indices.front(), context)
                          : BatchTensors::rows(tensor, indices, context);
      };
      return tree::map(gather, std::as_const(*dataset_));
    } else if constexpr (kIsVector<Samples>) {
      using Rule = Batching<Collate, typename Samples::value_type>;
      if constexpr (Rule::kDefault && !GetsBatches<D> && TensorTree<typename Samples::value_type>) {
        if (!unbatched_ && !indices.empty()) {
          RowsInPlace in_place(indices.size(), context);
          auto with_rows = context;
          with_rows.in_place = &in_place;
          return Rule::make(*collate_, read_samples(*dataset_, indices, in_place), false,
                            with_rows);
        }
      }
      return Rule::make(*collate_, read_samples(*dataset_, indices), unbatched_, context);
    } else {
      return make_batch(*collate_, read_samples(*dataset_, indices), context);
    }
  }

 private:
  std::shared_ptr<D> dataset_;
  std::shared_ptr<Collate> collate_;
  bool unbatched_;
};

}  // namespace accelerate::detail::data
