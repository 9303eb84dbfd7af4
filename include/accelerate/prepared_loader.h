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
#include <memory>
#include <type_traits>
#include <utility>

#include "accelerate/api.h"
#include "accelerate/data_loader.h"
#include "accelerate/device_lane.h"
#include "accelerate/dispatch.h"
#include "accelerate/iterable_dataset_shard.h"
#include "accelerate/prepare_options.h"
#include "accelerate/prepared_core.h"

namespace accelerate {

// Python's names. How the data are shared is not part of the type here: functions that take a
// loader take a prepared one too.
template <class Batch>
using DataLoaderShard = DataLoader<Batch>;
template <class Batch>
using DataLoaderDispatcher = DataLoader<Batch>;
template <class Batch>
using SkipDataLoader = DataLoader<Batch>;

namespace detail {

/// Throws `ArgumentError` for a negative number.
ACCELERATE_API void check_skip(std::int64_t num_batches);
[[noreturn]] ACCELERATE_API void refuse_skipped_stream();

template <class Batch>
LoaderTraits traits_of(const DataLoader<Batch>& loader) {
  const auto& recipe = *loader._core()->recipe();
  LoaderTraits traits;
  traits.batch_sampler = recipe.batch_sampler;
  if (recipe.options.batch_size) traits.batch_size = loader.batch_size();
  traits.dataset_size = recipe.dataset_size;
  traits.fingerprint = recipe.fingerprint;
  if (recipe.stream) {
    traits.deals_samples = recipe.stream->deals_samples();
    traits.num_shards = recipe.stream->num_shards();
    traits.stream_generator = recipe.stream->generator();
  }
  return traits;
}

}  // namespace detail

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
  const auto& core = loader._core();
  if (std::dynamic_pointer_cast<detail::PreparedCore<Batch>>(core)) return loader;

  auto how = detail::prepare(detail::traits_of(loader), options);
  auto recipe = std::make_shared<detail::LoaderRecipe<Batch>>(*core->recipe());
  recipe->batch_sampler = how.batch_sampler;
  recipe->for_device = how.device && detail::DeviceLane::leads_to(*how.device);
  if (core->skip_batches() > 0) {
    if (recipe->stream) detail::refuse_skipped_stream();
    recipe->batch_sampler =
        std::make_shared<SkipBatchSampler>(recipe->batch_sampler, core->skip_batches());
  }
  if (how.sharing == detail::Sharing::kNative) {
    recipe->stream = recipe->stream->shard(how.num_processes, how.process_index);
  }
  if (how.sharing == detail::Sharing::kDispatch) {
    return DataLoader<Batch>(std::make_shared<detail::DispatcherCore<Batch>>(
        std::move(recipe), std::move(how), std::move(slice_fn_for_dispatch)));
  }
  return DataLoader<Batch>(
      std::make_shared<detail::ShardCore<Batch>>(std::move(recipe), std::move(how)));
}

/// A loader like this one, prepared or not, without the first `num_batches` batches that this
/// process would be given. It keeps the epoch; the loader that is passed is not changed. Where
/// samples have indices nothing is loaded to get there, streams are read and passed over. Throws
/// `ArgumentError` for a negative number.
template <class Batch>
[[nodiscard]] DataLoader<Batch> skip_first_batches(const DataLoader<Batch>& loader,
                                                   std::int64_t num_batches = 0) {
  detail::check_skip(num_batches);
  return DataLoader<Batch>(loader._core()->skipping(num_batches));
}

}  // namespace accelerate
