// Any text is a version or is refused, and the order of two is consistent.
#include "core/version.h"

#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace accelerate;
  using detail::Version;
  const auto text = fuzz::text(data, size);
  const auto cut = text.find('\n');
  const auto a = Version::try_parse(text.substr(0, cut));
  if (!a) return 0;
  fuzz::check(*a == *a && (*a <=> *a) == 0, "a version equals itself");
  if (cut == std::string_view::npos) return 0;
  const auto b = Version::try_parse(text.substr(cut + 1));
  if (!b) return 0;
  fuzz::check((*a <=> *b) == (0 <=> (*b <=> *a)), "the order holds both ways");
  return 0;
}
