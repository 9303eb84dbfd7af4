// src/launch/messages.h - messages between the launchers of several machines: one JSON object per
// line.
//
// The first line of a connection is kGreeting and a kHello. A TCP store that gets it instead of its
// own greeting closes the connection.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launch/failure.h"

namespace accelerate::detail::launch {

inline constexpr std::string_view kGreeting = "ACCELERATE-LAUNCH 1 ";

/// A machine of the job.
struct Member {
  int machine_rank = 0;
  int nproc = 1;
  std::string host = {};
  std::string address = {};
  /// The flags that must be the same on all machines: "--num_machines 2 ...".
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
  /// One line for the user; "" if the failures explain it.
  std::string reason = {};
  std::vector<WorkerFailure> failures = {};
};

/// From a machine to the coordinator, or back.
struct AgentMessage {
  enum class Kind : std::uint8_t {
    kAlive,      ///< keeps the connection alive
    kHello,      ///< `member`; the first message of a machine
    kFailed,     ///< `failures`: workers that failed; `all_ended`
    kSucceeded,  ///< all workers of the machine ended with code 0
    kStopped,    ///< all workers of the machine have been ended; `failures`: those that still ran
    kLeaving,    ///< `signal` ends the machine's launcher
    kPassedOn,   ///< the launcher got `signal` and passed it on to its workers
    kWelcome,    ///< the answer to a hello
    kStart,      ///< `round`, `master_port`, `agent_store`
    kStop,
    kEnd,     ///< `verdict`
    kNotice,  ///< `text`
  };
  Kind kind = Kind::kAlive;
  Member member = {};
  std::vector<WorkerFailure> failures = {};
  /// No worker of the machine runs any more.
  bool all_ended = false;
  int signal = 0;
  LaunchRound round = {};
  int master_port = 0;
  bool agent_store = false;
  Verdict verdict = {};
  std::string text = {};
};

/// One line, without its end.
[[nodiscard]] std::string to_line(const AgentMessage& message);

/// Returns nullopt for a line that is not a message: any program may connect to the port.
[[nodiscard]] std::optional<AgentMessage> from_line(std::string_view line);

}  // namespace accelerate::detail::launch
