#include "formats/format_error.h"

#include "core/text.h"

namespace accelerate::detail::formats {

FormatError format_error(std::string_view source, std::uint64_t offset, std::string_view reason) {
  return FormatError(str("'", source, "', byte ", offset, ": ", reason, "."), source);
}

}  // namespace accelerate::detail::formats
