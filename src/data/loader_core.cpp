// A loader and its passes: the first stage puts the other ones together.
#include "accelerate/detail/data/loader_core.h"

#include <ATen/Context.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>

#include "accelerate/data/batch_samplers.h"
#include "accelerate/detail/data/sample_stream.h"
#include "accelerate/errors.h"
#include "accelerate/logging/name_collectives.h"
#include "accelerate/operations/objects.h"
#include "accelerate/random.h"
#include "core/log.h"
#include "core/text.h"
#include "data/copy_stream.h"
#include "data/loader_position.h"
#include "data/preparation.h"
#include "data/stages.h"

namespace accelerate::detail::data {
namespace {

/// Throws `StateError` where the length is not known.
std::int64_t known_length(const std::optional<std::int64_t>& length, std::string_view what) {
  if (length) return *length;
  throw StateError(str(what, " has no length: its dataset or sampler does not say how many ",
                       "samples there are."));
}

/// Whether batches are to be page-locked: where asked for and possible. Warns once where not.
bool use_pinned_memory(bool asked) {
  if (!asked || at::globalContext().hasCUDA()) return asked;
  warn_once("pin_memory is set, but there is no accelerator: batches stay in ordinary memory.");
  return false;
}

/// Samples that all processes together take of a stream at once.
std::int64_t stream_group(const DataLoaderOptions& options, const StreamShard& shard) {
  return StreamCut(options, shard, false).group;
}

/// The batches of another sampler. Throws `ArgumentError` where there is none to be replaced.
std::shared_ptr<BatchIndexSampler> with_sampler(const std::shared_ptr<BatchIndexSampler>& batches,
                                                std::shared_ptr<Sampler> sampler) {
  auto result = batches && batches->sampler() && sampler ? batches->with_sampler(std::move(sampler))
                                                         : nullptr;
  if (result) return result;
  throw ArgumentError(
      "The sampler of this data loader cannot be replaced: its batches do not come from one, or "
      "there is no other one. Pass the sampler to make_data_loader.");
}

/// Puts the generator of a sampler, if it has one, back to where it was.
class KeptGenerator {
 public:
  explicit KeptGenerator(const std::shared_ptr<BatchIndexSampler>& batch_sampler) {
    const auto sampler = batch_sampler ? batch_sampler->sampler() : nullptr;
    if (!sampler) return;
    generator_ = sampler->generator();
    if (generator_) state_ = get_rng_state(RNGType::kGenerator, generator_);
  }
  ~KeptGenerator() {
    if (generator_) set_rng_state(RNGType::kGenerator, state_, generator_);
  }
  KeptGenerator(const KeptGenerator&) = delete;
  KeptGenerator& operator=(const KeptGenerator&) = delete;

 private:
  std::optional<at::Generator> generator_ = std::nullopt;
  at::Tensor state_ = {};
};

/// Tells the gradient state which loader is iterated, until the pass is over or left.
class ActiveLoader {
 public:
  explicit ActiveLoader(const std::shared_ptr<DataLoaderStateMixin>& loader)
      : loader_(loader.get()) {
    gradient_state_._add_dataloader(loader);
  }
  ~ActiveLoader() { gradient_state_._remove_dataloader(loader_); }
  ActiveLoader(const ActiveLoader&) = delete;
  ActiveLoader& operator=(const ActiveLoader&) = delete;

 private:
  const DataLoaderStateMixin* loader_;  // outlives its passes
  GradientState gradient_state_ = {};
};

}  // namespace

struct LoaderCore::Impl {
  explicit Impl(std::shared_ptr<const LoaderRecipe> of_recipe) : recipe(std::move(of_recipe)) {}

  [[nodiscard]] bool prepared() const { return type != nullptr; }

  /// Batches of this process in a pass, where that is known.
  std::optional<std::int64_t> size() const {
    const auto whole = whole_size();
    if (!whole) return whole;
    return std::max<std::int64_t>(0, *whole - position.skip_batches()) * parts_per_batch;
  }

