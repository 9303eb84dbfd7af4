// The decisions of prepare_data_loader, in the order in which Python makes them.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>

#include "accelerate/data/iterable_dataset_shard.h"
#include "accelerate/data/prepare_options.h"
#include "accelerate/detail/data/batch_tensors.h"
#include "accelerate/errors.h"
#include "accelerate/kwargs.h"
#include "accelerate/logging/name_collectives.h"
#include "accelerate/operations/collectives.h"
#include "accelerate/operations/objects.h"
#include "accelerate/samplers.h"
#include "accelerate/state/partial_state.h"
#include "core/log.h"
#include "core/text.h"
#include "data/preparation.h"

namespace accelerate {

PrepareDataLoaderOptions prepare_options(const DataLoaderConfiguration& configuration) {
  PrepareDataLoaderOptions options;
  options.split_batches = configuration.split_batches;
  options.dispatch_batches = configuration.dispatch_batches;
  options.even_batches = configuration.even_batches;
  options.use_seedable_sampler = configuration.use_seedable_sampler;
  options.data_seed = configuration.data_seed;
  options.non_blocking = configuration.non_blocking;
  options.use_stateful_dataloader = configuration.use_stateful_dataloader;
  options.already_sharded = configuration.already_sharded;
  return options;
}

namespace detail::data {
namespace {

bool is_iterable(const LoaderRecipe& loader) { return loader.stream != nullptr; }

bool dispatches(const LoaderRecipe& loader, const PrepareDataLoaderOptions& options) {
  if (options.already_sharded) {
    if (options.dispatch_batches.value_or(false)) {
      throw ArgumentError(
          "`dispatch_batches=True` reads all data on process 0, but `already_sharded` says that "
          "each process has its own. Choose one of them.");
    }
    return false;
  }
  const bool dispatch =
      options.dispatch_batches.value_or(options.put_on_device && is_iterable(loader));
  if (dispatch && !options.put_on_device) {
    throw ArgumentError("Using `dispatch_batches=True` requires `put_on_device=True`.");
  }
  return dispatch;
}

std::int64_t mesh_size(const MeshLayout& mesh, std::string_view name) {
  return mesh.has(name) ? mesh.size(name) : 1;
}

/// The number of neighbouring ranks that are given the same data. Stages of a pipeline are, too,
/// but they are not neighbours.
std::int64_t ranks_together(const PrepareDataLoaderOptions& options, const PartialState& state) {
  const bool deepspeed = state.distributed_type() == DistributedType::kDeepspeed;
  const auto& mesh = *options.device_mesh;
  return mesh_size(mesh, "tp") * (deepspeed ? 1 : mesh_size(mesh, "cp") * mesh_size(mesh, "sp"));
}

/// Who shares the data: ranks that are given the same are one process in that.
void find_place(const PrepareDataLoaderOptions& options, const PartialState& state,
                Preparation& result) {
  result.num_processes = options.num_processes.value_or(state.num_processes());
  result.process_index = options.process_index.value_or(state.process_index());
  if (const auto& mesh = options.device_mesh) {
    const bool deepspeed = state.distributed_type() == DistributedType::kDeepspeed;
    const auto together = ranks_together(options, state);
    const auto parallel = deepspeed
                              ? result.num_processes / together
                              : mesh_size(*mesh, "dp_replicate") * mesh_size(*mesh, "dp_shard");
    result.num_processes = static_cast<int>(parallel);
    result.process_index /= static_cast<int>(together);
    result.ranks_together = static_cast<int>(together);
    if (mesh->has("pp")) result.process_index %= result.num_processes;
    result.same_in_sequence_group = !deepspeed && !options.already_sharded;
  }
  check_process(result.num_processes, result.process_index);
}

void check_split(const LoaderRecipe& loader, const PrepareDataLoaderOptions& options,
                 int num_processes) {
  if (options.already_sharded) {
    throw ArgumentError(
        "`split_batches=True` cuts each batch into one part per process, but `already_sharded` "
        "says that each process has batches of its own. Choose one of them: a `batch_size` divided "
        "by the number of processes gives the same size.");
  }
  const auto batch_size = batch_size_of(loader);
  if (!batch_size) {
    throw ArgumentError(
        "In order to use `split_batches=True` the data loader or its batch sampler must have a "
        "`batch_size`, but here batches come as they are. Set one, or leave `split_batches` off.");
  }
  if (*batch_size % num_processes == 0) return;
  throw ArgumentError(
      str("To use a `DataLoader` in `split_batches` mode, the batch size (", *batch_size,
          ") needs to be a round multiple of the number of processes (", num_processes, ")."));
}

/// Process 0 sends to all there are.
void check_dispatch(const PrepareDataLoaderOptions& options, const PartialState& state,
                    const Preparation& result) {
  if (!options.device_mesh && (result.num_processes != state.num_processes() ||
                               result.process_index != state.process_index())) {
    throw ArgumentError(str("Batches are dispatched to the ", state.num_processes(),
                            " processes of this run, but num_processes is ", result.num_processes,
                            " and process_index ", result.process_index,
                            ". Leave both unset, or set `dispatch_batches=False`."));
  }
}

std::shared_ptr<BatchIndexSampler> with_seedable_sampler(
    const std::shared_ptr<BatchIndexSampler>& batch_sampler,
    const std::optional<std::int64_t>& data_seed) {
  if (!batch_sampler) return nullptr;
  const auto random = std::dynamic_pointer_cast<RandomSampler>(batch_sampler->sampler());
  if (!random) return batch_sampler;
  auto seedable = std::make_shared<SeedableRandomSampler>(
      random->dataset_size(), SeedableRandomSamplerOptions{.replacement = random->replacement(),
                                                           .num_samples = random->num_samples(),
                                                           .generator = random->generator(),
                                                           .data_seed = data_seed});
  auto seeded = batch_sampler->with_sampler(std::move(seedable));
  return seeded ? seeded : batch_sampler;  // one of the user's own keeps its sampler
}

void check_device(const c10::Device& device) {
  if (!device.is_cuda()) return;
  const auto count = at::globalContext().hasCUDA() ? at::detail::getCUDAHooks().getNumGPUs() : 0;
  if (device.index() < count && count > 0) return;
  throw ArgumentError(str("Batches are to be put on ", device.str(), ", but this process sees ",
                          count, count == 1 ? " GPU" : " GPUs",
                          ". Set `device` to one that is there, or leave it unset for that of "
                          "PartialState."));
}

/// Collective. Unset where a process does not know.
std::optional<std::int64_t> sum_of(const std::optional<std::int64_t>& samples) {
  const auto named = name_collectives("prepare_data_loader");
  std::int64_t sum = 0;
  for (const auto each : accelerate::all_gather_object(samples.value_or(-1))) {
    if (each < 0) return std::nullopt;
    sum += each;
  }
  return sum;
}

std::shared_ptr<Sampler> sampler_of(const Preparation& result) {
  return result.batch_sampler ? result.batch_sampler->sampler() : nullptr;
}

/// What each process says of its data.
struct DataCard {
  std::uint64_t seed = 0;
  std::int64_t length = -1;
  std::uint64_t fingerprint = 0;
  std::int64_t own_generator = 0;  // of the user's
};

void warn_of_other_data(const std::vector<DataCard>& cards) {
  const auto differs = [&](auto member) {
    return std::ranges::any_of(cards,
                               [&](const auto& card) { return card.*member != cards[0].*member; });
  };
  const bool lengths = differs(&DataCard::length);
  if (!lengths && !differs(&DataCard::fingerprint)) return;
  std::int64_t total = 0;
  std::vector<std::int64_t> all;
  for (const auto& card : cards) {
    all.push_back(card.length);
    total += card.length;
  }
  warn_once(
      str("The processes are about to share out one dataset, but each of them seems to have "
          "another one: ",
          lengths ? "their lengths differ" : "their first or last rows differ", " (",
          join(all, ", "), " samples, ", total,
          " in all). If every process holds its part of the data alone, set "
          "`already_sharded` of DataLoaderConfiguration, or most of it is never seen."));
}

/// Gives the order of all processes one seed: that of process 0, if they can be asked. What draws
/// from the default generator after that does so from a state that is agreed on before each pass:
/// with a seedable sampler asked for, Python gives no other one a generator.
void agree(const LoaderRecipe& loader, const PrepareDataLoaderOptions& options, bool talks,
           Preparation& result) {
  const auto sampler = sampler_of(result);
  const auto seedable = std::dynamic_pointer_cast<SeedableRandomSampler>(sampler);
  const bool owns =
      sampler && sampler->can_own_generator() && !(seedable && options.use_seedable_sampler);
  const bool needs_generator = owns && !options.use_seedable_sampler && !sampler->generator();
  DataCard card;
  card.own_generator = owns && sampler->generator() ? 1 : 0;
  if (seedable) card.seed = seedable->initial_seed();
  if (needs_generator) card.seed = draw_base_seed(std::nullopt);
  card.length = loader.dataset_size.value_or(-1);
  if (loader.fingerprint) card.fingerprint = loader.fingerprint();

  const auto named = name_collectives("prepare_data_loader");
  std::vector<DataCard> cards{card};
  if (talks) cards = accelerate::all_gather_object(card);
  if (seedable) seedable->set_initial_seed(cards[0].seed);
  const bool any_own =
      std::ranges::any_of(cards, [](const auto& each) { return each.own_generator != 0; });
  if (needs_generator || (owns && any_own && !sampler->generator())) {
    sampler->set_generator(at::detail::createCPUGenerator(cards[0].seed));
  }
  if (owns) result.synchronized_generator = sampler->generator();
  result.agrees_on_order = talks;
  // How and when the user seeds a generator of his own is not known here.
  if (talks && any_own && !std::ranges::count(result.rng_types, RNGType::kGenerator)) {
    result.rng_types.push_back(RNGType::kGenerator);
  }
  warn_of_other_data(cards);
}

void share_stream(const LoaderRecipe& loader, Preparation& result) {
  if (!result.split_batches && loader.stream->num_shards() >= result.num_processes) {
    result.sharing = Sharing::kNative;
    result.may_end_apart = true;
    return;
  }
  if (!loader.stream->deals_samples()) {
    throw ArgumentError(
        "This iterable dataset yields whole batches, or samples that cannot be copied: they cannot "
        "be dealt out to several processes. Set `dispatch_batches=True` and `put_on_device=True`, "
        "or give the dataset `num_shards()` and `shard(count, index)`.");
  }
  result.synchronized_generator = loader.stream->generator();
}

}  // namespace

Preparation prepare(const LoaderRecipe& loader, const PrepareDataLoaderOptions& options) {
  Preparation result;
  const bool dispatch = dispatches(loader, options);
  const PartialState state;
  find_place(options, state, result);
  if (options.split_batches) check_split(loader, options, result.num_processes);
  if (dispatch) check_dispatch(options, state, result);

  result.rng_types = options.rng_types;
  result.already_sharded = options.already_sharded;
  result.split_batches = options.split_batches;
  result.even_batches = options.even_batches;
  result.non_blocking = options.non_blocking;
  if (options.put_on_device) {
    result.device = options.device.value_or(state.device());
    // Torch takes cpu:1 for another device than cpu, where batches are, and would copy each one.
    if (result.device->is_cpu()) result.device = c10::Device(c10::kCPU);
    check_device(*result.device);
  }
  result.batch_sampler = options.use_seedable_sampler
                             ? with_seedable_sampler(loader.batch_sampler, options.data_seed)
                             : loader.batch_sampler;

  // A number of processes of the caller's own may be a part of them only: the others would not
  // come.
  const bool all_take_part = options.device_mesh || result.num_processes == state.num_processes();
  if (dispatch) {
    result.sharing = Sharing::kDispatch;
  } else if (options.already_sharded) {
    result.may_end_apart = true;
    if (all_take_part) result.total_samples = sum_of(loader.dataset_size);
  } else if (result.num_processes > 1) {
    result.sharing = Sharing::kByIndex;
    if (is_iterable(loader)) {
      share_stream(loader, result);
    } else {
      validate(result.plan_options(), *result.batch_sampler);
      agree(loader, options, all_take_part, result);
    }
  } else if (options.device_mesh && !is_iterable(loader)) {
    agree(loader, options, all_take_part, result);  // all ranks are given the same data
  }
  if (!result.synchronized_generator) std::erase(result.rng_types, RNGType::kGenerator);
  return result;
}

std::unique_ptr<DefaultGeneratorAt> agree_on_order(const BatchIndexSampler& batch_sampler) {
  const auto sampler = batch_sampler.sampler();
  if (comm::is_alone(nullptr) || (sampler && !sampler->draws_from_default_generator()))
    return nullptr;
  const auto named = name_collectives("DataLoaderShard");
  const auto mine = DefaultGeneratorAt::state_now();
  const PartialState state;  // NCCL sends from the device only
  const auto agreed =
      accelerate::broadcast(mine.to(state.device(), mine.scalar_type(), false, true)).cpu();
  // Generators that are in step stay so: all of them move on by what the order takes.
  return mine.equal(agreed) ? nullptr : std::make_unique<DefaultGeneratorAt>(agreed);
}

StreamCut shard_cut(const IterableDatasetShardOptions& options) {
  check_process(options.num_processes, options.process_index);
  if (options.batch_size < 1 ||
      (options.split_batches && options.batch_size % options.num_processes != 0)) {
    throw ArgumentError(
        str("To use `IterableDatasetShard` in `split_batches` mode, the batch size (",
            options.batch_size, ") needs to be a round multiple of the number of processes (",
            options.num_processes, ")."));
  }
  check_batch_size_is_possible(options.batch_size);
  return {{.batch_size = options.batch_size, .drop_last = options.drop_last},
          {.num_processes = options.num_processes,
           .process_index = options.process_index,
           .split_batches = options.split_batches},
          false};
}

std::uint64_t BatchTensors::fingerprint(const std::vector<at::Tensor>& tensors) {
  std::uint64_t hash = 0xCBF29CE484222325;  // FNV-1a
  for (const auto& tensor : tensors) {
    const auto rows = tensor.dim() == 0 ? 0 : tensor.size(0);
    for (const auto row : std::set<std::int64_t>{0, rows - 1}) {
      if (row < 0 || row >= rows) continue;
      const auto content = tensor.select(0, row).to(at::kCPU).contiguous();
      const auto* bytes = static_cast<const unsigned char*>(content.const_data_ptr());
      for (std::size_t i = 0; i < content.nbytes(); ++i) hash = (hash ^ bytes[i]) * 0x100000001B3;
    }
  }
  return hash;
}

}  // namespace detail::data
}  // namespace accelerate
