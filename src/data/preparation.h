// src/data/preparation.h - the decisions of prepare_data_loader about one loader.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "accelerate/data/prepare_options.h"
#include "accelerate/detail/data/loader_recipe.h"
#include "accelerate/detail/data/sampler_adaptors.h"
#include "accelerate/enums.h"
#include "data/batch_plan.h"

namespace accelerate::detail::data {

enum class Sharing : std::uint8_t {
  /// This process walks all the data it has: it is alone, or has its part already.
  kNone,
  /// Each process loads its own batches, or samples of a stream, by their number.
  kByIndex,
  /// The iterable dataset cuts itself.
  kNative,
  /// Process 0 reads.
  kDispatch
};

/// How a loader is prepared. The default is a loader that is not.
struct Preparation {
  Sharing sharing = Sharing::kNone;
  /// How many processes share the data, and which of them this one is.
  int num_processes = 1;
  int process_index = 0;
  /// How many neighbouring ranks are given the same; 0 without a mesh that tells.
  int ranks_together = 0;
  bool split_batches = false;
  bool even_batches = true;
  bool already_sharded = false;
  /// The processes of a sequence parallel group are given the same batches.
  bool same_in_sequence_group = false;
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
    if (sharing != Sharing::kByIndex) return {};
    return {num_processes, process_index, split_batches, even_batches};
  }
  [[nodiscard]] StreamShard stream_shard() const {
    if (sharing != Sharing::kByIndex) return {};
    return {.num_processes = num_processes,
            .process_index = process_index,
            .split_batches = split_batches};
  }
  [[nodiscard]] std::int64_t batches_per_round() const { return split_batches ? 1 : num_processes; }
};

/// Collective where several processes share out samples by index: they agree on the seed of a
/// random order, and one warning is logged if they seem to hold different datasets. Collective too
/// where each of them has its own data: they count them together.
[[nodiscard]] Preparation prepare(const LoaderRecipe& loader,
                                  const PrepareDataLoaderOptions& options);

/// Collective where the order may be drawn from the default generator: on a process whose own is in
/// another state than that of process 0, the default generator has the latter for as long as the
/// result lives.
[[nodiscard]] std::unique_ptr<DefaultGeneratorAt> agree_on_order(
    const BatchIndexSampler& batch_sampler);

/// Draws the base seed of a pass as Python's `DataLoader` does.
[[nodiscard]] std::uint64_t draw_base_seed(const std::optional<at::Generator>& generator);

/// The length of a full batch, where batches have a common one.
[[nodiscard]] std::optional<std::int64_t> batch_size_of(const LoaderRecipe& recipe);

}  // namespace accelerate::detail::data