  PassStart start_pass() {
    end_of_dataloader = false;
    remainder = -1;
    padded_size = -1;
    set_parts(nullptr);
    auto start = position.next_start();
    // A sampler with a generator of its own draws on from there.
    if (start.order_before.defined() && recipe->batch_sampler) {
      const auto before = recipe->batch_sampler->begin(start.epoch, start.order_before);
      while (before->next()) {
      }
    }
    return start;
  }

  /// The pass that begins at `start`, where it notes what it draws.
  std::unique_ptr<Pass> make_pass(PassStart& start) {
    if (preparation.sharing == Sharing::kDispatch) return share_by_dispatch(start);
    if (!start.resumes() && !preparation.rng_types.empty()) {
      const auto named = name_collectives("DataLoaderShard");
      synchronize_rng_states(std::span<const RNGType>(preparation.rng_types),
                             preparation.synchronized_generator);
    }
    const bool began_before = start.from.samples > 0 || start.skip > 0;
    auto pass = load_from(start, preparation.plan_options(), preparation.stream_shard(),
                          recipe->options.generator);
    if (preparation.may_end_apart) {
      std::function<std::unique_ptr<Pass>()> reopen;
      if (preparation.even_batches && !equally_many(size(), samples_of_pass())) {
        reopen = [this, start] { return reload(start); };
      }
      pass = presharded_pass(std::move(pass), *type, std::move(reopen), began_before);
    }
    if (preparation.device) {
      pass = device_prefetch(std::move(pass), *type, *preparation.device, preparation.non_blocking);
    }
    return pass;
  }

  /// Remembers what is handed out.
  void note(const PassStart& start, LoadedBatch& loaded) {
    if (loaded.facts.last) {
      remainder = loaded.facts.remainder;
      padded_size = loaded.facts.padded_size;
      end_of_dataloader = true;
    }
    set_parts(std::move(loaded.parts));
    position.remember(start, loaded.sequence, std::move(loaded.facts), preparation.num_processes);
  }

  std::shared_ptr<const LoaderRecipe> recipe;
  Preparation preparation = {};
  const BatchType* type = nullptr;  // null until the loader is prepared
  AnySlice slice = {};
  SplitBatch split = {};  // empty if batches are handed out as they come
  std::int64_t parts_per_batch = 1;
  std::function<void()> batch_done = {};
  LoaderPosition position = {};
  std::atomic<bool> end_of_dataloader = false;
  std::atomic<std::int64_t> remainder = -1;
  std::atomic<std::int64_t> padded_size = -1;
  mutable std::mutex parts_mutex = {};
  std::shared_ptr<const UnevenParts> parts = nullptr;  // of the batch handed out last

 private:
  /// Batches of this process in a pass of which none are left out, where that is known.
  std::optional<std::int64_t> whole_size() const {
    // A dataset that cuts itself does not say where.
    if (preparation.sharing == Sharing::kNative) return std::nullopt;
    const auto groups = [this](std::int64_t items, std::int64_t group) {
      return (items + (drop_last() ? 0 : group - 1)) / group;
    };
    auto size = recipe->stream ? recipe->dataset_size
                               : planned_size(*recipe->batch_sampler, preparation.plan_options());
    if (size && recipe->stream) {
      size = groups(*size, stream_group(recipe->options, preparation.stream_shard()));
    }
    if (!size || preparation.sharing != Sharing::kDispatch) return size;
    return groups(*size, preparation.batches_per_round());
  }

  bool drop_last() const {
    return recipe->stream ? recipe->options.drop_last : recipe->batch_sampler->drop_last();
  }

  /// Samples that decide how long the last batch is, where that is known.
  std::optional<std::int64_t> samples_of_pass() const {
    if (recipe->stream) return recipe->dataset_size;
    const auto sampler = recipe->batch_sampler->sampler();
    return sampler ? sampler->size() : std::nullopt;
  }

  std::unique_ptr<Pass> share_by_dispatch(PassStart& start) {
    if (comm::rank_in(nullptr) != 0) {
      tell_dataset(start.epoch);
      // Python's other processes draw a base seed too, and the default generators stay in step.
      if (!start.resumes()) std::ignore = draw_base_seed(std::nullopt);
    }
    const DispatchSource source{
        // Without the loader's generator, as in Python.
        .open = [this](PassStart& inner) { return load_from(inner, {}, {}, std::nullopt); },
        .reopen = [this](const PassStart& first) { return reload(first); },
        .drop_last = drop_last()};
    auto pass = dispatched_pass(source, start, *type, preparation, slice);
    if (!CopyStream::leads_to(*preparation.device)) return pass;
    return device_prefetch(std::move(pass), *type, *preparation.device, preparation.non_blocking);
  }

