#include <algorithm>
#include <exception>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "accelerate/detail/comm/leaf_checks.h"
#include "core/text.h"
#include "data/stages.h"

namespace accelerate::detail::data {
namespace {

class IndexedSource final : public LoadSource {
 public:
  IndexedSource(std::shared_ptr<const LoaderRecipe> recipe, BatchPlan plan)
      : recipe_(std::move(recipe)), plan_(std::move(plan)) {}

  std::optional<PlannedLoad> next() override {
    auto planned = plan_.next();
    if (!planned) return std::nullopt;
    return PlannedLoad{std::move(planned->indices), std::cref(recipe_->fetch),
                       std::move(planned->facts)};
  }

 private:
  std::shared_ptr<const LoaderRecipe> recipe_;
  BatchPlan plan_;
};

std::optional<PlannedLoad> read_load(LoadSource& source, const PassSeed& seed,
                                     std::int64_t sequence) {
  const BatchSeedScope seeded(seed.of_reading(sequence));
  return source.next();
}

AnyBatch load_batch(PlannedLoad& load, const LoadContext& context, const PassSeed& seed,
                    std::int64_t sequence) {
  const BatchSeedScope seeded(seed.of_batch(sequence));
  return load.make(load.indices, context);
}

class DirectPass final : public Pass {
 public:
  DirectPass(std::unique_ptr<LoadSource> source, LoadContext context, const PassSeed& seed)
      : context_(std::move(context)),
        source_(std::move(source)),
        seed_(seed),
        sequence_(seed.first_sequence) {}

  std::optional<LoadedBatch> next() override {
    if (!source_) return std::nullopt;
    const std::int64_t sequence = sequence_++;
    std::optional<PlannedLoad> load;
    try {
      load = read_load(*source_, seed_, sequence);
      if (load) {
        auto batch = load_batch(*load, context_, seed_, sequence);
        return LoadedBatch{std::move(batch), std::move(load->facts), sequence};
      }
    } catch (...) {
      source_.reset();
      std::rethrow_exception(load_failure(sequence, load ? load->indices : IndexBatch()));
    }
    source_.reset();
    return std::nullopt;
  }

 private:
  LoadContext context_;
  std::unique_ptr<LoadSource> source_;
  PassSeed seed_;
  std::int64_t sequence_;
};

/// How many batches workers may hold, queued, being made or waiting to be taken.
std::size_t batches_in_flight(const LoaderRecipe& recipe) {
  const auto wanted = recipe.options.num_workers * recipe.options.prefetch_factor.value_or(2);
  const auto batches = recipe.stream ? recipe.dataset_size : recipe.batch_sampler->size();
  return static_cast<std::size_t>(std::clamp<std::int64_t>(batches.value_or(wanted), 1, wanted));
}

/// What the jobs of a pass hold: all that a worker touches, since one that is stuck in a dataset
/// outlives pass, pool and loader. Not the pool: a job that held the last reference to it would
/// have to join its own thread.
struct SharedLoads : std::enable_shared_from_this<SharedLoads> {
  struct Slot {
    PlannedLoad load = {};
    AnyBatch batch = {};
  };

  SharedLoads(std::shared_ptr<const LoaderRecipe> of_recipe, std::unique_ptr<LoadSource> of_source,
              std::shared_ptr<JobQueue> of_workers, LoadContext of_context, const PassSeed& of_seed)
      : recipe(std::move(of_recipe)),
        source(std::move(of_source)),
        workers(std::move(of_workers)),
        seed(of_seed),
        context(std::move(of_context)),
        slots(batches_in_flight(*recipe)),
        window(slots.size(), recipe->options.in_order, seed.first_sequence),
        started(static_cast<std::size_t>(recipe->options.num_workers)) {}

  void load_ahead() {
    if (recipe->stream) {
      if (window.begin_opening()) submit_read();
    } else {
      while (window.begin_opening()) open_next();
    }
  }

  void submit_read() {
    const auto read = [self = shared_from_this()](std::int64_t worker) {
      if (self->window.cancelled()) return;
      self->open_next(worker);
      if (self->window.begin_opening()) self->submit_read();
    };
    workers->submit({.run = read,
                     .describe =
                         [type = recipe->dataset_type] {
                           return str("reading the stream of ", comm::type_name(*type));
                         }},
                    0);
  }

  /// Reads what the next batch is to be, and submits it to a worker. `reader` is the worker that
  /// calls this, if it is one.
  void open_next(std::optional<std::int64_t> reader = std::nullopt) {
    std::optional<PlannedLoad> load;
    std::exception_ptr failure;
    try {
      const CancelScope until_left(window.cancelled());
      if (reader) start(*reader);
      load = read_load(*source, seed, window.next_sequence());
    } catch (...) {
      failure = load_failure(window.next_sequence(), {});
    }
    if (!load && !failure) return window.close();
    const auto ticket = window.open();
    if (failure || load->facts.last) window.close();
    if (failure) return window.done(ticket, std::move(failure));
    if (load->facts.last) {
      remainder = load->facts.remainder;
      padded_size = load->facts.padded_size;
    }
    auto describe = [type = recipe->dataset_type, sequence = ticket.sequence,
                     samples = load->indices] {
      return str("loading batch ", sequence, show_samples(samples), " of ", comm::type_name(*type));
    };
    slots[ticket.slot].load = std::move(*load);
    workers->submit({.run =
                         [self = shared_from_this(), ticket](std::int64_t worker) {
                           if (!self->window.cancelled()) self->make(ticket, worker);
                         },
                     .describe = std::move(describe)});
  }

