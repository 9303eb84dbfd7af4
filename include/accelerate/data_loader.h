// accelerate/data_loader.h - batches of a dataset, loaded ahead by threads.
//
//     auto loader = accelerate::make_data_loader(std::pair{inputs, labels},
//                                                {.batch_size = 16, .shuffle = true});
//     for (auto& [x, y] : loader) ...
//
// Datasets: accelerate/datasets.h says what fits. Samplers: accelerate/samplers.h, LibTorch's, your
// own. The order of batches and all random numbers are those of one seed, whatever the number of
// workers; permutations are Python's. A loop may be left at any time and begun anew.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "accelerate/data/collate.h"
#include "accelerate/data/gather_for_metrics.h"
#include "accelerate/data/options.h"
#include "accelerate/data/padding.h"
#include "accelerate/data/sampler_adaptors.h"
#include "accelerate/data/state.h"
#include "accelerate/data/worker_generator.h"
#include "accelerate/datasets.h"
#include "accelerate/detail/data/loader_core.h"
#include "accelerate/detail/data/make_recipe.h"

namespace accelerate {

/// A range of batches. Copies are handles to one loader. Each loop is a pass of its own: passes may
/// nest, run side by side, be left early; the loader may go while one is under way.
///
/// A loader that goes waits for the samples that its workers are reading: up to 5 s, and 0.2 s
/// while an exception unwinds, so that a stuck dataset hides no error. A worker that has not come
/// back by then is left behind with a warning. It keeps dataset, collate function and
/// `worker_init_fn` alive; what these hold by pointer or reference must live until the process
/// ends.
template <class Batch>
class DataLoader {
 public:
  /// One pass. Move only; the batch it refers to stays until the next `++`.
  class iterator {
   public:
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;

    iterator() = default;
    explicit iterator(std::shared_ptr<detail::data::LoaderCore> core) : pass_(std::move(core)) {}

    Batch& operator*() const { return pass_.batch().template as<Batch>(); }
    Batch* operator->() const { return &**this; }
    iterator& operator++() {
      pass_.advance();
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return !pass_.batch(); }

   private:
    detail::data::LoaderPass pass_ = {};
  };
  using value_type = Batch;

  explicit DataLoader(std::shared_ptr<detail::data::LoaderCore> core) : core_(std::move(core)) {}

  /// Begins a pass and loads its first batch. Throws `DataLoaderError` with the exception that a
  /// dataset, sampler or collate function threw nested, as does `++`.
  [[nodiscard]] iterator begin() const { return iterator(_core()); }
  [[nodiscard]] std::default_sentinel_t end() const { return {}; }

  /// Batches in a pass: Python's `len(loader)`. Throws `StateError` where that is not known.
  [[nodiscard]] std::int64_t size() const { return _core()->size(); }
  /// Samples: Python's `len(loader.dataset)`. Throws `StateError` where that is not known.
  [[nodiscard]] std::int64_t dataset_size() const { return _core()->dataset_size(); }
  [[nodiscard]] const DataLoaderOptions& options() const { return _core()->recipe()->options; }
  /// Unset with a batch sampler that has none, and where the dataset yields batches.
  [[nodiscard]] std::optional<std::int64_t> batch_size() const { return _core()->batch_size(); }

  /// Complete passes so far, or what `set_epoch` said last. Seedable samplers, datasets with a
  /// `set_epoch` and `worker_generator` depend on it; a pass that is left early does not count.
  /// Throws `ArgumentError` for a negative epoch.
  [[nodiscard]] std::int64_t iteration() const { return _core()->iteration(); }
  void set_epoch(std::int64_t epoch) { _core()->set_epoch(epoch); }

  /// Where indices come from; null for iterable data, and for a batch sampler without one.
  [[nodiscard]] std::shared_ptr<Sampler> get_sampler() const {
    const auto& batch_sampler = _core()->recipe()->batch_sampler;
    return batch_sampler ? batch_sampler->sampler() : nullptr;
  }
  /// Takes another sampler for the passes to come. Throws `ArgumentError` where there is none.
  void set_sampler(std::shared_ptr<Sampler> sampler) { _core()->set_sampler(std::move(sampler)); }

