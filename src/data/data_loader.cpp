#include "accelerate/data_loader.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/random.h>

#include "accelerate/errors.h"
#include "core/text.h"
#include "data/batch_plan.h"
#include "data/preparation.h"

namespace accelerate {

DataLoaderError::~DataLoaderError() = default;
DataLoaderTimeout::~DataLoaderTimeout() = default;

namespace detail::data {
namespace {

void validate_numbers(const DataLoaderOptions& options) {
  if (options.batch_size && *options.batch_size < 1) {
    throw ArgumentError(str("batch_size is ", *options.batch_size,
                            ", but a batch needs at least one sample. Leave it unset ",
                            "(std::nullopt) where the dataset yields batches."));
  }
  if (options.num_workers < 0) {
    throw ArgumentError(str("num_workers is ", options.num_workers,
                            ", but must not be negative; 0 loads in the calling thread."));
  }
  if (options.timeout.count() < 0) {
    throw ArgumentError(str("timeout is ", options.timeout.count(),
                            " ms, but must not be negative; 0 sets no limit."));
  }
  if (options.prefetch_factor && *options.prefetch_factor < 1) {
    throw ArgumentError(str("prefetch_factor is ", *options.prefetch_factor,
                            ", but a worker needs at least one batch to load."));
  }
}

// What would end in std::bad_alloc, or in an allocation of gigabytes.
void validate_memory(const DataLoaderOptions& options) {
  constexpr std::int64_t kMostWorkers = 1 << 16;
  constexpr std::int64_t kMostBatches = 1 << 20;
  if (options.batch_size) check_batch_size_is_possible(*options.batch_size);
  if (options.num_workers > kMostWorkers) {
    throw ArgumentError(str("num_workers is ", options.num_workers,
                            ", but a data loader has at most ", kMostWorkers,
                            " threads. One per core is usual."));
  }
  const auto each = options.prefetch_factor.value_or(1);
  if (options.num_workers > 0 && each > kMostBatches / options.num_workers) {
    throw ArgumentError(str("prefetch_factor is ", each, " and num_workers is ",
                            options.num_workers, ", but a data loader holds at most ", kMostBatches,
                            " batches (2^20). A prefetch_factor of 2 to 16 is usual."));
  }
}

void validate_workers(const DataLoaderOptions& options) {
  if (options.num_workers > 0) return;
  const char* needs = options.prefetch_factor       ? "prefetch_factor"
                      : options.persistent_workers  ? "persistent_workers"
                      : options.timeout.count() > 0 ? "timeout"
                                                    : nullptr;
  if (needs == nullptr) return;
  throw ArgumentError(str(needs,
                          " is for workers, but num_workers is 0. Set num_workers, or leave ",
                          needs, " as it is."));
}

}  // namespace

void validate(const DataLoaderOptions& options, LoaderInput input) {
  validate_numbers(options);
  validate_memory(options);
  validate_workers(options);
  if (input == LoaderInput::kIterable && options.shuffle) {
    throw ArgumentError(
        "shuffle is set for an iterable dataset, which comes in its own order. Shuffle in the "
        "dataset, or make it one with samples by index.");
  }
  if (input == LoaderInput::kSampler && options.shuffle) {
    throw ArgumentError(
        "There is a sampler and shuffle is set as well, but each of them decides the order. Leave "
        "one of them out.");
  }
  if (input == LoaderInput::kBatchSampler &&
      (options.batch_size != 1 || options.shuffle || options.drop_last)) {
    throw ArgumentError(
        "A batch sampler decides on batch_size, shuffle and drop_last itself. Leave these options "
        "out.");
  }
  if (!options.batch_size && options.drop_last) {
    throw ArgumentError(
        "drop_last is set and batch_size is not, but without a batch size no batch is incomplete. "
        "Set batch_size, or leave drop_last out.");
  }
}

void SampleChecks::batching(const std::optional<std::int64_t>& batch_size, bool joins,
                            bool passes) {
  if (batch_size && !joins) refuse_joining();
  if (!batch_size && !passes) {
    throw ArgumentError(
        "batch_size is not set, so each sample of the dataset is to be a batch, but what is set to "
        "collate makes a batch of several samples. Set batch_size, or pass a collate function that "
        "takes one sample.");
  }
}

void SampleChecks::refuse_joining() {
  throw ArgumentError(
      "The collate function takes one sample, but batch_size is set. Pass one that takes a "
      "std::vector of samples, or set batch_size to std::nullopt.");
}

void SampleChecks::index(std::int64_t index, std::int64_t size) {
  if (index >= 0 && index < size) return;
  throw ArgumentError(
      str("Sample ", index, " was asked for, but the dataset has ", size, " samples."));
}

std::shared_ptr<BatchIndexSampler> batches_of(const DataLoaderOptions& options,
                                              std::shared_ptr<Sampler> sampler) {
  return std::make_shared<BatchSampler>(std::move(sampler), options.batch_size.value_or(1),
                                        options.drop_last);
}

std::shared_ptr<BatchIndexSampler> batches_of(const DataLoaderOptions& options,
                                              const std::optional<std::int64_t>& dataset_size) {
  if (!dataset_size) {
    throw ArgumentError(
        "The dataset does not say how many samples it has. Pass a sampler that knows which of them "
        "to load.");
  }
  if (!options.shuffle) {
    return batches_of(options, std::make_shared<SequentialSampler>(*dataset_size));
  }
  return batches_of(options,
                    std::make_shared<RandomSampler>(
                        *dataset_size, RandomSamplerOptions{.generator = options.generator}));
}

std::uint64_t draw_base_seed(const std::optional<at::Generator>& generator) {
  const auto drawn = at::empty({}, at::kLong).random_(generator);
  return static_cast<std::uint64_t>(drawn.item<std::int64_t>());
}

std::optional<std::int64_t> batch_size_of(const LoaderRecipe& recipe) {
  const bool asks = recipe.options.batch_size && recipe.batch_sampler;
  return asks ? recipe.batch_sampler->batch_size() : recipe.options.batch_size;
}

}  // namespace detail::data
}  // namespace accelerate
