#include "launch/messages.h"

#include <algorithm>
#include <array>
#include <concepts>
#include <type_traits>
#include <utility>

#include "accelerate/errors.h"
#include "core/json.h"
#include "core/python_text.h"

namespace accelerate::detail {
namespace {

using Kind = AgentMessage::Kind;

constexpr std::array<std::string_view, 11> kNames = {"alive",   "hello",   "failed",  "succeeded",
                                                     "stopped", "leaving", "welcome", "start",
                                                     "stop",    "end",     "notice"};

// Calls `f(name, field)` for each field. The same list serves writing and reading.
template <class Record, class F>
void for_each_field(Record& record, F&& f) {
  using T = std::remove_const_t<Record>;
  if constexpr (std::same_as<T, Member>) {
    f("machine_rank", record.machine_rank);
    f("nproc", record.nproc);
    f("host", record.host);
    f("address", record.address);
    f("terms", record.terms);
  } else if constexpr (std::same_as<T, WorkerFailure>) {
    f("rank", record.rank);
    f("local_rank", record.local_rank);
    f("host", record.host);
    f("pid", record.pid);
    f("code", record.status.code);
    f("signal", record.status.signal);
    f("time_us", record.time_us);
    f("error_file", record.error_file);
    f("message", record.message);
    f("last_lines", record.last_lines);
    f("terminated", record.terminated_by_launcher);
  } else if constexpr (std::same_as<T, LaunchRound>) {
    f("number", record.number);
    f("restart_count", record.restart_count);
    f("node_rank", record.node_rank);
    f("nodes", record.nodes);
    f("first_rank", record.first_rank);
    f("world_size", record.world_size);
  } else {
    static_assert(std::same_as<T, Verdict>);
    f("exit_code", record.exit_code);
    f("reason", record.reason);
    f("failures", record.failures);
  }
}

// The fields that messages of this kind have.
template <class Message, class F>
void for_each_message_field(Message& message, F&& f) {
  switch (message.kind) {
    case Kind::kHello:
      return f("member", message.member);
    case Kind::kFailed:
    case Kind::kStopped:
      return f("failures", message.failures);
    case Kind::kLeaving:
      return f("signal", message.signal);
    case Kind::kStart:
      f("round", message.round);
      f("master_port", message.master_port);
      return f("agent_store", message.agent_store);
    case Kind::kEnd:
      return f("verdict", message.verdict);
    case Kind::kNotice:
      return f("text", message.text);
    default:
      return;
  }
}

// Workers write any bytes; JSON holds UTF-8 only.
std::string with_valid_utf8(std::string_view text) {
  constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD
  std::string result;
  for (std::size_t at = 0; at < text.size();) {
    const CodePoint point = next_code_point(text, at);
    result += point.valid ? text.substr(at, point.length) : kReplacement;
    at += point.length;
  }
  return result;
}

template <class T>
Value written(const T& field) {
  if constexpr (std::integral<T>) {
    return field;
  } else if constexpr (std::same_as<T, std::string>) {
    return with_valid_utf8(field);
  } else if constexpr (requires { field.begin(); }) {
    Value::List list;
    for (const auto& item : field) list.push_back(written(item));
    return list;
  } else {
    Value::Dict dict;
    for_each_field(field,
                   [&](const char* name, const auto& each) { dict.set(name, written(each)); });
    return dict;
  }
}

// Throws `ArgumentError` if the value has another type or a field is missing.
template <class T>
void read(const Value& value, T& field) {
  if constexpr (std::same_as<T, bool>) {
    field = value.as_bool();
  } else if constexpr (std::integral<T>) {
    if (!std::in_range<T>(value.as_int())) throw ArgumentError("The number is out of range.");
    field = static_cast<T>(value.as_int());
  } else if constexpr (std::same_as<T, std::string>) {
    field = value.as_string();
  } else if constexpr (requires { field.emplace_back(); }) {
    for (const auto& item : value.as_list()) read(item, field.emplace_back());
  } else {
    for_each_field(field, [&](const char* name, auto& each) { read(value.at(name), each); });
  }
}

}  // namespace

std::string to_line(const AgentMessage& message) {
  Value::Dict dict{{"kind", kNames[static_cast<std::size_t>(message.kind)]}};
  for_each_message_field(
      message, [&](const char* name, const auto& field) { dict.set(name, written(field)); });
  const std::string line = json_dumps(dict);
  return message.kind == Kind::kHello ? std::string(kGreeting) + line : line;
}

std::optional<AgentMessage> from_line(std::string_view line) {
  const bool greets = line.starts_with(kGreeting);
  if (greets) line.remove_prefix(kGreeting.size());
  try {
    const Value value = json_loads(line);
    const auto found = std::ranges::find(kNames, value.at("kind").as_string());
    if (found == kNames.end()) return std::nullopt;
    AgentMessage message{.kind = static_cast<Kind>(found - kNames.begin())};
    // Only a hello begins with the greeting.
    if (greets != (message.kind == Kind::kHello)) return std::nullopt;
    for_each_message_field(message,
                           [&](const char* name, auto& field) { read(value.at(name), field); });
    return message;
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace accelerate::detail
