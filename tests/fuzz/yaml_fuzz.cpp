// Any text is either read or refused with a ConfigError; what was read survives writing and
// reading.
#include "accelerate/errors.h"
#include "core/yaml.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace accelerate;
  Value value;
  try {
    value = detail::yaml_loads(fuzz::text(data, size));
  } catch (const ConfigError&) {
    return 0;
  }
  // The order of keys is not kept: they are written sorted.
  const auto once = detail::yaml_dumps(value);
  const auto again = detail::yaml_loads(once);
  fuzz::check(detail::yaml_dumps(again) == once, "what was written is written again");
  return 0;
}