  /// Loads the batches of one process. The base seed is drawn before the sampler draws, as in
  /// Python; a pass that is resumed has drawn it before.
  std::unique_ptr<Pass> load_from(PassStart& start, const PlanOptions& plan,
                                  const StreamShard& shard,
                                  const std::optional<at::Generator>& generator) {
    if (!start.resumes()) start.base_seed = draw_base_seed(generator);
    const PassSeed seed{*start.base_seed, start.epoch, start.first_sequence};
    return load(source(start, plan, shard), seed);
  }

  /// The pass that `start` belongs to, once more from its first batch on. The generator of the
  /// order stays where it is for the pass that follows.
  std::unique_ptr<Pass> reload(const PassStart& start) {
    PassStart first;
    first.epoch = start.epoch;
    first.from.generator_state = start.from.generator_state;
    const KeptGenerator kept(recipe->batch_sampler);
    const PassSeed seed{start.base_seed.value_or(0), start.epoch, 0};
    return load(source(first, PlanOptions(), StreamShard()), seed);
  }

  std::unique_ptr<LoadSource> source(PassStart& start, const PlanOptions& plan, StreamShard shard) {
    if (recipe->stream) {
      shard.skip_samples = start.from.samples + start.skip * stream_group(recipe->options, shard);
      shard.skip_groups = start.from.batches + start.skip;
      // Processes that share out a stream need its start, to fill up their last batches.
      if (shard.num_processes == 1 && recipe->stream->keeps_state()) {
        shard.dataset_state = start.dataset_state;
      }
      if (start.from.samples > 0 && !shard.dataset_state) {
        warn_once(
            "An iterable dataset cannot be entered in the middle: it is read from its start, and "
            "what was handed out before is passed over.");
      }
      return recipe->stream->begin(shard, start.epoch);
    }
    tell_dataset(start.epoch);
    // While it lives, all processes draw their order from one state of the default generator.
    const auto agreed =
        preparation.agrees_on_order ? agree_on_order(*recipe->batch_sampler) : nullptr;
    BatchPlan batches(recipe->batch_sampler, plan, start.epoch, start.from);
    batches.skip(start.skip);
    start.from.generator_state = batches.generator_state();
    return indexed_source(recipe, std::move(batches));
  }

  /// Loads what `source` plans: in this thread or by the workers.
  std::unique_ptr<Pass> load(std::unique_ptr<LoadSource> source, const PassSeed& seed) {
    const bool direct = recipe->options.num_workers == 0;
    const bool pinned = use_pinned_memory(recipe->options.pin_memory || recipe->for_device);
    LoadContext context{.pinned = pinned, .parallel = direct, .memory = memory_};
    if (direct) return load_directly(std::move(source), std::move(context), seed);
    return load_with_workers(recipe, std::move(source), workers(), std::move(context), seed);
  }

  /// Tells an indexed dataset the epoch, once no worker reads it for a pass that was abandoned.
  void tell_dataset(std::int64_t epoch) {
    if (!recipe->set_epoch) return;
    if (recipe->options.num_workers > 0) workers()->queue()->wait_idle(recipe->options.timeout);
    recipe->set_epoch(epoch);
  }

  void set_parts(std::shared_ptr<const UnevenParts> now) {
    const std::lock_guard lock(parts_mutex);
    parts = std::move(now);
  }

  std::shared_ptr<WorkerPool> workers() {
    const std::lock_guard lock(workers_mutex_);
    if (!workers_) workers_ = std::make_shared<WorkerPool>(recipe->options.num_workers);
    return workers_;
  }

