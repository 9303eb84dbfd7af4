// Any bytes are either a value from another process or refused with a CommError; a value that was
// read is written and read again as the same.
#include "accelerate/detail/core/object_stream.h"
#include "accelerate/errors.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace accelerate;
  Value value;
  try {
    detail::ObjectReader in(fuzz::text(data, size));
    value = in.value();
    in.finish();
  } catch (const CommError&) {
    return 0;
  }
  detail::ObjectWriter out;
  out.value(value);
  const auto written = std::move(out).bytes();
  detail::ObjectReader again(written);
  const Value back = again.value();
  again.finish();
  fuzz::check(fuzz::same(back, value), "a written value is read as the same");
  return 0;
}
