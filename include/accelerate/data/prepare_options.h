// accelerate/data/prepare_options.h - how a data loader is shared out to processes.
//
// Part of accelerate/prepared_loader.h.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/enums.h"
#include "accelerate/fwd.h"
#include "accelerate/parallelism_config.h"

namespace accelerate {

/// The arguments of Python's `prepare_data_loader`. The function that cuts dispatched batches is an
/// argument of ours, since its type depends on that of a batch.
struct PrepareDataLoaderOptions {
  /// Where batches go if `put_on_device`. Unset: the device of `PartialState`.
  std::optional<c10::Device> device = std::nullopt;
  /// Unset: those of `PartialState`.
  std::optional<int> num_processes = std::nullopt;
  std::optional<int> process_index = std::nullopt;
  /// Cut each batch into one part per process, instead of giving each process whole batches.
  bool split_batches = false;
  bool put_on_device = false;
  /// Which random states all processes take from process 0 before each pass. `kGenerator` is that
  /// of the sampler or the iterable dataset, and left out where there is none; a generator that you
  /// gave a sampler is among them in any case.
  std::vector<RNGType> rng_types = {};
  /// Read on process 0 and send the others their part; needs `put_on_device`. Unset: for iterable
  /// datasets that are put on a device.
  std::optional<bool> dispatch_batches = std::nullopt;
  /// Repeat samples from the start so that all processes see equally many batches.
  bool even_batches = true;
  /// Replace a random sampler by a `SeedableRandomSampler`.
  bool use_seedable_sampler = false;
  /// The seed of the seedable sampler. Unset: that of Torch's default generator.
  std::optional<std::int64_t> data_seed = std::nullopt;
  bool non_blocking = false;
  /// Kept for ported programs: the position of a loader of ours can always be saved.
  bool use_stateful_dataloader = false;
  /// Ranks along "tp", "cp", "sp" and "pp" are given the same data.
  std::optional<MeshLayout> device_mesh = std::nullopt;
  /// Ours: the dataset of each process already holds its part alone. Nothing is dealt out, and
  /// `split_batches` and `dispatch_batches` are refused.
  bool already_sharded = false;
};

/// What a configuration asks for; the rest is left at its default.
[[nodiscard]] ACCELERATE_API PrepareDataLoaderOptions
prepare_options(const DataLoaderConfiguration& configuration);

/// Which samples of a dispatched round a process takes.
struct DispatchSlice {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  int process_index = 0;
  int num_processes = 1;
};

/// Cuts the part of a process out of a dispatched round, in place of `slice_tensors`.
template <class Batch>
using SliceFunction = std::function<Batch(const Batch& round, const DispatchSlice& slice)>;

}  // namespace accelerate