  std::shared_ptr<state::ReusedMemory> memory_ = std::make_shared<state::ReusedMemory>();
  std::mutex workers_mutex_ = {};
  std::shared_ptr<WorkerPool> workers_ = nullptr;
};

LoaderCore::LoaderCore(LoaderRecipe recipe)
    : impl_(std::make_unique<Impl>(std::make_shared<const LoaderRecipe>(std::move(recipe)))) {}

LoaderCore::LoaderCore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

LoaderCore::~LoaderCore() = default;

std::int64_t LoaderCore::size() const { return known_length(impl_->size(), "This data loader"); }

std::int64_t LoaderCore::dataset_size() const {
  return known_length(impl_->recipe->dataset_size, "The dataset of this data loader");
}

std::int64_t LoaderCore::total_dataset_length() const {
  const auto& preparation = impl_->preparation;
  return known_length(
      preparation.already_sharded ? preparation.total_samples : impl_->recipe->dataset_size,
      "The data of all processes together");
}

std::optional<std::int64_t> LoaderCore::batch_size() const { return batch_size_of(*impl_->recipe); }

std::optional<std::int64_t> LoaderCore::total_batch_size() const {
  const auto size = batch_size();
  if (!size) return size;
  return *size * impl_->preparation.batches_per_round();
}

std::int64_t LoaderCore::iteration() const { return impl_->position.epoch(); }

void LoaderCore::set_epoch(std::int64_t epoch) { impl_->position.set_epoch(epoch); }

void LoaderCore::set_sampler(std::shared_ptr<Sampler> sampler) {
  auto recipe = std::make_shared<LoaderRecipe>(*impl_->recipe);
  recipe->batch_sampler = with_sampler(recipe->batch_sampler, std::move(sampler));
  impl_->recipe = std::move(recipe);
}

DataLoaderState LoaderCore::state_dict() const { return impl_->position.state(); }

void LoaderCore::load_state_dict(const DataLoaderState& state) { impl_->position.load(state); }

const std::shared_ptr<const LoaderRecipe>& LoaderCore::recipe() const { return impl_->recipe; }

bool LoaderCore::end_of_dataloader() const { return impl_->end_of_dataloader; }

std::int64_t LoaderCore::remainder() const { return impl_->remainder; }

std::int64_t LoaderCore::padded_size() const { return impl_->padded_size; }

std::shared_ptr<const UnevenParts> LoaderCore::uneven_parts() const {
  const std::lock_guard lock(impl_->parts_mutex);
  return impl_->parts;
}

std::unique_ptr<LoaderCore::Impl> LoaderCore::copied(std::int64_t skipped_batches) const {
  auto impl = std::make_unique<Impl>(impl_->recipe);
  impl->preparation = impl_->preparation;
  impl->type = impl_->type;
  impl->slice = impl_->slice;
  impl->split = impl_->split;
  impl->parts_per_batch = impl_->parts_per_batch;
  impl->batch_done = impl_->batch_done;
  impl->position.follow(impl_->position, skipped_batches);
  return impl;
}

std::shared_ptr<LoaderCore> LoaderCore::skipping(std::int64_t batches) const {
  const auto parts = impl_->parts_per_batch;
  if (batches < 0 || batches % parts != 0) {
    throw ArgumentError(str("num_batches is ", batches,
                            ". It is a number of batches to leave out: 0 or more",
                            parts > 1 ? str(", a multiple of ", parts, ".") : std::string(".")));
  }
  return std::shared_ptr<LoaderCore>(new LoaderCore(copied(batches / parts)));
}

std::shared_ptr<LoaderCore> LoaderCore::splitting(std::int64_t factor, SplitBatch split) const {
  auto impl = copied(0);
  impl->split = std::move(split);
  impl->parts_per_batch = factor;
  return std::shared_ptr<LoaderCore>(new LoaderCore(std::move(impl)));
}

DataPlace LoaderCore::data_place() const {
  const auto& preparation = impl_->preparation;
  return {preparation.num_processes, preparation.process_index, preparation.ranks_together};
}

bool LoaderCore::same_in_sequence_group() const {
  return impl_->preparation.same_in_sequence_group;
}

bool LoaderCore::splits() const { return static_cast<bool>(impl_->split); }

std::shared_ptr<LoaderCore> LoaderCore::prepare(const PrepareDataLoaderOptions& options,
                                                const BatchType& type, AnySlice slice) {
  if (impl_->prepared()) return shared_from_this();

  auto preparation = detail::data::prepare(*impl_->recipe, options);
  auto recipe = std::make_shared<LoaderRecipe>(*impl_->recipe);
  recipe->batch_sampler = preparation.batch_sampler;
  recipe->for_device = preparation.device && CopyStream::leads_to(*preparation.device);
  if (const auto skipped = impl_->position.skip_batches(); skipped > 0) {
    if (recipe->stream) {
      throw ArgumentError(
          "The first batches of this loader over an iterable dataset are left out before it is "
          "prepared, so that it is not known which of them the other processes have seen. Prepare "
          "it first, then call skip_first_batches.");
    }
    recipe->batch_sampler = std::make_shared<SkipBatchSampler>(recipe->batch_sampler, skipped);
  }
  if (preparation.sharing == Sharing::kNative) {
    recipe->stream = recipe->stream->shard(preparation.num_processes, preparation.process_index);
  }
  auto impl = std::make_unique<Impl>(std::move(recipe));
  impl->preparation = std::move(preparation);
  impl->type = &type;
  impl->slice = std::move(slice);
  return std::shared_ptr<LoaderCore>(new LoaderCore(std::move(impl)));
}

void LoaderCore::when_batch_done(std::function<void()> f) { impl_->batch_done = std::move(f); }

std::optional<bool> LoaderCore::exchange_even_batches(bool even) {
  auto& preparation = impl_->preparation;
  if (preparation.sharing != Sharing::kByIndex || !impl_->recipe->batch_sampler) {
    return std::nullopt;
  }
  return std::exchange(preparation.even_batches, even);
}

void LoaderCore::throw_freed() {
  throw StateError(
      "This data loader has let go of its data: it was freed or reset. Assign another loader to it "
      "before it is used again.");
}

struct LoaderPass::State {
  explicit State(std::shared_ptr<LoaderCore> of_loader)
      : loader(std::move(of_loader)), start(loader->impl_->start_pass()) {
    pass = loader->impl_->make_pass(start);
    if (loader->impl_->split) {
      pass = splitting_pass(std::move(pass), loader->impl_->split,
                            {.samples_after = start.from.samples,
                             .batches_after = start.from.batches,
                             .dataset_state = start.dataset_state});
    }
    if (loader->impl_->prepared()) active.emplace(loader);
  }

