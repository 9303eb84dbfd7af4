// src/data/load_workers.h - the threads of a data loader, and the batches they have under way.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "accelerate/data/batch_samplers.h"
#include "core/processes.h"

namespace accelerate::detail::data {

/// The jobs of a loader's workers. Pool, threads and jobs share it: a worker that does not come
/// back from a dataset outlives its pool.
class JobQueue {
 public:
  struct Job {
    /// Gets the number of the worker that runs it. Does not throw. Holds all that it needs.
    std::function<void(std::int64_t worker)> run;
    /// For messages: "loading batch 3 (samples 6, 7) of Images". Called by any thread while the job
    /// runs.
    std::function<std::string()> describe;
  };
  static constexpr std::int64_t kAnyWorker = -1;

  explicit JobQueue(std::int64_t num_workers);

  /// Queues a job, for one certain worker if asked. Does nothing once the queue is stopped. Throws
  /// `StateError` in a forked process, which has no workers.
  void submit(Job job, std::int64_t worker = kAnyWorker);
  /// Waits until nothing is queued and nothing runs. Throws `DataLoaderTimeout` after `timeout`,
  /// unless that is 0.
  void wait_idle(std::chrono::milliseconds timeout);
  /// True the first time that worker `worker` asks. Only for its own thread.
  [[nodiscard]] bool first_time(std::int64_t worker);

  /// Runs jobs until the queue is stopped.
  void work(std::int64_t worker);
  /// Drops the jobs that are queued; workers end when they have done what they are at.
  void stop();
  /// Waits until all workers have ended. Returns, for each that has not after `patience`, its
  /// number and the job that it is at.
  [[nodiscard]] std::map<std::int64_t, std::string> await_end(std::chrono::milliseconds patience);
  [[nodiscard]] bool is_forked_copy() const noexcept { return owner_.is_forked_copy(); }
  /// Throws `StateError` in a forked process, which has no workers.
  void refuse_forked_copy() const { owner_.refuse_forked_copy("load a batch with workers"); }

 private:
  using Clock = std::chrono::steady_clock;
  struct Entry {
    Job job;
    std::int64_t worker;
  };
  struct Worker {
    bool initialized = false;
    bool ended = false;
    std::function<std::string()> describe = {};  // empty while it has no job
    Clock::time_point since = {};
  };
  [[nodiscard]] std::optional<Job> take(std::int64_t worker);
  [[nodiscard]] Worker& worker_of(std::int64_t worker) {
    return workers_[static_cast<std::size_t>(worker)];
  }
  [[nodiscard]] bool idle() const;
  /// The workers that have a job, with what it is.
  [[nodiscard]] std::map<std::int64_t, std::string> busy() const;

  OwnerProcess owner_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable changed_;  // a worker has no job any more
  std::deque<Entry> queue_;
  bool stopping_ = false;
  std::vector<Worker> workers_;
};

/// The worker threads of a loader. They live as long as the loader and serve all of its passes.
class WorkerPool {
 public:
  explicit WorkerPool(std::int64_t num_workers);
  /// Waits for the samples that are being read, but not for long: `kPatience`, and while an
  /// exception unwinds, which is to be shown soon, `kPatienceInUnwinding`. A worker that has not
  /// come back by then is left behind, with a warning that names it. If it still runs when the
  /// process exits, the process ends there, without the destructors of static objects, which
  /// operators need.
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  [[nodiscard]] const std::shared_ptr<JobQueue>& queue() const noexcept { return queue_; }

 private:
  static constexpr std::chrono::milliseconds kPatience{5000};
  static constexpr std::chrono::milliseconds kPatienceInUnwinding{200};

  std::shared_ptr<JobQueue> queue_;
  std::vector<std::thread> threads_;
};

/// While it lives, `stop_if_cancelled` throws in this thread once `cancelled` is set. Scopes nest:
/// a dataset may have a loader of its own.
class CancelScope {
 public:
  explicit CancelScope(const std::atomic<bool>& cancelled) noexcept;
  ~CancelScope();
  CancelScope(const CancelScope&) = delete;
  CancelScope& operator=(const CancelScope&) = delete;

 private:
  const std::atomic<bool>* outer_;
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
  [[nodiscard]] const std::atomic<bool>& cancelled() const noexcept { return cancelled_; }

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
  std::atomic<bool> cancelled_ = false;
};

/// " (samples 6, 7)", shortened if there are many; "" if there are none.
[[nodiscard]] std::string show_samples(const IndexBatch& indices);

/// The exception being handled, nested into a `DataLoaderError` that names the batch, its samples
/// and, where reading one of them failed in this thread, that sample.
[[nodiscard]] std::exception_ptr load_failure(std::int64_t sequence, const IndexBatch& indices);

}  // namespace accelerate::detail::data
