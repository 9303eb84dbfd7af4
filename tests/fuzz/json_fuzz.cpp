// Any text is either read or refused with a ConfigError; what was read survives writing and
// reading.
#include "accelerate/errors.h"
#include "core/json.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace accelerate;
  Value value;
  try {
    value = detail::json_loads(fuzz::text(data, size));
  } catch (const ConfigError&) {
    return 0;
  }
  const auto compact = detail::json_dumps(value);
  fuzz::check(fuzz::same(detail::json_loads(compact), value),
              "reading gives back what was written");
  const auto pretty = detail::json_dumps(value, {.indent = 2, .ensure_ascii = false});
  fuzz::check(fuzz::same(detail::json_loads(pretty), value), "layout and escapes do not matter");
  return 0;
}
