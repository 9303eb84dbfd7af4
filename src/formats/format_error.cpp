#include "formats/format_error.h"

#include <algorithm>

#include "core/json.h"
#include "core/text.h"

namespace accelerate::detail::formats {

FormatError format_error(std::string_view source, std::uint64_t offset, std::string_view reason) {
  return FormatError(str("'", source, "', byte ", offset, ": ", reason, "."), source);
}

Value json_content(std::string_view text, const std::filesystem::path& source) {
  try {
    return json_loads_unique(text, str("'", source.string(), "'"));
  } catch (const ConfigError& error) {
    throw FormatError(error.what(), source);
  }
}

std::string_view problem_with_inner_path(std::string_view name) {
  constexpr std::size_t kMaxFileName = 4096;
  if (name.empty()) return "is empty";
  if (name.size() > kMaxFileName) return "is longer than 4096 bytes";
  if (name.starts_with('/')) return "is absolute";
  if (name.find('\\') != name.npos) return "has a backslash";
  if (std::ranges::any_of(name, [](unsigned char c) { return c < 0x20 || c == 0x7F; })) {
    return "has control characters";
  }
  for (const auto& part : split(name, '/')) {
    if (part.empty() || part == "." || part == "..") return "leads out of the folder, or nowhere";
  }
  return {};
}

}  // namespace accelerate::detail::formats
