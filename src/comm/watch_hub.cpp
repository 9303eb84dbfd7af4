#include "comm/watch_hub.h"

#include <algorithm>
#include <utility>

#include "core/processes.h"
#include "core/text.h"

namespace accelerate::detail {
namespace {

using Kind = Note::Kind;

std::vector<std::string> names_of(int size) {
  std::vector<std::string> names;
  for (int rank = 0; rank < size; ++rank) names.push_back(str("rank ", rank));
  return names;
}

}  // namespace

WatchHub::WatchHub(Descriptor door, std::string password, int size, const JuryTimes& times,
                   std::chrono::milliseconds beat, Clock::time_point now)
    : door_(std::move(door)),
      password_(std::move(password)),
      host_(host_identity()),
      jury_(names_of(size), times, now),
      beat_(beat) {}

LineChannel WatchHub::own_channel(Clock::time_point now) {
  auto [theirs, ours] = LineChannel::pair(now);
  members_.push_back(std::make_unique<Member>(Member{.channel = std::move(ours)}));
  return std::move(theirs);
}

void WatchHub::wants(std::vector<pollfd>& fds) const {
  fds.push_back({.fd = door_.get(), .events = POLLIN, .revents = 0});
  for (const auto& member : members_) fds.push_back(member->channel.wants());
}

bool WatchHub::idle() const {
  return std::ranges::all_of(members_, [](const auto& member) {
    return member->channel.idle() || member->channel.closed();
  });
}

WatchHub::Member* WatchHub::member_of(int rank) {
  const auto found =
      std::ranges::find_if(members_, [&](const auto& member) { return member->rank == rank; });
  return found == members_.end() ? nullptr : found->get();
}

std::optional<std::string> WatchHub::work(Clock::time_point now) {
  accept(now);
  for (auto& member : members_) listen(*member, now);
  std::erase_if(members_, [](const auto& member) { return member->channel.closed(); });
  for (auto& member : members_) {
    if (now - member->channel.last_said() >= beat_) {
      member->channel.send(to_line({.kind = Kind::kBeat, .call = jury_.latest(0)}));
    }
  }
  if (found_) return std::nullopt;
  ask_around(now);
  if (const auto finding = jury_.finding(now)) {
    announce(*finding);
    return std::nullopt;
  }
  return jury_.notice(now);
}

void WatchHub::accept(Clock::time_point now) {
  while (auto arrival = accept_from(door_)) {
    members_.push_back(
        std::make_unique<Member>(Member{.channel = LineChannel(std::move(arrival->first), now)}));
  }
}

void WatchHub::listen(Member& member, Clock::time_point now) {
  for (const auto& line : member.channel.exchange(now)) {
    const auto note = note_from_line(line);
    if (!note || (member.rank < 0 && note->kind != Kind::kHello)) {
      member.channel.close();
      break;
    }
    hear(member, *note, now);
  }
  if (!member.channel.closed() || member.rank < 0) return;
  // Its page outlives it: the last call is exact.
  if (member.page) jury_.seen(member.rank, "", read_page(*member.page));
  jury_.died(member.rank);
}

void WatchHub::welcome(Member& member, const Note& hello, Clock::time_point now) {
  const bool known = hello.text == password_ && hello.rank >= 0 && hello.rank < jury_.size();
  if (!known || member_of(hello.rank) != nullptr) return member.channel.close();
  member.rank = hello.rank;
  member.pid = hello.pid;
  member.host = hello.host;
  member.page_path = hello.page;
  if (member.host == host_) member.page = open_page(member.page_path);
  jury_.call(member.rank, str("rank ", member.rank, " (", hello.name, ")"));
  jury_.heard(member.rank, now);
}

void WatchHub::hear(Member& member, const Note& note, Clock::time_point now) {
  switch (note.kind) {
    case Kind::kHello:
      return welcome(member, note, now);
    case Kind::kWaits:
      return jury_.waits(member.rank, note.call, now);
    case Kind::kMovesOn:
      return jury_.moves_on(member.rank);
    case Kind::kLeft:
      return jury_.left(member.rank, note.call);
    case Kind::kThrew:
      jury_.tells(member.rank, note.call, now);
      return jury_.threw(member.rank, note.text);
    case Kind::kTransport:
      return jury_.transport_failed(member.rank, note.call, note.text, now);
    case Kind::kSeen:
      if (note.rank >= 0 && note.rank < jury_.size()) jury_.seen(note.rank, note.text, note.call);
      return jury_.heard(member.rank, now);
    default:
      return jury_.tells(member.rank, note.call, now);
  }
}

void WatchHub::ask_around(Clock::time_point now) {
  const auto sequence = jury_.disputed();
  for (auto& member : members_) {
    if (sequence == 0 || member->rank < 0 || member->asked == sequence) continue;
    member->asked = sequence;
    Note ask{.kind = Kind::kAsk};
    ask.call.sequence = sequence;
    member->channel.send(to_line(ask));
  }
  for (const int rank : jury_.suspects(now)) {
    if (auto* suspect = member_of(rank)) look_at(*suspect);
  }
}

/// How it is, by the system of its host: ours, or that of a neighbour which we ask.
void WatchHub::look_at(Member& suspect) {
  if (suspect.host == host_) {
    const auto last = suspect.page ? read_page(*suspect.page) : ToldCall{};
    return jury_.seen(suspect.rank, process_state(suspect.pid), last);
  }
  if (std::exchange(suspect.looked_at, true)) return;
  for (auto& neighbour : members_) {
    if (neighbour.get() == &suspect || neighbour->host != suspect.host) continue;
    neighbour->channel.send(to_line({.kind = Kind::kLook,
                                     .rank = suspect.rank,
                                     .pid = suspect.pid,
                                     .page = suspect.page_path}));
    return;
  }
}

void WatchHub::announce(const Finding& finding) {
  found_ = true;
  for (auto& member : members_) {
    Note note{.kind = Kind::kFinding, .rank = finding.rank, .text = finding.text};
    member->channel.send(to_line(note));
  }
}

void WatchHub::farewell(const ToldCall& last) {
  for (auto& member : members_) {
    if (member->rank != 0) member->channel.send(to_line({.kind = Kind::kLeft, .call = last}));
  }
}

}  // namespace accelerate::detail
