#include "accelerate/enums.h"

#include <algorithm>

#include "accelerate/errors.h"
#include "core/numbers.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

// Configuration files from before the rename still say TPU.
constexpr std::string_view kOldXla = "TPU";

std::vector<std::string> choices(const EnumTable& table) {
  return {table.texts.begin(), table.texts.begin() + static_cast<std::ptrdiff_t>(table.size)};
}

int index_of(const EnumTable& table, std::string_view text) {
  const auto end = table.texts.begin() + static_cast<std::ptrdiff_t>(table.size);
  const auto found = std::find_if(table.texts.begin(), end, [&](std::string_view word) {
    return table.spelling == Spelling::kExact ? word == text : to_lower(word) == to_lower(text);
  });
  return found == end ? -1 : static_cast<int>(found - table.texts.begin());
}

int number(const EnumTable& table, std::string_view text) {
  const auto value = parse_number<int>(text).value_or(0);
  return value >= 1 && value <= static_cast<int>(table.size) ? value - 1 : -1;
}

/// The choice the user may have meant; a wrong case counts as near.
std::string suggestion(const EnumTable& table, std::string_view text) {
  const auto words = choices(table);
  std::vector<std::string> lower;
  std::ranges::transform(words, std::back_inserter(lower),
                         [](const auto& w) { return to_lower(w); });
  const auto near = nearest(to_lower(text), lower);
  const auto found = std::ranges::find(lower, near);
  return found == lower.end() ? std::string()
                              : words[static_cast<std::size_t>(found - lower.begin())];
}

}  // namespace

int EnumTable::find(std::string_view text) const {
  if (const int index = index_of(*this, text); index >= 0) return index;
  if (spelling == Spelling::kAnyCaseOrNumber) return number(*this, text);
  if (type == kEnumTable<DistributedType>.type && text == kOldXla) {
    return static_cast<int>(DistributedType::kXla);
  }
  return -1;
}

int EnumTable::parse(std::string_view text, std::string_view source) const {
  if (const int index = find(text); index >= 0) return index;
  const auto near = suggestion(*this, text);
  throw ConfigError(str(source, source.empty() ? "" : " is ", "'", text, "'",
                        source.empty() ? " is not a valid " : ", which is not a valid ", type,
                        ". Choose one of: ", join(choices(*this)), ".",
                        near.empty() ? "" : str(" Did you mean '", near, "'?")));
}

}  // namespace accelerate::detail::inline core
