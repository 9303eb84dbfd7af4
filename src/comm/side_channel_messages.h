// src/comm/side_channel_messages.h - the messages between the ranks and rank 0 beside the data: one
// JSON object per line.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "comm/desync_detector.h"

namespace accelerate::detail::comm {

struct SideChannelMessage {
  enum class Kind : std::uint8_t {
    kBeat,       ///< heartbeat; `call` is the latest one of the sender
    kHello,      ///< `rank`, `pid`, `host`, `name`, `page`, and `text`, the password of the group
    kWaits,      ///< the sender has been waiting in `call`
    kMovesOn,    ///< the sender waits no more
    kReport,     ///< `call`: the answer to kAsk
    kLeft,       ///< the sender ends in order, after `call`
    kThrew,      ///< the sender ends by an exception, `text`
    kTransport,  ///< the transport failed in `call`: `text`
    kSeen,       ///< `rank` is in `text` (a state), its exact last call is `call`
    kAsk,        ///< from rank 0: asks for the call number `call.sequence`
    kLook,       ///< from rank 0: asks for the state of `rank`, process `pid`, page `page`
    kFinding,    ///< from rank 0: `rank`, `text`
  };
  Kind kind = Kind::kBeat;
  int rank = -1;
  int pid = 0;
  std::string host = {};  ///< its identity
  std::string name = {};  ///< its name in messages
  std::string page = {};
  ReportedCall call = {};
  std::string text = {};
};

[[nodiscard]] std::string to_line(const SideChannelMessage& message);
/// Returns nullopt for any other line: the port is open to every program.
[[nodiscard]] std::optional<SideChannelMessage> message_from_line(std::string_view line);

}  // namespace accelerate::detail::comm