  /// Whether the batch handed out last is the final one of its pass.
  [[nodiscard]] bool end_of_dataloader() const { return _core()->end_of_dataloader(); }
  /// With the final batch: how many samples of the final batches of all processes are genuine; -1
  /// if unknown. As in Python 0 if all are, but a dispatcher counts them then too.
  [[nodiscard]] std::int64_t remainder() const { return _core()->remainder(); }
  /// Samples that all processes together are given at once, where batches have a common size.
  [[nodiscard]] std::optional<std::int64_t> total_batch_size() const {
    return _core()->total_batch_size();
  }
  /// Samples of all processes together, also where each of them has its own. Throws `StateError`
  /// where that is not known.
  [[nodiscard]] std::int64_t total_dataset_length() const {
    return _core()->total_dataset_length();
  }

  /// What the user has been given so far, at any time, also with workers that have loaded ahead.
  /// Not exact with `in_order` off.
  [[nodiscard]] DataLoaderState state_dict() const { return _core()->state_dict(); }
  /// The next pass, and no other one, goes on behind the batch that was held when the state was
  /// taken: the same samples in the same order, for any number of processes. Indices are looked up,
  /// streams are read from their start unless they keep a state of their own. Throws
  /// `ArgumentError` for numbers that make no sense.
  void load_state_dict(const DataLoaderState& state) { _core()->load_state_dict(state); }

  /// Lets go of the data. The loader can only be assigned to after that: other uses throw
  /// `StateError`.
  void reset() noexcept { core_.reset(); }

  /// For this library. Throws `StateError` once the loader has let go of its data.
  [[nodiscard]] const std::shared_ptr<detail::data::LoaderCore>& _core() const {
    if (!core_) detail::data::LoaderCore::throw_freed();
    return core_;
  }

 private:
  std::shared_ptr<detail::data::LoaderCore> core_;
};

/// A loader over a dataset, in its order or shuffled. The dataset is moved or copied in; pass a
/// `std::shared_ptr` to share it. `collate` makes a batch of a `std::vector` of samples, and gets
/// the generator of the batch as well if it takes one; without it see accelerate/data/collate.h.
///
/// Throws `ArgumentError` for options that contradict each other, as Python's `DataLoader` does.
template <class D, class Collate = DefaultCollate>
[[nodiscard]] auto make_data_loader(D dataset, const DataLoaderOptions& options = {},
                                    Collate collate = {}) {
  if constexpr (detail::data::check_dataset<detail::data::PointeeOf<D>>()) {
    auto owned = detail::data::Pointee<D>::own(std::move(dataset));
    if constexpr (detail::data::IndexedDataset<detail::data::PointeeOf<D>>) {
      detail::data::validate(options, detail::data::LoaderInput::kSamples);
      return detail::data::indexed_loader(
          owned, options, std::move(collate),
          [&](const auto& size) { return detail::data::batches_of(options, size); });
    } else {
      detail::data::validate(options, detail::data::LoaderInput::kIterable);
      return detail::data::iterable_loader(std::move(owned), options, std::move(collate));
    }
  }
}

/// A loader over the samples that a sampler names: one of accelerate/samplers.h or LibTorch's, one
/// of your own (accelerate/data/sampler_adaptors.h), or a list of indices. With a batch sampler
/// `batch_size`, `shuffle` and `drop_last` are left as they are.
template <class D, class S, class Collate = DefaultCollate>
  requires(!std::convertible_to<S, const DataLoaderOptions&>)
[[nodiscard]] auto make_data_loader(D dataset, S sampler, const DataLoaderOptions& options = {},
                                    Collate collate = {}) {
  using Sampler = detail::data::PointeeOf<S>;
  static_assert(detail::data::IndexedDataset<detail::data::PointeeOf<D>>,
                "accelerate: a sampler needs a dataset with samples by index: get(index), or "
                "tensors, or a range with random access. Iterable data come in their own order.");
  static_assert(SamplerLike<Sampler> || BatchSamplerLike<Sampler>,
                "accelerate: the second argument of make_data_loader is neither options nor a "
                "sampler: one of accelerate/samplers.h, a list of indices, or an object with "
                "next() that returns an optional index (or list of indices) and begin(epoch).");
  auto owned = detail::data::Pointee<D>::own(std::move(dataset));
  if constexpr (BatchSamplerLike<Sampler>) {
    detail::data::validate(options, detail::data::LoaderInput::kBatchSampler);
    return detail::data::indexed_loader(owned, options, std::move(collate), [&](const auto&) {
      return as_batch_sampler(std::move(sampler));
    });
  } else {
    detail::data::validate(options, detail::data::LoaderInput::kSampler);
    return detail::data::indexed_loader(owned, options, std::move(collate), [&](const auto&) {
      return detail::data::batches_of(options, as_sampler(std::move(sampler)));
    });
  }
}

}  // namespace accelerate
