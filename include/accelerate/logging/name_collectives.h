// accelerate/logging/name_collectives.h - a name for collectives that are reached from several
// lines.
#pragma once

#include <string_view>

#include "accelerate/api.h"

namespace accelerate {

/// While it lives, collectives of this thread go by a name instead of the line they are called
/// from.
class ACCELERATE_API NamedCollectives {
 public:
  [[nodiscard]] explicit NamedCollectives(std::string_view name);
  ~NamedCollectives();
  NamedCollectives(const NamedCollectives&) = delete;
  NamedCollectives& operator=(const NamedCollectives&) = delete;

 private:
  char name_[48] = {};
  const char* before_;
};

/// All ranks must call a collective from the same line; a rank that calls it from elsewhere is
/// taken for a stray. Code where that is wanted gives the collective a name:
///
///     auto named = accelerate::name_collectives("loss");
///     auto all = state.is_main_process() ? accelerate::gather(loss)
///                                        : accelerate::gather(loss.detach());
///
/// Names longer than 47 bytes are cut. Scopes nest; the inner name counts.
[[nodiscard]] inline NamedCollectives name_collectives(std::string_view name) {
  return NamedCollectives(name);
}

}  // namespace accelerate
