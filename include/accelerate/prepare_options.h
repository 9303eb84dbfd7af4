// accelerate/prepare_options.h - how a data loader is shared out to processes, and the decisions
// that follow from it.
//
// Part of accelerate/prepared_loader.h.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/batch_plan.h"
#include "accelerate/enums.h"
#include "accelerate/parallelism_config.h"
#include "accelerate/sampler_adaptors_detail.h"

namespace accelerate {

struct DataLoaderConfiguration;

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

namespace detail {

/// What decides how a loader is prepared, without its types.
struct LoaderTraits {
  std::shared_ptr<BatchIndexSampler> batch_sampler = nullptr;  // null for iterable data
  std::optional<std::int64_t> batch_size = std::nullopt;
  std::optional<std::int64_t> dataset_size = std::nullopt;
  std::function<std::uint64_t()> fingerprint = {};
  // Of iterable data:
  bool deals_samples = false;
  std::int64_t num_shards = 0;
  std::optional<at::Generator> stream_generator = std::nullopt;
};

enum class Sharing : std::uint8_t {
  /// This process walks all the data it has: it is alone, or has its part already.
  kNone,
  /// Batches, or samples of a stream, are dealt out.
  kDeal,
  /// The iterable dataset cuts itself.
  kNative,
  /// Process 0 reads.
  kDispatch
};

/// How a loader is prepared.
struct Preparation {
  Sharing sharing = Sharing::kNone;
  /// Who shares the data, this process among them.
  int num_processes = 1;
  int process_index = 0;
  bool split_batches = false;
  bool even_batches = true;
  bool already_sharded = false;
  /// With `already_sharded`: of all processes, where they know and can be asked.
  std::optional<std::int64_t> total_samples = std::nullopt;
  /// The processes can be asked for the state of their default generators before each pass.
  bool agrees_on_order = false;
  /// Each process may see another number of batches, unless they agree.
  bool may_end_apart = false;
  /// With the seedable sampler in it, if that was asked for.
  std::shared_ptr<BatchIndexSampler> batch_sampler = nullptr;
  std::vector<RNGType> rng_types = {};
  std::optional<at::Generator> synchronized_generator = std::nullopt;
  std::optional<c10::Device> device = std::nullopt;
  bool non_blocking = false;

  [[nodiscard]] PlanOptions plan_options() const {
    if (sharing != Sharing::kDeal) return {};
    return {num_processes, process_index, split_batches, even_batches};
  }
};

/// Collective where several processes share out samples by index: they agree on the seed of a
/// random order, and a suspicion that each of them has other data is warned about once. Also where
/// each of them has its own: they count them together.
[[nodiscard]] ACCELERATE_API Preparation prepare(const LoaderTraits& loader,
                                                 const PrepareDataLoaderOptions& options);

/// Collective where the order may be drawn from the default generator: on a process whose own is in
/// another state than that of process 0, the default generator has the latter for as long as the
/// result lives.
[[nodiscard]] ACCELERATE_API std::unique_ptr<DefaultGeneratorAt> agree_on_order(
    const BatchIndexSampler& batch_sampler);

}  // namespace detail
}  // namespace accelerate
