#include "launch/messages.h"

#include <algorithm>
#include <array>

#include "accelerate/errors.h"
#include "accelerate/value/from_value.h"
#include "core/json.h"

namespace accelerate::detail::launch {

// The keys of the messages.
static ACCELERATE_VALUE_FIELDS(Member, machine_rank, nproc, host, address, terms);
static ACCELERATE_VALUE_FIELDS(WorkerFailure, rank, local_rank, host, pid, status, time_us,
                               error_file, message, last_lines, terminated_by_launcher);
static ACCELERATE_VALUE_FIELDS(LaunchRound, number, restart_count, node_rank, nodes, first_rank,
                               world_size);
static ACCELERATE_VALUE_FIELDS(Verdict, exit_code, reason, failures);
static ACCELERATE_VALUE_FIELDS(AgentMessage, member, failures, all_ended, signal, round,
                               master_port, agent_store, verdict, text);

namespace {

constexpr std::array<std::string_view, 12> kNames = {"alive",   "hello",   "failed",    "succeeded",
                                                     "stopped", "leaving", "passed_on", "welcome",
                                                     "start",   "stop",    "end",       "notice"};

}  // namespace

std::string to_line(const AgentMessage& message) {
  Value::Dict dict{{"kind", kNames[static_cast<std::size_t>(message.kind)]}};
  const AgentMessage unset;
  for_each_field(message, converted_fields<AgentMessage>(),
                 [&](const auto& field, const auto& member) {
                   Value value = to_value(member);
                   if (value != to_value(unset.*field.member))
                     dict.set(field.name, std::move(value));
                 });
  auto line = json_dumps(dict, {.replace_invalid = true});
  return message.kind == AgentMessage::Kind::kHello ? std::string(kGreeting) + line : line;
}

std::optional<AgentMessage> from_line(std::string_view line) {
  const bool greets = line.starts_with(kGreeting);
  if (greets) line.remove_prefix(kGreeting.size());
  const auto dict = json_object(line);
  if (!dict) return std::nullopt;
  const auto found =
      std::ranges::find(kNames, dict->get("kind", ""), [](auto name) { return Value(name); });
  if (found == kNames.end()) return std::nullopt;
  AgentMessage message{.kind = static_cast<AgentMessage::Kind>(found - kNames.begin())};
  // A hello has a greeting, no other message has.
  if (greets != (message.kind == AgentMessage::Kind::kHello)) return std::nullopt;
  try {
    set_fields(message, converted_fields<AgentMessage>(), *dict);
    return message;
  } catch (const ArgumentError&) {
    return std::nullopt;
  }
}

}  // namespace accelerate::detail::launch
