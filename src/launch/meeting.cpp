#include "launch/meeting.h"

#include <algorithm>
#include <utility>

#include "core/text.h"
#include "launch/rendezvous_conf.h"

namespace accelerate::detail {
namespace {

using Kind = AgentMessage::Kind;

// Who connects and says nothing is no launcher.
constexpr auto kTimeForHello = std::chrono::seconds(10);
// We were stopped ourselves (Ctrl-Z, a sleeping laptop): nobody else is to blame for silence.
constexpr auto kLate = std::chrono::seconds(2);

}  // namespace

Meeting::Meeting(const MeetingOptions& options, const Descriptor* door, Clock::time_point now)
    : options_(options), door_(door), coordinator_(options.rules, now), last_look_(now) {}

Channel Meeting::own_channel() {
  auto [theirs, ours] = Channel::pair(last_look_);
  guests_.emplace(next_id_++, Guest{std::move(ours), "", false, last_look_});
  return std::move(theirs);
}

bool Meeting::door_is_open() const {
  if (door_ == nullptr || coordinator_.ended()) return false;
  return coordinator_.gathering() || !options_.rules.fixed;
}

void Meeting::wants(std::vector<pollfd>& fds) const {
  if (door_is_open()) fds.push_back({.fd = door_->get(), .events = POLLIN, .revents = 0});
  for (const auto& [id, guest] : guests_) fds.push_back(guest.channel.wants());
}

Meeting::Clock::time_point Meeting::next_event(Clock::time_point now) const {
  return std::min(coordinator_.next_event(), now + options_.keep_alive / 4);
}

void Meeting::forgive_if_late(Clock::time_point now) {
  if (now - last_look_ > options_.keep_alive / 4 + kLate) {
    for (auto& [id, guest] : guests_) guest.channel.forgive(now);
  }
  last_look_ = now;
}

void Meeting::accept_guests(Clock::time_point now) {
  while (door_is_open()) {
    auto arrival = accept_from(*door_);
    if (!arrival) return;
    auto& [socket, address] = *arrival;
    guests_.emplace(next_id_++, Guest{Channel(std::move(socket), now), address, false, now});
  }
}

void Meeting::work(Clock::time_point now) {
  forgive_if_late(now);
  accept_guests(now);
  std::vector<int> ids;
  for (const auto& [id, guest] : guests_) ids.push_back(id);
  for (const int id : ids) listen_to(id, now);
  carry_out(coordinator_.tick(now));
  for (auto& [id, guest] : guests_) guest.channel.keep_alive(options_.keep_alive / 4, now);
}

void Meeting::listen_to(int id, Clock::time_point now) {
  const auto found = guests_.find(id);
  if (found == guests_.end()) return;
  for (const auto& message : found->second.channel.exchange(now)) hear(id, message, now);
  Guest& guest = found->second;
  std::string why;
  if (guest.channel.closed()) {
    why = "is gone: its launcher ended";
  } else if (now - guest.channel.last_heard() > options_.keep_alive) {
    why = str("has been silent for ", seconds_text(options_.keep_alive),
              ": the machine or the network to it is down");
  } else if (!guest.introduced && now - guest.since > kTimeForHello) {
    guests_.erase(found);
    return;
  }
  if (why.empty()) return;
  const bool introduced = guest.introduced;
  guests_.erase(found);
  if (introduced) carry_out(coordinator_.lost(id, why, now));
}

void Meeting::hear(int id, const AgentMessage& message, Clock::time_point now) {
  Guest& guest = guests_.at(id);
  if (message.kind == Kind::kHello && !guest.introduced) {
    guest.introduced = true;
    guest.channel.send({.kind = Kind::kWelcome});
    auto member = message.member;
    if (member.address.empty()) member.address = guest.address;
    return carry_out(coordinator_.join(id, member, now));
  }
  if (!guest.introduced) return;
  switch (message.kind) {
    case Kind::kFailed:
      for (const auto& failure : message.failures) {
        carry_out(coordinator_.failed(id, failure, now));
      }
      return;
    case Kind::kSucceeded:
      return carry_out(coordinator_.succeeded(id, now));
    case Kind::kStopped:
      return carry_out(coordinator_.stopped(id, message.failures, now));
    case Kind::kLeaving:
      return carry_out(coordinator_.leaves(id, message.signal, now));
    default:
      return;
  }
}

void Meeting::carry_out(const std::vector<Coordinator::Order>& orders) {
  for (const auto& order : orders) {
    const auto guest = guests_.find(order.to);
    if (guest == guests_.end()) continue;
    AgentMessage message = order.message;
    message.master_port = options_.master_port;
    message.agent_store = options_.agent_store;
    guest->second.channel.send(message);
  }
}

bool Meeting::over() const {
  if (!coordinator_.ended()) return false;
  return std::ranges::all_of(guests_, [](const auto& each) {
    return each.second.channel.idle() || each.second.channel.closed();
  });
}

}  // namespace accelerate::detail
