#include "launch/messages.h"

#include <array>
#include <nlohmann/json.hpp>

namespace accelerate::detail {
namespace {

using Json = nlohmann::json;
using Kind = Message::Kind;

constexpr std::array<std::string_view, 11> kNames = {"alive",   "hello",   "failed",  "succeeded",
                                                     "stopped", "leaving", "welcome", "start",
                                                     "stop",    "end",     "notice"};

Json to_json(const Member& member) {
  return {{"machine_rank", member.machine_rank},
          {"nproc", member.nproc},
          {"host", member.host},
          {"address", member.address},
          {"terms", member.terms}};
}

Member member_from(const Json& json) {
  return {.machine_rank = json.value("machine_rank", -1),
          .nproc = json.value("nproc", 0),
          .host = json.value("host", ""),
          .address = json.value("address", ""),
          .terms = json.value("terms", "")};
}

Json to_json(const WorkerFailure& failure) {
  return {{"rank", failure.rank},
          {"local_rank", failure.local_rank},
          {"host", failure.host},
          {"pid", failure.pid},
          {"code", failure.status.code},
          {"signal", failure.status.signal},
          {"time_us", failure.time_us},
          {"error_file", failure.error_file},
          {"message", failure.message},
          {"last_lines", failure.last_lines},
          {"terminated", failure.terminated_by_launcher}};
}

WorkerFailure failure_from(const Json& json) {
  WorkerFailure failure;
  failure.rank = json.value("rank", 0);
  failure.local_rank = json.value("local_rank", 0);
  failure.host = json.value("host", "");
  failure.pid = json.value("pid", 0);
  failure.status = {.code = json.value("code", 0), .signal = json.value("signal", 0)};
  failure.time_us = json.value("time_us", std::int64_t{0});
  failure.error_file = json.value("error_file", "");
  failure.message = json.value("message", "");
  failure.last_lines = json.value("last_lines", std::vector<std::string>{});
  failure.terminated_by_launcher = json.value("terminated", false);
  return failure;
}

Json to_json(const std::vector<WorkerFailure>& failures) {
  Json list = Json::array();
  for (const auto& failure : failures) list.push_back(to_json(failure));
  return list;
}

std::vector<WorkerFailure> failures_from(const Json& json) {
  std::vector<WorkerFailure> failures;
  for (const auto& each : json.value("failures", Json::array())) {
    failures.push_back(failure_from(each));
  }
  return failures;
}

Json to_json(const Round& round) {
  return {{"number", round.number},         {"restart_count", round.restart_count},
          {"node_rank", round.node_rank},   {"nodes", round.nodes},
          {"first_rank", round.first_rank}, {"world_size", round.world_size}};
}

Round round_from(const Json& json) {
  return {.number = json.value("number", 0),
          .restart_count = json.value("restart_count", 0),
          .node_rank = json.value("node_rank", 0),
          .nodes = json.value("nodes", 1),
          .first_rank = json.value("first_rank", 0),
          .world_size = json.value("world_size", 1)};
}

// Only what the kind of message is about.
void fill(Json& json, const Message& message) {
  switch (message.kind) {
    case Kind::kHello:
      json["member"] = to_json(message.member);
      return;
    case Kind::kFailed:
    case Kind::kStopped:
      json["failures"] = to_json(message.failures);
      return;
    case Kind::kLeaving:
      json["signal"] = message.signal;
      return;
    case Kind::kStart:
      json["round"] = to_json(message.round);
      json["master_port"] = message.master_port;
      json["agent_store"] = message.agent_store;
      return;
    case Kind::kEnd:
      json["exit_code"] = message.verdict.exit_code;
      json["reason"] = message.verdict.reason;
      json["failures"] = to_json(message.verdict.failures);
      return;
    case Kind::kNotice:
      json["text"] = message.text;
      return;
    default:
      return;
  }
}

std::optional<Message> read(const Json& json) {
  const auto name = json.value("kind", "");
  const auto found = std::find(kNames.begin(), kNames.end(), name);
  if (found == kNames.end()) return std::nullopt;
  Message message{.kind = static_cast<Kind>(found - kNames.begin())};
  message.member = member_from(json.value("member", Json::object()));
  message.failures = failures_from(json);
  message.signal = json.value("signal", 0);
  message.round = round_from(json.value("round", Json::object()));
  message.master_port = json.value("master_port", 0);
  message.agent_store = json.value("agent_store", false);
  message.verdict = {
      .exit_code = json.value("exit_code", 0), .reason = json.value("reason", ""), .failures = {}};
  if (message.kind == Kind::kEnd) message.verdict.failures = message.failures;
  message.text = json.value("text", "");
  return message;
}

}  // namespace

std::string to_line(const Message& message) {
  Json json = {{"kind", kNames[static_cast<std::size_t>(message.kind)]}};
  fill(json, message);
  auto line = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  return message.kind == Kind::kHello ? std::string(kGreeting) + line : line;
}

std::optional<Message> from_line(std::string_view line) {
  const bool greets = line.starts_with(kGreeting);
  if (greets) line.remove_prefix(kGreeting.size());
  try {
    const auto json = Json::parse(line);
    if (!json.is_object()) return std::nullopt;
    const auto message = read(json);
    // A greeting is for hellos, and these need one.
    return message && greets == (message->kind == Kind::kHello) ? message : std::nullopt;
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

}  // namespace accelerate::detail
