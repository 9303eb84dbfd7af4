#include "comm/watch_notes.h"

#include <algorithm>
#include <array>
#include <tuple>

#include "accelerate/errors.h"
#include "accelerate/from_value.h"
#include "core/json.h"

namespace accelerate::detail {
namespace {

constexpr std::array<std::string_view, 12> kNames = {"beat",  "hello", "waits", "moves_on",
                                                     "tells", "left",  "threw", "transport",
                                                     "seen",  "ask",   "look",  "finding"};

constexpr auto kFields = ACCELERATE_FIELDS(Note, rank, pid, host, name, page, text);

// A call as it travels: JSON's integers are signed, a signature is not.
using Call = std::tuple<std::uint64_t, std::int64_t, std::string, bool, std::uint64_t>;

Call to_tuple(const ToldCall& call) {
  return {call.sequence, static_cast<std::int64_t>(call.signature), call.text, call.complete,
          call.open};
}

ToldCall to_call(const Call& call) {
  const auto& [sequence, signature, text, complete, open] = call;
  return {.sequence = sequence,
          .signature = static_cast<std::uint64_t>(signature),
          .text = text,
          .complete = complete,
          .open = open};
}

}  // namespace

std::string to_line(const Note& note) {
  Value::Dict dict{{"kind", kNames[static_cast<std::size_t>(note.kind)]}};
  const Note unset;
  for_each_field(note, kFields, [&](const auto& field, const auto& member) {
    if (member != unset.*field.member) dict.set(field.name, to_value(member));
  });
  if (note.call.sequence != 0) dict.set("call", to_value(to_tuple(note.call)));
  return json_dumps(dict, {.replace_invalid = true});
}

std::optional<Note> note_from_line(std::string_view line) {
  const auto dict = json_object(line);
  if (!dict) return std::nullopt;
  const auto found = std::ranges::find(kNames, dict->get("kind", ""),
                                       [](std::string_view name) { return Value(name); });
  if (found == kNames.end()) return std::nullopt;
  Note note{.kind = static_cast<Note::Kind>(found - kNames.begin())};
  try {
    set_fields(note, kFields, *dict);
    if (const Value* call = dict->get("call")) note.call = to_call(from_value<Call>(*call));
    return note;
  } catch (const ArgumentError&) {
    return std::nullopt;
  }
}

}  // namespace accelerate::detail
