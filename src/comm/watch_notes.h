// src/comm/watch_notes.h - what ranks tell rank 0 beside the data, and hear from it: one JSON
// object per line.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "comm/jury.h"

namespace accelerate::detail {

struct Note {
  enum class Kind : std::uint8_t {
    kBeat,       ///< I live; `call` is my latest one; from rank 0 its own
    kHello,      ///< `rank`, `pid`, `host`, `name`, `page`, and `text`, the password of the group
    kWaits,      ///< I have been waiting in `call`
    kMovesOn,    ///< I wait no more
    kTells,      ///< `call`: what you asked for
    kLeft,       ///< I end, in order, after `call`
    kThrew,      ///< I end by an exception, `text`
    kTransport,  ///< the transport failed in `call`: `text`
    kSeen,       ///< `rank` is in `text` (a state), its exact last call is `call`
    kAsk,        ///< from rank 0: what did you do in `call.sequence`?
    kLook,       ///< from rank 0: how is `rank`, process `pid`, page `page`, on your host?
    kFinding,    ///< from rank 0: `rank`, `text`
  };
  Kind kind = Kind::kBeat;
  int rank = -1;
  int pid = 0;
  std::string host = {};  ///< its identity
  std::string name = {};  ///< its name for people
  std::string page = {};
  ToldCall call = {};
  std::string text = {};
};

[[nodiscard]] std::string to_line(const Note& note);
/// Nothing for a line that is no note: the port is open to anybody.
[[nodiscard]] std::optional<Note> note_from_line(std::string_view line);

}  // namespace accelerate::detail
