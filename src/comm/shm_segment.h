// src/comm/shm_segment.h - memory that the ranks of one host share, and how they wait for each
// other in it.
//
// Internal, without Torch. The segment is an anonymous file (memfd) that all ranks map: it has no
// name in /dev/shm, so nothing is left there whatever becomes of the ranks.
//
// Collectives proceed in steps. Before a step each rank writes into its own slot; once all ranks
// have arrived, each reads the slots of the others. A rank has two slots, used in turn: one is read
// while the other is filled for the next step. With its arrival a rank publishes the signature of
// its call, so that ranks in different calls are found before they read data.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/guard.h"

namespace accelerate::detail::comm {

struct ShmOptions {
  /// Bytes per rank in one step. Rank 0 decides, as for all sizes but `inline_bytes`.
  std::int64_t chunk_bytes = 1 << 20;
  /// Messages from rank to rank of up to this size are sent before they are received.
  std::int64_t mailbox_bytes = 256 << 10;
  /// Up to this size every rank reduces all of the data, which takes one step instead of two.
  std::int64_t direct_bytes = 32 << 10;
  /// Asynchronous calls with more than this run on a thread of their own.
  std::int64_t inline_bytes = 64 << 10;
  /// How long a waiting rank spins before it yields, and how often it yields before it sleeps.
  /// Negative values choose by the number of ranks and cores.
  std::chrono::microseconds spin = std::chrono::microseconds(-1);
  int yields = -1;
  /// A rank that has not arrived after this long has failed.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// How long ranks look for each other when the group is made.
  std::chrono::milliseconds meeting_timeout = std::chrono::seconds(60);
};

enum class ShmFault : std::uint8_t {
  kNone,
  kPending,  ///< incomplete at the end of the wait budget
  kOtherCall,
  kLeft,
  kDied,
  kLate,
  kVerdict,  ///< the guard has the diagnosis
  kClosed,   ///< this rank closes its side
};

/// How a wait ended, and the rank at fault.
struct ShmOutcome {
  ShmFault fault = ShmFault::kNone;
  int rank = -1;
};

/// How long to wait for others.
struct WaitBudget {
  using Clock = std::chrono::steady_clock;
  /// When the caller stops waiting, which is no fault. A time in the past means: do not wait.
  Clock::time_point until = Clock::time_point::max();
  /// After this the missing rank is at fault.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// Whether to sleep after spinning; otherwise the wait ends then.
  bool sleep = true;
};

/// The pauses of a waiting rank before it sleeps: it spins, then yields.
///
/// Spinning is useless if the rank shares its core with the one it waits for, and a yield is slow
/// if an unrelated process takes the core for milliseconds. So a step that did not help is skipped
/// for a while.
class ShmPauses {
 public:
  using Clock = WaitBudget::Clock;

  /// What earlier waits of the process have learned.
  struct Habits {
    std::atomic<Clock::rep> no_yield_before{0};
    std::atomic<unsigned> vain_spins{0};
  };

  ShmPauses(std::chrono::microseconds spin, int yields, Habits& habits) noexcept;
  /// False when it is time to sleep.
  [[nodiscard]] bool next() noexcept;
  /// The wait was successful.
  void came() noexcept;

 private:
  Clock::time_point spin_until_;
  int spins_ = 0;
  int yields_;
  bool spinning_;
  Clock::time_point next_yield_{};  // when the last one took too long
  Habits* habits_;
};

/// The slots of the step that a rank fills or has just completed.
class ShmSlots {
 public:
  ShmSlots(std::byte* base, std::size_t bytes, std::uint64_t step, int rank, int size)
      : base_(base), bytes_(bytes), step_(step), rank_(rank), size_(size) {}

  [[nodiscard]] std::byte* of(int rank) const noexcept { return at(rank, step_); }
  [[nodiscard]] std::byte* own() const noexcept { return of(rank_); }
  /// The slot that `rank` filled for the step before: still as it was.
  [[nodiscard]] const std::byte* before(int rank) const noexcept { return at(rank, step_ - 1); }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return size_; }

 private:
  [[nodiscard]] std::byte* at(int rank, std::uint64_t step) const noexcept {
    return base_ + (static_cast<std::size_t>(rank) * 2 + (step & 1)) * bytes_;
  }

  std::byte* base_;
  std::size_t bytes_;
  std::uint64_t step_;
  int rank_;
  int size_;
};

/// A stream of bytes from one rank to another.
struct ShmRing {
  alignas(128) std::atomic<std::uint64_t> written{0};
  alignas(128) std::atomic<std::uint64_t> read{0};
};

class ShmSegment {
 public:
  static constexpr int kMaxRanks = 64;

