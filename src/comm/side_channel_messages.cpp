#include "comm/side_channel_messages.h"

#include <algorithm>
#include <array>
#include <tuple>

#include "accelerate/errors.h"
#include "accelerate/value/from_value.h"
#include "core/json.h"

namespace accelerate::detail::comm {
namespace {

constexpr std::array<std::string_view, 12> kNames = {"beat",   "hello", "waits", "moves_on",
                                                     "report", "left",  "threw", "transport",
                                                     "seen",   "ask",   "look",  "finding"};

constexpr auto kFields = ACCELERATE_FIELDS(SideChannelMessage, rank, pid, host, name, page, text);

// A call as it travels: JSON's integers are signed, a signature is not.
using Call = std::tuple<std::uint64_t, std::int64_t, std::string, bool, std::uint64_t>;

Call to_tuple(const ReportedCall& call) {
  return {call.sequence, static_cast<std::int64_t>(call.signature), call.text, call.complete,
          call.open};
}

ReportedCall to_call(const Call& call) {
  const auto& [sequence, signature, text, complete, open] = call;
  return {.sequence = sequence,
          .signature = static_cast<std::uint64_t>(signature),
          .text = text,
          .complete = complete,
          .open = open};
}

}  // namespace

std::string to_line(const SideChannelMessage& message) {
  Value::Dict dict{{"kind", kNames[static_cast<std::size_t>(message.kind)]}};
  const SideChannelMessage unset;
  for_each_field(message, kFields, [&](const auto& field, const auto& member) {
    if (member != unset.*field.member) dict.set(field.name, to_value(member));
  });
  if (message.call.sequence != 0) dict.set("call", to_value(to_tuple(message.call)));
  return json_dumps(dict, {.replace_invalid = true});
}

std::optional<SideChannelMessage> message_from_line(std::string_view line) {
  const auto dict = json_object(line);
  if (!dict) return std::nullopt;
  const auto found = std::ranges::find(kNames, dict->get("kind", ""),
                                       [](std::string_view name) { return Value(name); });
  if (found == kNames.end()) return std::nullopt;
  SideChannelMessage message{.kind = static_cast<SideChannelMessage::Kind>(found - kNames.begin())};
  try {
    set_fields(message, kFields, *dict);
    if (const Value* call = dict->get("call")) message.call = to_call(from_value<Call>(*call));
    return message;
  } catch (const ArgumentError&) {
    return std::nullopt;
  }
}

}  // namespace accelerate::detail::comm
