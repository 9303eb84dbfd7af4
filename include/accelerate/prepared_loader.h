// accelerate/prepared_loader.h - data loaders that several processes share, and where they stand.
//
//     auto loader = accelerate::prepare_data_loader(
//         accelerate::make_data_loader(data, {.batch_size = 16, .shuffle = true}),
//         {.put_on_device = true, .rng_types = {RNGType::kGenerator}});
//     for (auto& batch : loader) ...            // the batches of this process
//
//     for (auto& batch : skip_first_batches(loader, 100)) ...
//
// Functions marked "Collective" must be called by every process, in one order; loops over prepared
// loaders are collective too where random states are synchronised or batches are dispatched.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "accelerate/data/iterable_dataset_shard.h"
#include "accelerate/data/prepare_options.h"
#include "accelerate/data_loader.h"
#include "accelerate/detail/data/batch_type.h"
#include "accelerate/detail/data/loader_core.h"

namespace accelerate {

// Python's names. How the data are shared is not part of the type here: functions that take a
// loader take a prepared one too.
template <class Batch>
using DataLoaderShard = DataLoader<Batch>;
template <class Batch>
using DataLoaderDispatcher = DataLoader<Batch>;
template <class Batch>
using SkipDataLoader = DataLoader<Batch>;

/// Collective. The loader with the batches of this process alone, as Python's
/// `prepare_data_loader`. A loader that is prepared already is returned as it is.
///
/// The loader that is passed stays usable; its sampler is shared, and given a generator that all
/// processes seed alike if it is random and has none. `slice_fn_for_dispatch` cuts the part of this
/// process out of what process 0 read, where batches are dispatched.
///
/// Throws `ArgumentError` for options that do not fit the loader or each other.
template <class Batch>
[[nodiscard]] DataLoader<Batch> prepare_data_loader(
    const DataLoader<Batch>& loader, const PrepareDataLoaderOptions& options = {},
    std::type_identity_t<SliceFunction<Batch>> slice_fn_for_dispatch = {}) {
  detail::data::AnySlice slice;
  if (slice_fn_for_dispatch) {
    slice = [typed = std::move(slice_fn_for_dispatch)](const detail::data::AnyBatch& round,
                                                       const DispatchSlice& part) {
      return detail::data::AnyBatch(new Batch(typed(round.as<Batch>(), part)));
    };
  }
  return DataLoader<Batch>(
      loader._core()->prepare(options, detail::data::kBatchType<Batch>, std::move(slice)));
}

/// A loader like this one, prepared or not, without the first `num_batches` batches that this
/// process would be given. It keeps the epoch; the loader that is passed is not changed. Where
/// samples have indices nothing is loaded to get there, streams are read and passed over. Throws
/// `ArgumentError` for a negative number.
template <class Batch>
[[nodiscard]] DataLoader<Batch> skip_first_batches(const DataLoader<Batch>& loader,
                                                   std::int64_t num_batches = 0) {
  return DataLoader<Batch>(loader._core()->skipping(num_batches));
}

}  // namespace accelerate
