// src/core/call_site.h - where in the user's code the collective of this thread was called.
//
// Internal, no Torch. Backends are called through c10d, which has no place for it, so it travels
// beside the call.
#pragma once

#include <cstdint>
#include <source_location>
#include <span>

namespace accelerate::detail::inline core {

/// What the user asked for, where the backend only sees bytes.
struct UserCall {
  const char* operation = "";  ///< "gather"; a literal
  const char* dtype = "";      ///< of the first tensor; a literal
  std::span<const std::int64_t> sizes = {};
  int tensors = 1;
  std::uint64_t content = 0;  ///< the same exactly if dtypes, shapes and places of all tensors are
  const char* more = "";      ///< where in a tree the tensors are, as text, e.g. ": ['x'], ['y']"
};

struct CallSite {
  const char* file = "";  ///< without its folders; "" where nothing is known
  std::uint32_t line = 0;
  /// The scope of `name_collectives`, which replaces file and line; nullptr outside of one.
  const char* name = nullptr;
  /// The name that `NamedInBackward` keeps; nullptr outside of one.
  const char* name_in_backward = nullptr;
  /// A remark for reports, which ranks do not compare. nullptr: none.
  const char* remark = nullptr;
  /// nullptr if the backend sees the whole call.
  const UserCall* call = nullptr;
};

/// The innermost place of this thread.
[[nodiscard]] CallSite current_call_site() noexcept;

/// Collectives of this thread are called from here. The outermost one counts: what the library
/// calls on behalf of the user belongs to the user's line.
class AtCallSite {
 public:
  explicit AtCallSite(const std::source_location& where) noexcept;
  ~AtCallSite();
  AtCallSite(const AtCallSite&) = delete;
  AtCallSite& operator=(const AtCallSite&) = delete;

 private:
  bool outermost_;
};

/// Collectives of this thread are made after `remark`, which must outlive this.
class AfterRemark {
 public:
  explicit AfterRemark(const char* remark) noexcept;
  ~AfterRemark();
  AfterRemark(const AfterRemark&) = delete;
  AfterRemark& operator=(const AfterRemark&) = delete;
};

/// Collectives of this thread carry out `call`, which must outlive this.
class AsUserCall {
 public:
  explicit AsUserCall(const UserCall& call) noexcept;
  ~AsUserCall();
  AsUserCall(const AsUserCall&) = delete;
  AsUserCall& operator=(const AsUserCall&) = delete;

 private:
  const UserCall* before_;
};

/// Collectives that hooks of a backward make on this thread keep the name that is in force now.
/// Without it they go by the name "backward", because ranks may call backward under any name.
class NamedInBackward {
 public:
  NamedInBackward() noexcept;
  ~NamedInBackward();
  NamedInBackward(const NamedInBackward&) = delete;
  NamedInBackward& operator=(const NamedInBackward&) = delete;

 private:
  const char* before_;
};

}  // namespace accelerate::detail::inline core
