// src/launch/messages.h - what launchers of several machines say to each other: one JSON object per
// line.
//
// The first line of a connection is kGreeting and the `Hello`. A TCP store that gets it instead of
// its own greeting closes the connection.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launch/coordinator.h"

namespace accelerate::detail {

inline constexpr std::string_view kGreeting = "ACCELERATE-LAUNCH 1 ";

/// From a machine to the coordinator, or back.
struct AgentMessage {
  enum class Kind : std::uint8_t {
    kAlive,      ///< nothing new
    kHello,      ///< `member`; the first message of a machine
    kFailed,     ///< `failures`: a worker that failed
    kSucceeded,  ///< all workers of the machine ended well
    kStopped,    ///< all workers of the machine have been ended; `failures`: those that still ran
    kLeaving,    ///< `signal` ends the machine's launcher
    kWelcome,    ///< the answer to a hello
    kStart,      ///< `round`, `master_port`, `agent_store`
    kStop,
    kEnd,     ///< `verdict`
    kNotice,  ///< `text`
  };
  Kind kind = Kind::kAlive;
  Member member = {};
  std::vector<WorkerFailure> failures = {};
  int signal = 0;
  LaunchRound round = {};
  int master_port = 0;
  bool agent_store = false;
  Verdict verdict = {};
  std::string text = {};
};

/// One line, without its end.
[[nodiscard]] std::string to_line(const AgentMessage& message);

/// Nothing for a line that is no message: it may come from anybody who found the port.
[[nodiscard]] std::optional<AgentMessage> from_line(std::string_view line);

}  // namespace accelerate::detail
