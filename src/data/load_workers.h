// src/data/load_workers.h - the threads of a data loader, and the batches they have under way.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "accelerate/data/batch_samplers.h"

namespace accelerate::detail::data {

/// The worker threads of a loader. They live as long as the loader and serve all of its passes.
class WorkerPool {
 public:
  /// Gets the number of the worker that runs it. Does not throw.
  using Job = std::function<void(std::int64_t worker)>;
  static constexpr std::int64_t kAnyWorker = -1;

  explicit WorkerPool(std::int64_t num_workers);
  /// Waits for the jobs that are running; those that are queued are dropped.
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  /// Queues a job, for one certain worker if asked. Does nothing once the pool is stopping.
  void submit(Job job, std::int64_t worker = kAnyWorker);
  /// Waits until nothing is queued and nothing runs.
  void wait_idle();
  /// True the first time that worker `worker` asks. Only for its own thread.
  [[nodiscard]] bool first_time(std::int64_t worker);

 private:
  struct Entry {
    Job job;
    std::int64_t worker;
  };
  void stop();
  void run(std::int64_t worker);
  std::optional<Job> take(std::int64_t worker);

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable idle_;
  std::deque<Entry> queue_;
  std::int64_t running_ = 0;
  bool stopping_ = false;
  std::vector<std::uint8_t> started_;
  std::vector<std::thread> threads_;
};

/// Which batches of a pass are under way, done or failed: a window of bounded size over their
/// sequence. The batches themselves lie with the owner, one per slot.
class LoadWindow {
 public:
  struct Ticket {
    std::int64_t sequence = 0;
    std::size_t slot = 0;
  };
  struct Taken {
    Ticket ticket = {};
    /// No other batch will follow.
    bool last = false;
    std::exception_ptr failure = nullptr;
  };

  LoadWindow(std::size_t capacity, bool in_order, std::int64_t first_sequence = 0);

  /// True if the caller may open the next batch: there is room, and no other thread is about to.
  [[nodiscard]] bool begin_opening();
  /// The next number of the sequence and a free slot. Ends what `begin_opening` began.
  [[nodiscard]] Ticket open();
  /// The number that `open` will return. Only for the thread that may open.
  [[nodiscard]] std::int64_t next_sequence() const;
  /// Nothing is opened after this.
  void close();

  /// The batch is made, or has failed.
  void done(Ticket ticket, std::exception_ptr failure);

  /// The batch whose turn it is, as soon as it is done or failed; none when all have been taken.
  /// Its slot is the caller's until `release`. Fails with `DataLoaderTimeout` after `timeout`,
  /// unless that is 0.
  [[nodiscard]] std::optional<Taken> take(std::chrono::milliseconds timeout);
  void release(Ticket ticket);

  /// No batch will be taken any more.
  void cancel();
  [[nodiscard]] bool cancelled() const;

 private:
  struct Ready {
    Ticket ticket;
    std::exception_ptr failure;
  };
  [[nodiscard]] std::vector<Ready>::iterator next_ready();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  const bool in_order_;
  std::vector<std::size_t> free_slots_;
  std::vector<Ready> ready_ = {};
  std::int64_t opened_;
  std::int64_t taken_;
  bool closed_ = false;
  bool opening_ = false;
  bool cancelled_ = false;
};

/// The exception being handled, nested into a `DataLoaderError` that names the batch, its samples
/// and, where reading one of them failed in this thread, that sample.
[[nodiscard]] std::exception_ptr load_failure(std::int64_t sequence, const IndexBatch& indices);

}  // namespace accelerate::detail::data
