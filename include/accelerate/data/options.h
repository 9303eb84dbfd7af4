// accelerate/data/options.h - how a data loader is set up, and what it throws.
//
// Part of accelerate/data_loader.h.
#pragma once

#include <ATen/core/Generator.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/errors.h"

namespace accelerate {

/// The arguments of Python's `DataLoader`. Datasets, samplers and collate functions are arguments
/// of `make_data_loader`.
struct DataLoaderOptions {
  /// Samples per batch, up to 2^40. Unset: the dataset yields batches, each of them is handed on as
  /// it comes.
  std::optional<std::int64_t> batch_size = 1;
  /// Visit the samples in another random order in each pass.
  bool shuffle = false;
  /// Threads that load ahead. 0 loads in the thread that asks for a batch. With two or more the
  /// dataset and the collate function are called by several threads at once.
  std::int64_t num_workers = 0;
  /// Put the tensors of a batch into page-locked memory, which an accelerator copies from faster.
  bool pin_memory = false;
  /// Leave out the last batch when it is not full.
  bool drop_last = false;
  /// The longest wait for a batch of a worker; then `DataLoaderTimeout`. 0 waits without a limit.
  std::chrono::milliseconds timeout{0};
  /// Called by each worker before its first batch of a pass (of the first pass only, if
  /// `persistent_workers`) with its number and the pass's base seed plus that number.
  std::function<void(std::int64_t worker, std::uint64_t seed)> worker_init_fn = {};
  /// Draws the order and the base seed. Unset: the default CPU generator.
  std::optional<at::Generator> generator = std::nullopt;
  /// Batches in flight per worker: at most `prefetch_factor * num_workers` are held. Up to 2^20.
  /// Unset: 2.
  std::optional<std::int64_t> prefetch_factor = std::nullopt;
  bool persistent_workers = false;
  /// Hand out batches in the order of the plan. Otherwise: as workers finish them.
  bool in_order = true;
};

/// A batch could not be loaded. What the dataset, the collate function or the sampler threw is
/// nested: `std::rethrow_if_nested` gives it back.
class ACCELERATE_API DataLoaderError : public Error {
 public:
  DataLoaderError(const std::string& message, std::int64_t batch, std::vector<std::int64_t> indices,
                  std::optional<std::int64_t> sample = std::nullopt)
      : Error(message), batch_(batch), indices_(std::move(indices)), sample_(sample) {}
  ~DataLoaderError() override;

  /// The number of the batch in its pass.
  [[nodiscard]] std::int64_t batch() const noexcept { return batch_; }
  /// The samples it was to hold: indices into the dataset, or positions in an iterable one.
  [[nodiscard]] const std::vector<std::int64_t>& indices() const noexcept { return indices_; }
  /// The index that could not be read. Unset where it is not that of one sample: in a collate
  /// function, a stream, a dataset that reads whole batches.
  [[nodiscard]] const std::optional<std::int64_t>& sample() const noexcept { return sample_; }

 private:
  std::int64_t batch_;
  std::vector<std::int64_t> indices_;
  std::optional<std::int64_t> sample_;
};

/// A batch did not come within `DataLoaderOptions::timeout`.
class ACCELERATE_API DataLoaderTimeout : public DataLoaderError {
 public:
  using DataLoaderError::DataLoaderError;
  ~DataLoaderTimeout() override;
};

namespace detail::data {

/// What the options are combined with; decides which of them contradict.
enum class LoaderInput { kSamples, kSampler, kBatchSampler, kIterable };

/// Throws `ArgumentError` for what Python's `DataLoader` refuses, and for numbers that no memory
/// could hold.
ACCELERATE_API void validate(const DataLoaderOptions& options, LoaderInput input);

}  // namespace detail::data
}  // namespace accelerate
