#include "comm/side_channel_server.h"

#include <algorithm>
#include <utility>

#include "core/processes.h"
#include "core/text.h"

namespace accelerate::detail::comm {
namespace {

using Kind = SideChannelMessage::Kind;

std::vector<std::string> names_of(int size) {
  std::vector<std::string> names;
  for (int rank = 0; rank < size; ++rank) names.push_back(str("rank ", rank));
  return names;
}

}  // namespace

SideChannelServer::SideChannelServer(Descriptor door, std::string password, int size,
                                     const DetectorTimes& times, std::chrono::milliseconds beat,
                                     Clock::time_point now)
    : door_(std::move(door)),
      password_(std::move(password)),
      host_(host_identity()),
      detector_(names_of(size), times, now),
      beat_(beat) {}

LineChannel SideChannelServer::own_channel(Clock::time_point now) {
  auto [theirs, ours] = LineChannel::pair(now);
  members_.push_back(std::make_unique<Member>(Member{.channel = std::move(ours)}));
  return std::move(theirs);
}

void SideChannelServer::wants(std::vector<pollfd>& fds) const {
  fds.push_back({.fd = door_.get(), .events = POLLIN, .revents = 0});
  for (const auto& member : members_) fds.push_back(member->channel.wants());
}

bool SideChannelServer::idle() const {
  return std::ranges::all_of(members_, [](const auto& member) {
    return member->channel.idle() || member->channel.closed();
  });
}

SideChannelServer::Member* SideChannelServer::member_of(int rank) {
  const auto found =
      std::ranges::find_if(members_, [&](const auto& member) { return member->rank == rank; });
  return found == members_.end() ? nullptr : found->get();
}

std::optional<std::string> SideChannelServer::work(Clock::time_point now) {
  accept(now);
  for (auto& member : members_) listen(*member, now);
  std::erase_if(members_, [](const auto& member) { return member->channel.closed(); });
  for (auto& member : members_) {
    if (now - member->channel.last_said() >= beat_) {
      member->channel.send(to_line({.kind = Kind::kBeat, .call = detector_.latest(0)}));
    }
  }
  if (found_) return std::nullopt;
  ask_around(now);
  if (const auto finding = detector_.finding(now)) {
    announce(*finding);
    return std::nullopt;
  }
  return detector_.notice(now);
}

void SideChannelServer::accept(Clock::time_point now) {
  while (auto arrival = accept_from(door_)) {
    members_.push_back(
        std::make_unique<Member>(Member{.channel = LineChannel(std::move(arrival->first), now)}));
  }
}

void SideChannelServer::listen(Member& member, Clock::time_point now) {
  for (const auto& line : member.channel.exchange(now)) {
    const auto message = message_from_line(line);
    if (!message || (member.rank < 0 && message->kind != Kind::kHello)) {
      member.channel.close();
      break;
    }
    hear(member, *message, now);
  }
  if (!member.channel.closed() || member.rank < 0) return;
  // The page outlives the process and holds its exact last call.
  if (member.page) detector_.seen(member.rank, "", read_page(*member.page));
  detector_.died(member.rank);
}

void SideChannelServer::welcome(Member& member, const SideChannelMessage& hello,
                                Clock::time_point now) {
  const bool known = hello.text == password_ && hello.rank >= 0 && hello.rank < detector_.size();
  if (!known || member_of(hello.rank) != nullptr) return member.channel.close();
  member.rank = hello.rank;
  member.pid = hello.pid;
  member.host = hello.host;
  member.page_path = hello.page;
  if (member.host == host_) member.page = open_page(member.page_path);
  detector_.call(member.rank, str("rank ", member.rank, " (", hello.name, ")"));
  detector_.heard(member.rank, now);
}

void SideChannelServer::hear(Member& member, const SideChannelMessage& message,
                             Clock::time_point now) {
  switch (message.kind) {
    case Kind::kHello:
      return welcome(member, message, now);
    case Kind::kWaits:
      return detector_.waits(member.rank, message.call, now);
    case Kind::kMovesOn:
      return detector_.moves_on(member.rank);
    case Kind::kLeft:
      return detector_.left(member.rank, message.call);
    case Kind::kThrew:
      detector_.reports(member.rank, message.call, now);
      return detector_.threw(member.rank, message.text);
    case Kind::kTransport:
      return detector_.transport_failed(member.rank, message.call, message.text, now);
    case Kind::kSeen:
      if (message.rank >= 0 && message.rank < detector_.size())
        detector_.seen(message.rank, message.text, message.call);
      return detector_.heard(member.rank, now);
    default:
      return detector_.reports(member.rank, message.call, now);
  }
}

void SideChannelServer::ask_around(Clock::time_point now) {
  const auto sequence = detector_.disputed();
  for (auto& member : members_) {
    if (sequence == 0 || member->rank < 0 || member->asked == sequence) continue;
    member->asked = sequence;
    SideChannelMessage ask{.kind = Kind::kAsk};
    ask.call.sequence = sequence;
    member->channel.send(to_line(ask));
  }
  for (const int rank : detector_.suspects(now)) {
    if (auto* suspect = member_of(rank)) look_at(*suspect);
  }
}

/// Looks up the state of the process: here if it is on this host, else by asking a rank there.
void SideChannelServer::look_at(Member& suspect) {
  if (suspect.host == host_) {
    const auto last = suspect.page ? read_page(*suspect.page) : ReportedCall{};
    return detector_.seen(suspect.rank, process_state(suspect.pid), last);
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

void SideChannelServer::announce(const Finding& finding) {
  found_ = true;
  for (auto& member : members_) {
    SideChannelMessage message{.kind = Kind::kFinding, .rank = finding.rank, .text = finding.text};
    member->channel.send(to_line(message));
  }
}

void SideChannelServer::farewell(const ReportedCall& last) {
  for (auto& member : members_) {
    if (member->rank != 0) member->channel.send(to_line({.kind = Kind::kLeft, .call = last}));
  }
}

}  // namespace accelerate::detail::comm
