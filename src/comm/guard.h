// src/comm/guard.h - the interface between a collective and the guard that watches it.
//
// Internal. Backends announce every collective of a group here before data moves, and report when
// it is complete, so that a rank that diverges can be named.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <span>
#include <string>

namespace accelerate::detail::comm {

/// The properties of a collective on which all ranks must agree.
struct CallFacts {
  const char* kind = "";   ///< "all_reduce"; a literal
  const char* dtype = "";  ///< "float32"; a literal, "" without a tensor
  std::span<const std::int64_t> sizes = {};
  int reduction = -1;  ///< c10d's number, -1 if nothing is reduced
  int root = -1;       ///< -1 if there is no root
  // The tensors after the first one, of a call on several.
  std::uint64_t content = 0;  ///< a hash of their number, dtypes and sizes; 0 if there are none
  const char* more = "";      ///< as text, e.g. ", float32[2]"
  bool on_device = false;     ///< its end is noticed late: see `DeviceCallGuard::add_time`
  std::int64_t bytes = 0;     ///< of all tensors that this rank gives; ranks need not agree
};

/// An announced collective.
struct Ticket {
  std::uint64_t sequence = 0;
  /// Equal on all ranks that make the same call at the same line; never 0.
  std::uint64_t signature = 0;
};

class CallGuard {
 public:
  virtual ~CallGuard() = default;

  /// Throws `CommError` when the group has failed already.
  [[nodiscard]] virtual Ticket enter(const CallFacts& facts) = 0;
  virtual void leave(const Ticket& ticket) noexcept = 0;

  /// The backend found that `rank` is in another call, has left, died, or is late. Throws
  /// `CommError` with the verdict that all ranks share, or with `suspicion` if there is none.
  [[noreturn]] virtual void fail(const Ticket& ticket, const std::string& suspicion, int rank) = 0;
  /// As `fail`, for a message from rank to rank, which is not announced; returns the exception.
  /// `message` describes it, e.g. "recv float32[4] from rank 1".
  [[nodiscard]] virtual std::exception_ptr failure_of(const std::string& message,
                                                      const std::string& suspicion, int rank) {
    try {
      fail(Ticket{}, message + ": " + suspicion, rank);
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;  // never
  }

  /// Whether there is a verdict. A backend that waits checks this from time to time.
  [[nodiscard]] virtual bool failed() const noexcept = 0;
};

/// The guard of calls that run on a device, where they cannot be cancelled: a program that waits
/// for its stream sees no exception.
class DeviceCallGuard : public CallGuard {
 public:
  /// How long a call has taken on its device; part of `nanoseconds_in_collectives`.
  virtual void add_time(std::chrono::nanoseconds time) noexcept = 0;
  /// If the group fails before the call is complete, this process reports that and ends.
  virtual void end_process_on_failure(const Ticket& ticket) = 0;
  /// The transport failed under a call. The root cause may come from another rank: the group fails
  /// with the diagnosis.
  virtual void transport_failed(const Ticket& ticket, const std::string& message) = 0;
  /// `f` is called, on the side thread, when the group fails, before anything else happens.
  virtual void when_failed(std::function<void()> f) = 0;
  /// `f` is called before the program gets the failure as an exception: it ends what occupies the
  /// device, or the program could not end.
  virtual void before_throw(std::function<void()> f) = 0;
};

}  // namespace accelerate::detail::comm
