// accelerate/detail/data/make_recipe.h - a loader from dataset, sampler and options.
//
// Internal to accelerate/data_loader.h.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <typeinfo>
#include <utility>

#include "accelerate/api.h"
#include "accelerate/data/batch_samplers.h"
#include "accelerate/data/options.h"
#include "accelerate/detail/data/indexed_fetch.h"
#include "accelerate/detail/data/loader_core.h"
#include "accelerate/detail/data/loader_recipe.h"
#include "accelerate/detail/data/sample_stream.h"
#include "accelerate/errors.h"
#include "accelerate/samplers.h"

namespace accelerate {

template <class Batch>
class DataLoader;

namespace detail::data {

/// The sampler that the options ask for. Throws `ArgumentError` without a dataset size.
[[nodiscard]] ACCELERATE_API std::shared_ptr<BatchIndexSampler> batches_of(
    const DataLoaderOptions& options, const std::optional<std::int64_t>& dataset_size);
[[nodiscard]] ACCELERATE_API std::shared_ptr<BatchIndexSampler> batches_of(
    const DataLoaderOptions& options, std::shared_ptr<Sampler> sampler);

template <class T>
struct Pointee {
  using type = T;
  static std::shared_ptr<T> own(T dataset) { return std::make_shared<T>(std::move(dataset)); }
};
template <class T>
struct Pointee<std::shared_ptr<T>> {
  using type = T;
  static std::shared_ptr<T> own(std::shared_ptr<T> dataset) {
    if (!dataset) {
      throw ArgumentError("The dataset is a null pointer. Pass one that points to a dataset.");
    }
    return dataset;
  }
};
template <class T>
using PointeeOf = typename Pointee<T>::type;

/// True if a loader without a sampler can load from a `D`; a compile error says what is missing.
template <class D>
[[nodiscard]] constexpr bool check_dataset() {
  constexpr bool known = IndexedDataset<D> || IterableDataset<D>;
  constexpr bool counted = !IndexedDataset<D> || HasLength<D>;
  static_assert(known || !HasLength<D>,
                "accelerate: this dataset has size(), but no get(index). Write get(std::size_t "
                "index), which returns a sample; accelerate/datasets.h lists what else fits.");
  static_assert(known || HasLength<D>,
                "accelerate: this is no dataset. Write size() and get(std::size_t index), or for "
                "iterable data next(), which returns an optional; accelerate/datasets.h lists what "
                "else fits.");
  static_assert(counted,
                "accelerate: this dataset has get(index), but no size(). Write size(), or name the "
                "samples with a sampler or a list of indices.");
  return known && counted;
}

/// A loader over indexed data; `batches(dataset_size)` returns the batch sampler.
template <IndexedDataset D, class Collate, class Batches>
auto indexed_loader(const std::shared_ptr<D>& dataset, DataLoaderOptions options, Collate collate,
                    Batches batches) {
  using Fetch = IndexedFetch<D, Collate>;
  using Batch = typename Fetch::Batch;
  LoaderRecipe recipe;
  recipe.dataset_type = &typeid(D);
  recipe.dataset_size = dataset_length(*dataset);
  recipe.batch_sampler = batches(recipe.dataset_size);
  recipe.fetch = [fetch = Fetch(dataset, std::move(collate), options.batch_size)](
                     const IndexBatch& indices, const LoadContext& context) {
    return AnyBatch(new Batch(fetch(indices, context)));
  };
  recipe.options = std::move(options);
  if constexpr (requires { dataset->set_epoch(std::int64_t{}); }) {
    recipe.set_epoch = [dataset](std::int64_t epoch) { dataset->set_epoch(epoch); };
  }
  if constexpr (Columns<D>) {
    recipe.fingerprint = [dataset] { return BatchTensors::fingerprint(tree::leaves(*dataset)); };
  }
  return DataLoader<Batch>(std::make_shared<LoaderCore>(std::move(recipe)));
}

template <IterableDataset D, class Collate>
auto iterable_loader(std::shared_ptr<D> dataset, DataLoaderOptions options, Collate collate) {
  using Source = IterableSource<D, Collate>;
  LoaderRecipe recipe;
  recipe.dataset_type = &typeid(D);
  recipe.dataset_size = dataset_length(std::as_const(*dataset));
  recipe.stream = std::make_shared<Source>(std::move(dataset),
                                           std::make_shared<Collate>(std::move(collate)), options);
  recipe.options = std::move(options);
  return DataLoader<typename Source::Batch>(std::make_shared<LoaderCore>(std::move(recipe)));
}

}  // namespace detail::data
}  // namespace accelerate
