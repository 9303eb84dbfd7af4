// src/comm/guard.h - what stands between a collective and the backend that carries it out.
//
// Internal. Every collective of a group is announced here before data moves and signed off when it
// is complete, so that a rank which strays can be named.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <span>
#include <string>

namespace accelerate::detail {

/// What a collective does, as far as all ranks must agree on it.
struct CallFacts {
  const char* kind = "";   ///< "all_reduce"; a literal
  const char* dtype = "";  ///< "float32"; a literal, "" without a tensor
  std::span<const std::int64_t> sizes = {};
  int reduction = -1;  ///< c10d's number, -1 where nothing is reduced
  int root = -1;       ///< -1 where all ranks are alike
  // Of a call on several tensors, what is behind the first one.
  std::uint64_t content = 0;  ///< the same exactly if number, dtypes and sizes are; 0: nothing
  const char* more = "";      ///< for people, e.g. ", float32[2]"
};

/// An announced collective.
struct Ticket {
  std::uint64_t sequence = 0;
  /// The same on all ranks that do the same call from the same place; 0 never.
  std::uint64_t signature = 0;
};

class CallGuard {
 public:
  virtual ~CallGuard() = default;

  /// Throws `CommError` when the group has failed already.
  [[nodiscard]] virtual Ticket enter(const CallFacts& facts) = 0;
  virtual void leave(const Ticket& ticket) noexcept = 0;

  /// The backend found that `rank` is in another call, has left or died, or does not come. Throws
  /// `CommError` with the verdict that all ranks share, or with `suspicion` when none is reached.
  [[noreturn]] virtual void fail(const Ticket& ticket, const std::string& suspicion, int rank) = 0;
  /// The same for a message from rank to rank, which nobody has announced: the exception to throw.
  /// `message` says what it is, e.g. "recv float32[4] from rank 1".
  [[nodiscard]] virtual std::exception_ptr failure_of(const std::string& message,
                                                      const std::string& suspicion, int rank) {
    try {
      fail(Ticket{}, message + ": " + suspicion, rank);
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;  // never
  }

  /// Whether a verdict is there; a backend that waits looks at it now and then and calls `fail`.
  [[nodiscard]] virtual bool failed() const noexcept = 0;
};

/// The same for calls that run on a device, where nobody can take them back: a program that waits
/// for its stream sees no exception.
class DeviceCallGuard : public CallGuard {
 public:
  /// When the group fails before the call is complete, this process reports it and ends.
  virtual void end_with(const Ticket& ticket) = 0;
  /// The transport failed under a call. Others know better why; the group fails with what is found.
  virtual void transport_failed(const Ticket& ticket, const std::string& message) = 0;
  /// `f` is called, on the side thread, when the group fails, before anything else happens.
  virtual void when_failed(std::function<void()> f) = 0;
  /// `f` is called once the program is about to learn of it by an exception: what occupies the
  /// device must end, or the program could not.
  virtual void when_told(std::function<void()> f) = 0;
};

}  // namespace accelerate::detail
