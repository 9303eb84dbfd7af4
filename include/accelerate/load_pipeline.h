// accelerate/load_pipeline.h - batches planned, loaded ahead by workers or at once, handed out.
//
// Internal to accelerate/data_loader.h.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "accelerate/load_pass.h"
#include "accelerate/load_workers.h"
#include "accelerate/loader_recipe.h"
#include "accelerate/worker_generator.h"

namespace accelerate::detail {

/// Loads in the thread that asks.
template <class Batch>
class DirectPass final : public Pass<Batch> {
 public:
  DirectPass(std::unique_ptr<LoadSource<Batch>> source, LoadContext context, PassSeed seed)
      : context_(std::move(context)),
        source_(std::move(source)),
        seed_(seed),
        sequence_(seed.first_sequence) {}

  std::optional<LoadedBatch<Batch>> next() override {
    if (!source_) return std::nullopt;
    const std::int64_t sequence = sequence_++;
    std::optional<PlannedLoad<Batch>> load;
    try {
      load = read_load(*source_, seed_, sequence);
      if (load) return make_batch(*load, sequence);
    } catch (...) {
      source_.reset();
      std::rethrow_exception(load_failure(sequence, load ? load->indices : IndexBatch()));
    }
    source_.reset();
    return std::nullopt;
  }

 private:
  LoadedBatch<Batch> make_batch(PlannedLoad<Batch>& load, std::int64_t sequence) {
    const BatchSeedScope seeded(seed_.of_batch(sequence));
    return {load.make(load.indices, context_),
            load.last,
            sequence,
            load.remainder,
            load.padded_size,
            load.samples_after,
            load.batches_after,
            std::move(load.dataset_state),
            nullptr};
  }

  LoadContext context_;
  std::unique_ptr<LoadSource<Batch>> source_;
  PassSeed seed_;
  std::int64_t sequence_;
};

/// Loads ahead with the workers of a pool. Abandoning it costs nothing: what is queued is dropped,
/// and a worker that is busy drops its batch when that is made.
///
/// Plans are drawn by the thread that asks, so that generators are drawn from in Python's order.
/// Streams are read by worker 0 alone; all workers collate.
template <class Batch>
class WorkerPass final : public Pass<Batch> {
 public:
  WorkerPass(std::shared_ptr<const LoaderRecipe<Batch>> recipe,
             std::unique_ptr<LoadSource<Batch>> source, std::shared_ptr<WorkerPool> pool,
             LoadContext context, PassSeed seed)
      : pool_(std::move(pool)),
        shared_(std::make_shared<Shared>(std::move(recipe), std::move(source), *pool_,
                                         std::move(context), seed)) {}
  ~WorkerPass() override { shared_->window.cancel(); }
  WorkerPass(const WorkerPass&) = delete;
  WorkerPass& operator=(const WorkerPass&) = delete;

  std::optional<LoadedBatch<Batch>> next() override {
    shared_->load_ahead();
    auto taken = shared_->window.take(shared_->recipe->options.timeout);
    if (!taken) return std::nullopt;
    if (taken->failure) {
      shared_->window.cancel();
      std::rethrow_exception(std::move(taken->failure));
    }
    auto& slot = shared_->slots[taken->ticket.slot];
    LoadedBatch<Batch> loaded{std::move(*slot.batch),
                              taken->last,
                              taken->ticket.sequence,
                              taken->last ? shared_->remainder : -1,
                              taken->last ? shared_->padded_size : -1,
                              slot.load.samples_after,
                              slot.load.batches_after,
                              std::move(slot.load.dataset_state),
                              nullptr};
    slot = {};
    shared_->window.release(taken->ticket);
    shared_->load_ahead();
    return loaded;
  }

 private:
  struct Slot {
    PlannedLoad<Batch> load = {};
    std::optional<Batch> batch = std::nullopt;
  };

  // What the jobs hold. Not the pool: that would have to join itself.
  struct Shared : std::enable_shared_from_this<Shared> {
    Shared(std::shared_ptr<const LoaderRecipe<Batch>> of_recipe,
           std::unique_ptr<LoadSource<Batch>> of_source, WorkerPool& of_pool,
           LoadContext of_context, PassSeed of_seed)
        : recipe(std::move(of_recipe)),
          source(std::move(of_source)),
          pool(of_pool),
          seed(of_seed),
          context(std::move(of_context)),
          slots(batches_in_flight(recipe->options)),
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
      const auto read = [self = this->shared_from_this()](std::int64_t worker) {
        if (self->window.cancelled()) return;
        self->open_next(worker);
        if (self->window.begin_opening()) self->submit_read();
      };
      pool.submit(read, 0);
    }

    /// Reads what the next batch is to be, and lets a worker make it. `reader` is the worker that
    /// this is, if it is one.
    void open_next(std::optional<std::int64_t> reader = std::nullopt) {
      std::optional<PlannedLoad<Batch>> load;
      std::exception_ptr failure;
      try {
        if (reader) start(*reader);
        load = read_load(*source, seed, window.next_sequence());
      } catch (...) {
        failure = load_failure(window.next_sequence(), {});
      }
      if (!load && !failure) return window.close();
      const auto ticket = window.open();
      if (failure || load->last) window.close();
      if (failure) return window.done(ticket, std::move(failure));
      if (load->last) {
        remainder = load->remainder;
        padded_size = load->padded_size;
      }
      slots[ticket.slot].load = std::move(*load);
      pool.submit([self = this->shared_from_this(), ticket](std::int64_t worker) {
        if (!self->window.cancelled()) self->make(ticket, worker);
      });
    }

    void make(LoadWindow::Ticket ticket, std::int64_t worker) {
      auto& slot = slots[ticket.slot];
      // Told to the window outside of the handler: nothing of this thread may still refer to the
      // exception when the consumer has it.
      std::exception_ptr failure;
      try {
        start(worker);
        const BatchSeedScope seeded(seed.of_batch(ticket.sequence));
        slot.batch.emplace(slot.load.make(slot.load.indices, context));
      } catch (...) {
        failure = load_failure(ticket.sequence, slot.load.indices);
      }
      window.done(ticket, std::move(failure));
    }

    void start(std::int64_t worker) {
      const auto& options = recipe->options;
      auto& started_here = started[static_cast<std::size_t>(worker)];
      if (!options.worker_init_fn || std::exchange(started_here, 1) != 0) return;
      if (options.persistent_workers && !pool.first_time(worker)) return;
      options.worker_init_fn(worker, seed.base_seed + static_cast<std::uint64_t>(worker));
    }

    std::shared_ptr<const LoaderRecipe<Batch>> recipe;
    std::unique_ptr<LoadSource<Batch>> source;
    WorkerPool& pool;
    PassSeed seed;
    LoadContext context;
    std::vector<Slot> slots;
    LoadWindow window;
    std::vector<std::uint8_t> started;
    std::int64_t remainder = -1;
    std::int64_t padded_size = -1;
  };

  std::shared_ptr<WorkerPool> pool_;
  std::shared_ptr<Shared> shared_;
};

}  // namespace accelerate::detail
