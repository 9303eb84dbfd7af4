#include "tracking/outbox.h"

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "core/log.h"
#include "core/text.h"
#include "tracking/tracker_files.h"

namespace accelerate::detail::tracking {
namespace {

// Of one call of `Deliver`. MLflow takes 1000 metrics and 1 MB in a request.
constexpr std::size_t kMostItems = 1000;
constexpr std::size_t kMostBytes = 900'000;

/// Called without the lock: the sink of messages may be slow, or log a value. What it throws is
/// ignored.
void report(const std::string& warning, const std::string& news = {}) noexcept {
  try {
    if (!warning.empty()) warn(warning);
    if (!news.empty()) info(news);
  } catch (...) {
    return;
  }
}

}  // namespace

Outbox::Outbox(OutboxOptions options, Deliver deliver)
    : options_(std::move(options)), deliver_(std::move(deliver)) {
  if (options_.in_background) thread_ = std::thread([this] { run(); });
}

Outbox::~Outbox() { finish(); }

std::size_t Outbox::size_of(const OutboxItem& item) {
  return item.bytes.size() + item.target.size() + sizeof(OutboxItem);
}

void Outbox::post(OutboxItem item) {
  std::unique_lock lock(mutex_);
  bytes_ += size_of(item);
  items_.push_back(std::move(item));
  while (bytes_ > options_.max_bytes && items_.size() > 1) {
    bytes_ -= size_of(items_.front());
    items_.pop_front();
    ++dropped_;
  }
  if (options_.in_background) {
    changed_.notify_all();
    return;
  }
  while (!items_.empty() && Clock::now() >= next_try_) deliver_some(lock);
}

void Outbox::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return finishing_ || !items_.empty(); });
    if (items_.empty() || closed_) return;
    if (Clock::now() >= next_try_) {
      deliver_some(lock);
    } else {
      changed_.wait_until(lock, next_try_);
    }
  }
}

void Outbox::deliver_some(std::unique_lock<std::mutex>& lock) {
  std::vector<OutboxItem> batch;
  for (std::size_t taken = 0; !items_.empty() && batch.size() < kMostItems && taken < kMostBytes;) {
    taken += size_of(items_.front());
    batch.push_back(std::move(items_.front()));
    items_.pop_front();
    bytes_ -= size_of(batch.back());
  }
  delivering_ = true;
  lock.unlock();
  std::size_t done = 0;
  std::string failure;
  std::string refusal;
  try {
    while (done < batch.size()) done += deliver_(std::span(batch).subspan(done));
  } catch (const ArgumentError& error) {
    ++done;
    refusal = error.what();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  lock.lock();
  delivering_ = false;
  for (auto item = batch.rbegin(); item != batch.rend() - static_cast<std::ptrdiff_t>(done);
       ++item) {
    bytes_ += size_of(*item);
    items_.push_front(std::move(*item));
  }
  std::string warning;
  std::string news;
  if (!refusal.empty()) {
    ++dropped_;
    if (!std::exchange(refused_, true)) {
      warning = str("The tracker ", options_.tracker, " does not take a value: ", refusal);
    }
  }
  if (!failure.empty()) {
    warning = note_failure(failure);
  } else if (std::exchange(delay_, std::chrono::milliseconds(0)).count() != 0) {
    next_try_ = {};
    news = str("The tracker ", options_.tracker, " writes again.");
  }
  changed_.notify_all();
  lock.unlock();
  report(warning, news);
  lock.lock();
}

std::string Outbox::note_failure(const std::string& reason) {
  const bool first = delay_.count() == 0;
  delay_ = first ? options_.first_delay : std::min(2 * delay_, options_.longest_delay);
  next_try_ = Clock::now() + delay_;
  if (!first) return {};
  return str("The tracker ", options_.tracker, " cannot write: ", reason,
             " Values are kept and written later; training goes on.");
}

void Outbox::finish() noexcept {
  try {
    std::unique_lock lock(mutex_);
    if (std::exchange(finishing_, true)) return;
    next_try_ = {};
    if (options_.in_background) {
      // Some tries before the deadline, however long the last delay was.
      options_.longest_delay = std::min(options_.longest_delay, options_.deadline / 4);
      changed_.notify_all();
      changed_.wait_for(lock, options_.deadline, [&] { return items_.empty() && !delivering_; });
      closed_ = true;
      changed_.notify_all();
      lock.unlock();
      thread_.join();
      lock.lock();
    } else {
      while (!items_.empty() && Clock::now() >= next_try_) deliver_some(lock);
    }
    const auto lost = dropped_ + static_cast<std::int64_t>(items_.size());
    items_.clear();
    lock.unlock();
    if (lost == 0) return;
    report(str("The tracker ", options_.tracker, " could not write ", lost,
               lost == 1 ? " entry, which is lost." : " entries, which are lost."));
  } catch (const std::exception&) {
    // No memory for a message, or no lock: it cannot be reported.
  }
}

std::size_t deliver_to_files(std::span<const OutboxItem> items) {
  const auto& item = items.front();
  if (item.mode == WriteMode::kReplace) {
    replace_file(item.target, item.bytes);
  } else {
    append_to_file(item.target, item.bytes);
  }
  return 1;
}

}  // namespace accelerate::detail::tracking
