// Any bytes are either a pickle or refused with a FormatError; what was read is written and read
// again as the same. Nothing is executed, so the value is all there is.
#include "formats/pickle.h"

#include "accelerate/errors.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace accelerate;
  using namespace accelerate::detail::formats;
  Value value;
  try {
    value = pickle_loads(fuzz::text(data, size));
  } catch (const FormatError&) {
    return 0;
  }
  std::string written;
  try {
    written = pickle_dumps(value);
  } catch (const ArgumentError&) {
    return 0;  // arrays of numpy, and objects that protocol 2 has no opcodes for
  }
  fuzz::check(fuzz::same(pickle_loads(written), value), "a written value is read as the same");
  return 0;
}