  void make(LoadWindow::Ticket ticket, std::int64_t worker) {
    auto& slot = slots[ticket.slot];
    // Passed to the window outside of the handler: this thread may not refer to the exception any
    // more when the consumer has it.
    std::exception_ptr failure;
    try {
      const CancelScope until_left(window.cancelled());
      start(worker);
      slot.batch = load_batch(slot.load, context, seed, ticket.sequence);
    } catch (...) {
      failure = load_failure(ticket.sequence, slot.load.indices);
    }
    window.done(ticket, std::move(failure));
  }

  /// Calls `worker_init_fn` if this worker has not yet.
  void start(std::int64_t worker) {
    const auto& options = recipe->options;
    auto& started_here = started[static_cast<std::size_t>(worker)];
    if (!options.worker_init_fn || std::exchange(started_here, 1) != 0) return;
    if (options.persistent_workers && !workers->first_time(worker)) return;
    options.worker_init_fn(worker, seed.base_seed + static_cast<std::uint64_t>(worker));
  }

  /// The batch in the slot, which is free again after this.
  LoadedBatch take(const LoadWindow::Taken& taken) {
    auto& slot = slots[taken.ticket.slot];
    LoadedBatch loaded{std::move(slot.batch), std::move(slot.load.facts), taken.ticket.sequence};
    // With `in_order` off the last batch that is taken need not be the last one of the plan.
    loaded.facts.last = taken.last;
    loaded.facts.remainder = taken.last ? remainder : -1;
    loaded.facts.padded_size = taken.last ? padded_size : -1;
    slot = {};
    window.release(taken.ticket);
    return loaded;
  }

  std::shared_ptr<const LoaderRecipe> recipe;
  std::unique_ptr<LoadSource> source;
  std::shared_ptr<JobQueue> workers;
  PassSeed seed;
  LoadContext context;
  std::vector<Slot> slots;
  LoadWindow window;
  std::vector<std::uint8_t> started;
  // Of the last batch of the plan:
  std::int64_t remainder = -1;
  std::int64_t padded_size = -1;
};

class WorkerPass final : public Pass {
 public:
  WorkerPass(std::shared_ptr<const LoaderRecipe> recipe, std::unique_ptr<LoadSource> source,
             std::shared_ptr<WorkerPool> pool, LoadContext context, const PassSeed& seed)
      : pool_(std::move(pool)),
        shared_(std::make_shared<SharedLoads>(std::move(recipe), std::move(source), pool_->queue(),
                                              std::move(context), seed)) {}
  ~WorkerPass() override {
    // In a forked copy the window may be locked by a worker that is not here.
    if (!shared_->workers->is_forked_copy()) shared_->window.cancel();
  }
  WorkerPass(const WorkerPass&) = delete;
  WorkerPass& operator=(const WorkerPass&) = delete;

  std::optional<LoadedBatch> next() override {
    shared_->workers->refuse_forked_copy();
    shared_->load_ahead();
    auto taken = shared_->window.take(shared_->recipe->options.timeout);
    if (!taken) return std::nullopt;
    if (taken->failure) {
      shared_->window.cancel();
      std::rethrow_exception(std::move(taken->failure));
    }
    auto loaded = shared_->take(*taken);
    shared_->load_ahead();
    return loaded;
  }

 private:
  std::shared_ptr<WorkerPool> pool_;
  std::shared_ptr<SharedLoads> shared_;
};

}  // namespace

std::unique_ptr<LoadSource> indexed_source(std::shared_ptr<const LoaderRecipe> recipe,
                                           BatchPlan plan) {
  return std::make_unique<IndexedSource>(std::move(recipe), std::move(plan));
}

std::unique_ptr<Pass> load_directly(std::unique_ptr<LoadSource> source, LoadContext context,
                                    const PassSeed& seed) {
  return std::make_unique<DirectPass>(std::move(source), std::move(context), seed);
}

std::unique_ptr<Pass> load_with_workers(std::shared_ptr<const LoaderRecipe> recipe,
                                        std::unique_ptr<LoadSource> source,
                                        std::shared_ptr<WorkerPool> pool, LoadContext context,
                                        const PassSeed& seed) {
  return std::make_unique<WorkerPass>(std::move(recipe), std::move(source), std::move(pool),
                                      std::move(context), seed);
}

}  // namespace accelerate::detail::data
