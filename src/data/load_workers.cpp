#include "data/load_workers.h"

#include <ATen/Parallel.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>
#include <utility>

#include "accelerate/data/options.h"
#include "accelerate/detail/data/indexed_fetch.h"
#include "comm/group_guard.h"
#include "core/exception_text.h"
#include "core/log.h"
#include "core/signals_blocked.h"
#include "core/text.h"

// Of the OpenMP runtime that LibTorch brings along, if it does.
extern "C" void omp_set_num_threads(int) __attribute__((weak));

namespace accelerate::detail::data {
namespace {

/// Operators that a worker calls run in its own thread: with a team of threads each, workers would
/// fight over the cores. `at::set_num_threads` is no help, it changes every thread to come.
void keep_operators_in_this_thread() {
  at::get_num_threads();  // sets this thread's number on the first call, over whatever was set
  if (omp_set_num_threads != nullptr) omp_set_num_threads(1);
}

thread_local std::optional<std::int64_t> failed_sample;

thread_local const std::atomic<bool>* cancel_flag = nullptr;

constexpr std::size_t kMostIndicesShown = 16;

/// Ends the making of a batch that is not wanted any more. Never reaches the program.
class LoadCancelled : public std::exception {
 public:
  [[nodiscard]] const char* what() const noexcept override { return "the pass was left"; }
};

/// Destructors must not throw.
void leave_behind(std::int64_t worker, const std::string& job) noexcept {
  try {
    warn_from_any_rank(
        str("A data loader ends without its worker ", worker, ", which has been ", job,
            " and does not come back. Its thread is left behind with the dataset, and ends with "
            "the process. Find out what the dataset is waiting for."));
  } catch (...) {  // NOLINT(bugprone-empty-catch): a sink of the program that throws
  }
}

/// Ends the process where a worker that was left behind still runs: it may call operators, whose
/// tables are static objects that are about to go.
void end_without_destructors(int status, void* of_queue) {
  auto& queue = **static_cast<std::shared_ptr<JobQueue>*>(of_queue);
  if (queue.is_forked_copy() || queue.await_end(std::chrono::milliseconds(0)).empty()) return;
  comm::GroupGuard::this_process_ends();
  std::cout.flush();
  std::clog.flush();
  std::fflush(nullptr);
  ::_exit(status);
}

}  // namespace

CancelScope::CancelScope(const std::atomic<bool>& cancelled) noexcept
    : outer_(std::exchange(cancel_flag, &cancelled)) {}

CancelScope::~CancelScope() { cancel_flag = outer_; }

void SampleChecks::stop_if_cancelled() {
  if (cancel_flag != nullptr && cancel_flag->load(std::memory_order_relaxed)) throw LoadCancelled();
}

std::string show_samples(const IndexBatch& indices) {
  if (indices.empty()) return "";
  const IndexBatch shown(
      indices.begin(),
      indices.begin() + static_cast<std::ptrdiff_t>(std::min(indices.size(), kMostIndicesShown)));
  const auto more = indices.size() > shown.size() ? str(", ... ", indices.size(), " in all") : "";
  return str(indices.size() == 1 ? " (sample " : " (samples ", join(shown), more, ")");
}

JobQueue::JobQueue(std::int64_t num_workers) : workers_(static_cast<std::size_t>(num_workers)) {}

void JobQueue::submit(Job job, std::int64_t worker) {
  refuse_forked_copy();
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return;
    queue_.push_back({std::move(job), worker});
  }
  // A job for one worker must wake that one, and which one sleeps is not known.
  worker == kAnyWorker ? work_.notify_one() : work_.notify_all();
}

void JobQueue::wait_idle(std::chrono::milliseconds timeout) {
  owner_.refuse_forked_copy("wait for the workers of a data loader");
  std::unique_lock lock(mutex_);
  const auto is_idle = [this] { return idle(); };
  if (timeout.count() == 0) return changed_.wait(lock, is_idle);
  if (changed_.wait_for(lock, timeout, is_idle)) return;
  const auto at_work = busy();
  throw DataLoaderTimeout(
      str("A pass of the data loader cannot begin: ",
          at_work.empty() ? "the workers" : str("worker ", at_work.begin()->first),
          " did not leave the pass before within ", timeout.count(), " ms",
          at_work.empty() ? "" : str(", ", at_work.begin()->second),
          ". Raise DataLoaderOptions::timeout, or find out what the dataset is waiting for."),
      0, {});
}

bool JobQueue::first_time(std::int64_t worker) {
  return !std::exchange(worker_of(worker).initialized, true);
}

bool JobQueue::idle() const {
  return queue_.empty() &&
         std::ranges::none_of(workers_, [](const Worker& worker) { return bool(worker.describe); });
}

std::map<std::int64_t, std::string> JobQueue::busy() const {
  std::map<std::int64_t, std::string> result;
  for (std::size_t i = 0; i < workers_.size(); ++i) {
    if (!workers_[i].describe) continue;
    const auto time = Clock::now() - workers_[i].since;
    result[static_cast<std::int64_t>(i)] =
        str(workers_[i].describe(), " for ",
            std::chrono::duration_cast<std::chrono::milliseconds>(time).count(), " ms");
  }
  return result;
}

std::optional<JobQueue::Job> JobQueue::take(std::int64_t worker) {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const auto mine = std::ranges::find_if(queue_, [worker](const Entry& entry) {
      return entry.worker == kAnyWorker || entry.worker == worker;
    });
    if (mine != queue_.end()) {
      Job job = std::move(mine->job);
      queue_.erase(mine);
      worker_of(worker).describe = job.describe;
      worker_of(worker).since = Clock::now();
      return job;
    }
    work_.wait(lock);
  }
  worker_of(worker).ended = true;
  changed_.notify_all();
  return std::nullopt;
}

