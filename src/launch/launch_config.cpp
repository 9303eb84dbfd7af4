#include "launch/launch_config.h"

#include <string_view>

#include "accelerate/errors.h"
#include "core/numbers.h"
#include "core/text.h"

namespace accelerate::detail::launch {
namespace {

std::optional<unsigned> whole_number(std::string_view text) {
  return parse_number<unsigned>(trim(text));
}

[[noreturn]] void refuse(const std::string& text, const std::string& flag,
                         std::string_view reason) {
  throw ConfigError(str(flag, " is '", text, "', but ", reason,
                        " Write 0 (none), 1 (stdout), 2 (stderr) or 3 (both) for all workers, or "
                        "single ones by their local rank: 0:3,1:1."));
}

Streams read_streams(std::string_view word, const std::string& text, const std::string& flag) {
  const auto number = whole_number(word);
  if (!number || *number > 3) refuse(text, flag, str("'", word, "' names no streams."));
  return static_cast<Streams>(*number);
}

}  // namespace

Streams StreamChoice::of(int local_rank) const {
  const auto own = by_local_rank.find(local_rank);
  if (own != by_local_rank.end()) return own->second;
  return by_local_rank.empty() ? all : Streams::kNone;
}

StreamChoice StreamChoice::parse(const std::string& text, const std::string& flag) {
  StreamChoice choice;
  if (text.find(':') == std::string::npos) {
    choice.all = read_streams(text, text, flag);
    return choice;
  }
  for (const auto& part : split(text, ',')) {
    const auto colon = part.find(':');
    if (colon == std::string::npos) {
      refuse(text, flag, str("'", part, "' names no local rank."));
    }
    const auto rank = whole_number(part.substr(0, colon));
    if (!rank) refuse(text, flag, str("'", part.substr(0, colon), "' is not a local rank."));
    const Streams streams = read_streams(part.substr(colon + 1), text, flag);
    if (!choice.by_local_rank.emplace(*rank, streams).second) {
      refuse(text, flag, str("local rank ", *rank, " comes twice."));
    }
  }
  return choice;
}

}  // namespace accelerate::detail::launch
