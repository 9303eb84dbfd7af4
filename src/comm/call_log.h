// src/comm/call_log.h - the latest calls of a rank in a group, and which of them are complete.
//
// Internal, no Torch. Writing it costs a fraction of a microsecond per collective; texts are made
// only when they are asked for.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "comm/desync_detector.h"
#include "comm/guard.h"
#include "core/call_site.h"

namespace accelerate::detail::comm {

/// One call, without pointers, so that other processes can read it. Texts are cut to their arrays.
struct CallRecord {
  std::uint64_t sequence = 0;
  std::uint64_t signature = 0;
  std::int64_t sizes[6] = {};
  std::int32_t dimensions = -1;  ///< -1: no tensor
  std::int32_t reduction = -1;
  std::int32_t root = -1;
  std::int32_t tensors = 1;
  std::uint32_t line = 0;
  bool complete = true;
  char kind[24] = {};
  char dtype[16] = {};
  char file[48] = {};
  char name[48] = {};
  char more[112] = {};
  char remark[112] = {};

  /// "all_reduce sum float32[256] at train.cpp:31".
  [[nodiscard]] std::string text() const;
};

/// The latest call of a rank, readable for other processes, even after its writer has died.
struct CallPage {
  std::atomic<std::uint32_t> version{0};  ///< odd while it is being written
  std::uint64_t open = 0;                 ///< as in ReportedCall
  CallRecord call = {};
};

/// A consistent copy; if the writer died while it wrote, the bytes that are there.
[[nodiscard]] ReportedCall read_page(const CallPage& page);

class CallLog {
 public:
  using Clock = std::chrono::steady_clock;

  /// `page`, if any, always holds the latest call. It must outlive the log.
  explicit CallLog(CallPage* page = nullptr) : page_(page) {}

  [[nodiscard]] Ticket enter(const CallFacts& facts, const CallSite& site);
  void leave(const Ticket& ticket) noexcept;

  /// The oldest call that has been waiting since before `since`.
  [[nodiscard]] std::optional<ReportedCall> waiting(Clock::time_point since) const;
  /// The call `sequence`; the latest one if that has not been reached or is no longer stored.
  [[nodiscard]] ReportedCall report(std::uint64_t sequence) const;
  [[nodiscard]] ReportedCall latest() const;
  /// The last call before all that are under way; `sequence` is 0 if there is none.
  [[nodiscard]] ReportedCall last_completed() const;

 private:
  static constexpr std::size_t kSize = 1024;
  struct Entry {
    CallRecord call = {};
    Clock::time_point since = {};
    std::int64_t bytes = 0;
    bool timed = false;  ///< it counts in `timed_calls_` until it ends
  };

  [[nodiscard]] Entry& entry(std::uint64_t sequence) { return entries_[sequence % kSize]; }
  [[nodiscard]] const Entry& entry(std::uint64_t sequence) const {
    return entries_[sequence % kSize];
  }
  [[nodiscard]] ReportedCall report(const Entry& entry) const;

  CallPage* page_;
  mutable std::mutex mutex_;
  std::array<Entry, kSize> entries_ = {};
  std::uint64_t last_ = 0;
  std::uint64_t oldest_open_ = 1;
  int timed_calls_ = 0;  // under way
  Clock::time_point timed_since_ = {};
};

/// How long collectives of this process were under way so far: of a group, the time in which there
/// was at least one; the sum over groups. The rank that the others wait for has the least of it.
[[nodiscard]] std::int64_t nanoseconds_in_collectives() noexcept;
void add_time_in_collectives(std::chrono::nanoseconds time) noexcept;

/// Equal on all ranks that make the same call at the same line; never 0. The line does not count
/// for barriers and broadcasts: rank 0 may make them in another branch.
[[nodiscard]] std::uint64_t signature_of(const CallFacts& facts, const CallSite& site);

}  // namespace accelerate::detail::comm