  // The loader outlives the stages of its passes.
  std::shared_ptr<LoaderCore> loader;
  PassStart start;
  std::unique_ptr<Pass> pass = nullptr;
  std::optional<ActiveLoader> active = std::nullopt;
  bool begun = false;     // a batch was handed out
  bool complete = false;  // the last batch was handed out
};

LoaderPass::LoaderPass() noexcept = default;
LoaderPass::LoaderPass(std::shared_ptr<LoaderCore> loader) {
  const auto& impl = *loader->impl_;
  if (impl.end_of_dataloader && impl.batch_done) impl.batch_done();
  state_ = std::make_unique<State>(std::move(loader));
  advance();
}
LoaderPass::~LoaderPass() = default;
LoaderPass::LoaderPass(LoaderPass&&) noexcept = default;
LoaderPass& LoaderPass::operator=(LoaderPass&&) noexcept = default;

void LoaderPass::advance() {
  batch_ = {};  // its memory can be reused for the next one
  if (!state_) return;
  auto state = std::move(state_);  // an exception ends the pass
  auto& impl = *state->loader->impl_;
  // After the last batch the program has an epoch to end: then when the next one begins.
  if (state->begun && !state->complete && impl.batch_done) impl.batch_done();
  auto loaded = state->pass->next();
  if (!loaded) {
    // A pass counts once its last batch was handed out. An empty one does not, as in Python, unless
    // it goes on behind the last batch of an earlier one.
    const bool nothing_left = !state->begun && state->start.from.samples > 0;
    if (state->complete || nothing_left) impl.position.end_epoch();
    return;
  }
  state->begun = true;
  state->complete = loaded->facts.last;
  impl.note(state->start, *loaded);
  batch_ = std::move(loaded->batch);
  state_ = std::move(state);
}

}  // namespace accelerate::detail::data
