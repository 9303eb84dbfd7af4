// src/tracking/outbox.h - what a tracker writes, kept until it could be written.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <thread>

namespace accelerate::detail::tracking {

/// How a file item is written.
enum class WriteMode : std::uint8_t { kAppend, kReplace };

struct OutboxItem {
  std::string target;  ///< the path of a file, or what `Deliver` makes of it
  std::string bytes;
  WriteMode mode = WriteMode::kAppend;
};

struct OutboxOptions {
  std::string tracker;  ///< its name, for messages
  /// Deliver on a thread, for servers. Otherwise `post` delivers.
  bool in_background = false;
  std::size_t max_bytes = std::size_t{64} << 20;
  /// Before another try after a failure; each failure doubles it.
  std::chrono::milliseconds first_delay{1000};
  std::chrono::milliseconds longest_delay{60000};
  /// How long `finish` waits for the thread.
  std::chrono::milliseconds deadline{10000};
};

/// Delivers items in the order of `post`. Those that cannot be delivered are kept and tried again;
/// beyond `max_bytes` the oldest are dropped and counted. Errors become warnings, the first of a
/// row only. `post` and `finish` are for one thread at a time.
class Outbox {
 public:
  /// Delivers some of the items, from the first on, and returns how many. Throws if the first one
  /// could not be delivered; then it must have had no effect. An `ArgumentError` says that the item
  /// will never be accepted: it is dropped.
  using Deliver = std::function<std::size_t(std::span<const OutboxItem>)>;

  Outbox(OutboxOptions options, Deliver deliver);
  ~Outbox();
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;

  void post(OutboxItem item);
  /// Delivers what is left, and reports how much was lost.
  void finish() noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  void run();
  void deliver_some(std::unique_lock<std::mutex>& lock);
  /// Returns the warning if it is the first of a row.
  [[nodiscard]] std::string note_failure(const std::string& reason);
  [[nodiscard]] static std::size_t size_of(const OutboxItem& item);

  OutboxOptions options_;
  Deliver deliver_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<OutboxItem> items_;
  std::size_t bytes_ = 0;
  std::int64_t dropped_ = 0;
  std::chrono::milliseconds delay_{0};  ///< 0 while all goes well
  Clock::time_point next_try_{};
  bool delivering_ = false;
  bool refused_ = false;  ///< and reported
  bool finishing_ = false;
  bool closed_ = false;  ///< the deadline has passed: the thread ends
  std::thread thread_;
};

/// `Deliver` for items whose target is a file: each is written whole or not at all.
[[nodiscard]] std::size_t deliver_to_files(std::span<const OutboxItem> items);

}  // namespace accelerate::detail::tracking
