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

#include "launch/failure.h"

namespace accelerate::detail {

inline constexpr std::string_view kGreeting = "ACCELERATE-LAUNCH 1 ";

/// A machine as it introduces itself.
struct Member {
  int machine_rank = 0;
  int nproc = 1;
  std::string host = {};
  std::string address = {};
  /// What all machines must have been told alike, for messages: "--num_machines 2 ...".
  std::string terms = {};
};

/// One start of all workers.
struct LaunchRound {
  int number = 0;
  int restart_count = 0;
  int node_rank = 0;  ///< of the machine this goes to
  int nodes = 1;
  int first_rank = 0;
  int world_size = 1;

  bool operator==(const LaunchRound&) const = default;
};

/// How the job ended.
struct Verdict {
  int exit_code = 0;
  /// One line for people; "" when the failures say it all.
  std::string reason = {};
  std::vector<WorkerFailure> failures = {};
};

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
