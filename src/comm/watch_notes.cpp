#include "comm/watch_notes.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

namespace accelerate::detail {
namespace {

using Json = nlohmann::json;

constexpr std::array<std::string_view, 12> kNames = {"beat",  "hello", "waits", "moves_on",
                                                     "tells", "left",  "threw", "transport",
                                                     "seen",  "ask",   "look",  "finding"};

Json call_to_json(const ToldCall& call) {
  return {{"n", call.sequence},
          {"s", call.signature},
          {"t", call.text},
          {"c", call.complete},
          {"o", call.open}};
}

ToldCall call_from_json(const Json& json) {
  return {.sequence = json.value("n", std::uint64_t{0}),
          .signature = json.value("s", std::uint64_t{0}),
          .text = json.value("t", ""),
          .complete = json.value("c", false),
          .open = json.value("o", std::uint64_t{0})};
}

}  // namespace

std::string to_line(const Note& note) {
  Json json = {{"kind", kNames[static_cast<std::size_t>(note.kind)]}};
  if (note.rank >= 0) json["rank"] = note.rank;
  if (note.pid != 0) json["pid"] = note.pid;
  if (!note.host.empty()) json["host"] = note.host;
  if (!note.name.empty()) json["name"] = note.name;
  if (!note.page.empty()) json["page"] = note.page;
  if (note.call.sequence != 0) json["call"] = call_to_json(note.call);
  if (!note.text.empty()) json["text"] = note.text;
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::optional<Note> note_from_line(std::string_view line) {
  try {
    const auto json = Json::parse(line);
    if (!json.is_object()) return std::nullopt;
    const auto name = json.value("kind", "");
    const auto found = std::find(kNames.begin(), kNames.end(), name);
    if (found == kNames.end()) return std::nullopt;
    Note note{.kind = static_cast<Note::Kind>(found - kNames.begin())};
    note.rank = json.value("rank", -1);
    note.pid = json.value("pid", 0);
    note.host = json.value("host", "");
    note.name = json.value("name", "");
    note.page = json.value("page", "");
    if (json.contains("call")) note.call = call_from_json(json.at("call"));
    note.text = json.value("text", "");
    return note;
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

}  // namespace accelerate::detail
