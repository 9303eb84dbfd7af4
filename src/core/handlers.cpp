// The list of handlers as a whole.
#include <set>

#include "accelerate/errors.h"
#include "accelerate/kwargs.h"
#include "core/text.h"

namespace accelerate {

void validate(const std::vector<KwargsHandler>& handlers, const Environment& environment) {
  std::set<std::size_t> seen;
  for (const auto& handler : handlers) {
    std::visit(
        [&]<class T>(const T& options) {
          if (!seen.insert(handler.index()).second) {
            throw ConfigError(detail::str("kwargs_handlers has two ", T::kOptionsName,
                                          ". Give one handler of each kind."));
          }
          validate(options, environment);
        },
        handler);
  }
}

}  // namespace accelerate
