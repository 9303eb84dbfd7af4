// src/comm/collective_range.h - the time of a thread in collectives, as a range in profiles.
#pragma once

#include <ATen/record_function.h>

#include <optional>
#include <utility>

#include "core/call_site.h"
#include "core/text.h"

namespace accelerate::detail::comm {

/// While it lives, a profiler of this thread records "accelerate::<kind>". Without a profiler it
/// costs one look at a thread-local variable.
class CollectiveRange {
 public:
  /// A call of the program; `kind` names it unless the program made it by a function of ours.
  static CollectiveRange call(const char* kind) {
    return CollectiveRange([&] {
      const auto place = current_call_site();
      return str("accelerate::", place.call != nullptr ? place.call->operation : kind);
    });
  }
  /// Waiting for a call that was started before.
  static CollectiveRange wait(const char* kind) {
    return CollectiveRange([&] { return str("accelerate::wait ", kind); });
  }
  CollectiveRange(const CollectiveRange&) = delete;
  CollectiveRange& operator=(const CollectiveRange&) = delete;

 private:
  template <class Name>
  explicit CollectiveRange(const Name& name) {
    auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (!callbacks) return;
    range_.emplace(std::move(*callbacks));
    range_->before(name());
  }

  std::optional<at::RecordFunction> range_;
};

}  // namespace accelerate::detail::comm