  /// Rank 0 makes the segment. Returns null and sets `why_not` if the system refuses.
  [[nodiscard]] static std::unique_ptr<ShmSegment> make(int size, const ShmOptions& options,
                                                        std::string& why_not);
  /// The others map it. Returns null and sets `why_not` if it is not found at `address`.
  [[nodiscard]] static std::unique_ptr<ShmSegment> open(const std::string& address, int rank,
                                                        int size, const ShmOptions& options,
                                                        std::string& why_not);
  ~ShmSegment();
  ShmSegment(const ShmSegment&) = delete;
  ShmSegment& operator=(const ShmSegment&) = delete;

  /// Where other processes find the segment of rank 0.
  [[nodiscard]] std::string address() const;
  /// To be called when all ranks have mapped the segment: from then on their end is noticed.
  void watch_peers();

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return size_; }
  /// Bytes per rank in one step, which fit into the caches. A long reduction may use more, up to
  /// `slot_bytes`.
  [[nodiscard]] std::size_t chunk_bytes() const noexcept;
  [[nodiscard]] std::size_t slot_bytes() const noexcept;
  [[nodiscard]] std::int64_t direct_bytes() const noexcept;

  // --- steps: by one thread at a time

  /// What to fill before the next `arrive`.
  [[nodiscard]] ShmSlots next_slots() const noexcept { return slots(step_ + 1); }
  /// What may be read after `await`.
  [[nodiscard]] ShmSlots slots() const noexcept { return slots(step_); }
  /// This rank is in `call` and has filled its slot. The step before must be complete.
  void arrive(std::uint64_t call) noexcept;
  /// Waits until all ranks have arrived and compares their calls. A fault other than `kPending` and
  /// `kClosed` is reported to all ranks, and every later step ends with it.
  [[nodiscard]] ShmOutcome await(const WaitBudget& patience, const CallGuard* guard);

  // --- messages: by any thread

  /// The bytes from one rank to another. The sender prepares them before the first use.
  [[nodiscard]] ShmRing& ring(int from, int to) const noexcept;
  [[nodiscard]] std::byte* ring_data(int from, int to) const noexcept;
  [[nodiscard]] std::size_t ring_bytes() const noexcept;
  /// Returns false if the system has no memory for the messages to that rank.
  [[nodiscard]] bool prepare_ring(int to) noexcept;
  /// Wakes a rank that waits for messages.
  void ring_bell(int rank) noexcept;
  [[nodiscard]] std::uint32_t bell() const noexcept;
  /// Sleeps until the bell of this rank is no longer at `seen`, at most 100 ms and until `end`.
  void await_bell(std::uint32_t seen, WaitBudget::Clock::time_point end) noexcept;
  /// `kLeft` or `kDied` if the rank has ended, else `kNone`.
  [[nodiscard]] ShmFault state_of(int rank) const noexcept;
  /// Reports a fault to all ranks, which ends their waits. Returns the first fault that any rank
  /// has reported.
  ShmOutcome report_fault(ShmOutcome outcome) noexcept;
  [[nodiscard]] ShmOutcome reported_fault() const noexcept;
  [[nodiscard]] ShmPauses pauses() const noexcept { return {spin_, yields_, habits_}; }

  // --- the end

  /// Ends every wait of this rank, now and later, with `kClosed`.
  void close() noexcept;
  [[nodiscard]] bool closed() const noexcept { return closed_.load(); }

  /// Tells the others that this rank has left. Data that it has sent stays readable.
  void leave() noexcept;

  /// "rank 2 (process 711) has ended".
  [[nodiscard]] std::string describe(const ShmOutcome& outcome) const;

 private:
  struct Line;
  struct Header;
  ShmSegment(int rank, int size, const ShmOptions& options);

  [[nodiscard]] bool map(int fd, std::size_t bytes, std::string& why_not);
  void tune(const ShmOptions& options);
  [[nodiscard]] ShmSlots slots(std::uint64_t step) const noexcept;
  [[nodiscard]] bool complete() const noexcept;
  [[nodiscard]] bool behind(int rank) const noexcept;
  [[nodiscard]] ShmOutcome compare_calls();
  [[nodiscard]] ShmOutcome wait_for_all(const WaitBudget& patience, const CallGuard* guard);
  [[nodiscard]] ShmOutcome glance(const CallGuard* guard);
  [[nodiscard]] ShmOutcome look_around(const WaitBudget& patience, const CallGuard* guard);
  [[nodiscard]] bool sleep_until(WaitBudget::Clock::time_point end) noexcept;

  int rank_;
  int size_;
  int fd_ = -1;
  std::byte* base_ = nullptr;
  std::size_t mapped_ = 0;
  Header* header_ = nullptr;
  std::uint64_t step_ = 0;
  std::uint64_t call_ = 0;
  ShmOutcome failed_ = {};
  WaitBudget::Clock::time_point waiting_since_{};
  std::chrono::microseconds spin_{0};
  int yields_ = 0;
  mutable ShmPauses::Habits habits_;
  std::vector<int> watched_;  // a pidfd per rank; -1 for ourselves and where there is none
  std::atomic<bool> closed_{false};
};

}  // namespace accelerate::detail::comm
