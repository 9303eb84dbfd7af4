// Any line that arrives at the port of a launcher is a message or nothing; a message survives being
// sent on.
#include "fuzz.h"
#include "launch/messages.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace accelerate;
  const auto message = detail::launch::from_line(fuzz::text(data, size));
  if (!message) return 0;
  const auto line = detail::launch::to_line(*message);
  const auto again = detail::launch::from_line(line);
  fuzz::check(again.has_value(), "what was sent can be read");
  fuzz::check(detail::launch::to_line(*again) == line, "what was read is sent again");
  return 0;
}