void JobQueue::work(std::int64_t worker) {
  while (auto job = take(worker)) {
    job->run(worker);
    job.reset();  // what it holds is gone before the queue counts as idle
    std::function<std::string()> dropped;
    const std::lock_guard lock(mutex_);
    dropped.swap(worker_of(worker).describe);
    changed_.notify_all();
  }
}

void JobQueue::stop() {
  std::deque<Entry> dropped;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    dropped.swap(queue_);
  }
  work_.notify_all();
}

std::map<std::int64_t, std::string> JobQueue::await_end(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  const auto all_ended = [this] { return std::ranges::all_of(workers_, &Worker::ended); };
  if (changed_.wait_for(lock, patience, all_ended)) return {};
  return busy();
}

WorkerPool::WorkerPool(std::int64_t num_workers) : queue_(std::make_shared<JobQueue>(num_workers)) {
  const SignalsBlocked blocked;
  try {
    for (std::int64_t worker = 0; worker < num_workers; ++worker) {
      threads_.emplace_back([queue = queue_, worker] {
        pthread_setname_np(pthread_self(), str("data-", worker).c_str());
        keep_operators_in_this_thread();
        queue->work(worker);
      });
    }
  } catch (const std::exception& error) {  // those that did start must end first
    queue_->stop();
    for (auto& thread : threads_) thread.join();
    throw ArgumentError(str("num_workers is ", num_workers, ", but the system starts no more than ",
                            threads_.size(), " threads here (", error.what(),
                            "). Lower num_workers."));
  }
}

WorkerPool::~WorkerPool() {
  if (queue_->is_forked_copy()) {  // the threads are not here
    for (auto& thread : threads_) thread.detach();
    return;
  }
  queue_->stop();
  const bool unwinding = std::uncaught_exceptions() > 0;
  const auto left = queue_->await_end(unwinding ? kPatienceInUnwinding : kPatience);
  for (std::size_t i = 0; i < threads_.size(); ++i) {
    const auto worker = left.find(static_cast<std::int64_t>(i));
    if (worker == left.end()) {
      threads_[i].join();
      continue;
    }
    threads_[i].detach();
    leave_behind(worker->first, worker->second);
  }
  if (!left.empty()) ::on_exit(end_without_destructors, new std::shared_ptr<JobQueue>(queue_));
}

LoadWindow::LoadWindow(std::size_t capacity, bool in_order, std::int64_t first_sequence)
    : in_order_(in_order), opened_(first_sequence), taken_(first_sequence) {
  for (std::size_t slot = 0; slot < capacity; ++slot) free_slots_.push_back(slot);
}

bool LoadWindow::begin_opening() {
  const std::lock_guard lock(mutex_);
  if (opening_ || closed_ || cancelled_ || free_slots_.empty()) return false;
  opening_ = true;
  return true;
}

LoadWindow::Ticket LoadWindow::open() {
  const std::lock_guard lock(mutex_);
  opening_ = false;
  const Ticket ticket{opened_++, free_slots_.back()};
  free_slots_.pop_back();
  return ticket;
}

std::int64_t LoadWindow::next_sequence() const {
  const std::lock_guard lock(mutex_);
  return opened_;
}

void LoadWindow::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
}

void LoadWindow::done(Ticket ticket, std::exception_ptr failure) {
  {
    const std::lock_guard lock(mutex_);
    ready_.push_back({ticket, std::move(failure)});
  }
  changed_.notify_all();
}

std::vector<LoadWindow::Ready>::iterator LoadWindow::next_ready() {
  if (!in_order_) return ready_.begin();
  return std::ranges::find_if(
      ready_, [this](const Ready& ready) { return ready.ticket.sequence == taken_; });
}

std::optional<LoadWindow::Taken> LoadWindow::take(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const auto settled = [this] {
    return next_ready() != ready_.end() || (closed_ && taken_ == opened_) || cancelled_;
  };
  if (timeout.count() == 0) {
    changed_.wait(lock, settled);
  } else if (!changed_.wait_for(lock, timeout, settled)) {
    const auto text = str("Batch ", taken_, " of the data loader did not come within ",
                          timeout.count(), " ms. Raise DataLoaderOptions::timeout, load with more ",
                          "workers, or find out what the dataset is waiting for.");
    return Taken{.failure = std::make_exception_ptr(DataLoaderTimeout(text, taken_, {}))};
  }
  const auto ready = next_ready();
  if (ready == ready_.end()) return std::nullopt;
  Taken taken{ready->ticket, false, std::move(ready->failure)};
  ready_.erase(ready);
  ++taken_;
  taken.last = closed_ && taken_ == opened_;
  return taken;
}

void LoadWindow::release(Ticket ticket) {
  const std::lock_guard lock(mutex_);
  free_slots_.push_back(ticket.slot);
}

void LoadWindow::cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
  ready_.clear();
}

void SampleChecks::note_failed(std::int64_t index) noexcept { failed_sample = index; }

std::exception_ptr load_failure(std::int64_t sequence, const IndexBatch& indices) {
  auto sample = std::exchange(failed_sample, std::nullopt);
  if (sample && std::ranges::find(indices, *sample) == indices.end()) sample.reset();
  const auto where = sample && indices.size() > 1 ? str(" at sample ", *sample) : "";
  const auto text = str("Batch ", sequence, " of the data loader", show_samples(indices),
                        " could not be loaded", where, ": ", current_exception_text().text());
  try {
    std::throw_with_nested(DataLoaderError(text, sequence, indices, sample));
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace accelerate::detail::data
