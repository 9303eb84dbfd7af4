#include "comm/side_channel_messages.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

namespace accelerate::detail {
namespace {

using Json = nlohmann::json;

constexpr std::array<std::string_view, 12> kNames = {"beat",   "hello", "waits", "moves_on",
                                                     "report", "left",  "threw", "transport",
                                                     "seen",   "ask",   "look",  "finding"};

Json call_to_json(const ReportedCall& call) {
  return {{"n", call.sequence},
          {"s", call.signature},
          {"t", call.text},
          {"c", call.complete},
          {"o", call.open}};
}

ReportedCall call_from_json(const Json& json) {
  return {.sequence = json.value("n", std::uint64_t{0}),
          .signature = json.value("s", std::uint64_t{0}),
          .text = json.value("t", ""),
          .complete = json.value("c", false),
          .open = json.value("o", std::uint64_t{0})};
}

}  // namespace

std::string to_line(const SideChannelMessage& message) {
  Json json = {{"kind", kNames[static_cast<std::size_t>(message.kind)]}};
  if (message.rank >= 0) json["rank"] = message.rank;
  if (message.pid != 0) json["pid"] = message.pid;
  if (!message.host.empty()) json["host"] = message.host;
  if (!message.name.empty()) json["name"] = message.name;
  if (!message.page.empty()) json["page"] = message.page;
  if (message.call.sequence != 0) json["call"] = call_to_json(message.call);
  if (!message.text.empty()) json["text"] = message.text;
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::optional<SideChannelMessage> message_from_line(std::string_view line) {
  try {
    const auto json = Json::parse(line);
    if (!json.is_object()) return std::nullopt;
    const auto name = json.value("kind", "");
    const auto found = std::find(kNames.begin(), kNames.end(), name);
    if (found == kNames.end()) return std::nullopt;
    SideChannelMessage message{.kind =
                                   static_cast<SideChannelMessage::Kind>(found - kNames.begin())};
    message.rank = json.value("rank", -1);
    message.pid = json.value("pid", 0);
    message.host = json.value("host", "");
    message.name = json.value("name", "");
    message.page = json.value("page", "");
    if (json.contains("call")) message.call = call_from_json(json.at("call"));
    message.text = json.value("text", "");
    return message;
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

}  // namespace accelerate::detail
