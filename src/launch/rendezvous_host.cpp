#include "launch/rendezvous_host.h"

#include <algorithm>
#include <utility>

#include "core/text.h"
#include "launch/rendezvous_conf.h"

namespace accelerate::detail::launch {
namespace {

using Kind = AgentMessage::Kind;

// A connection without a hello within this time does not come from a launcher.
constexpr auto kTimeForHello = std::chrono::seconds(10);
// A pause of our own (Ctrl-Z, a sleeping laptop) must not count as silence of the others.
constexpr auto kLate = std::chrono::seconds(2);

}  // namespace

RendezvousHost::RendezvousHost(const RendezvousHostOptions& options, const Descriptor* listener,
                               Clock::time_point now)
    : options_(options), listener_(listener), coordinator_(options.rules, now), last_work_(now) {}

Channel RendezvousHost::own_channel() {
  auto [theirs, ours] = Channel::pair(last_work_);
  peers_.emplace(next_id_++, Peer{std::move(ours), "", false, last_work_});
  return std::move(theirs);
}

bool RendezvousHost::is_accepting() const {
  if (listener_ == nullptr || coordinator_.ended()) return false;
  return coordinator_.gathering() || !options_.rules.fixed;
}

void RendezvousHost::wants(std::vector<pollfd>& fds) const {
  if (is_accepting()) fds.push_back({.fd = listener_->get(), .events = POLLIN, .revents = 0});
  for (const auto& [id, peer] : peers_) fds.push_back(peer.channel.wants());
}

RendezvousHost::Clock::time_point RendezvousHost::next_event(Clock::time_point now) const {
  return std::min(coordinator_.next_event(), now + options_.keep_alive / 4);
}

void RendezvousHost::forgive_after_pause(Clock::time_point now) {
  if (now - last_work_ > options_.keep_alive / 4 + kLate) {
    for (auto& [id, peer] : peers_) peer.channel.forgive(now);
  }
  last_work_ = now;
}

void RendezvousHost::accept_peers(Clock::time_point now) {
  while (is_accepting()) {
    auto arrival = accept_from(*listener_);
    if (!arrival) return;
    auto& [socket, address] = *arrival;
    peers_.emplace(next_id_++, Peer{Channel(std::move(socket), now), address, false, now});
  }
}

void RendezvousHost::work(Clock::time_point now) {
  forgive_after_pause(now);
  accept_peers(now);
  std::vector<int> ids;
  for (const auto& [id, peer] : peers_) ids.push_back(id);
  for (const int id : ids) serve(id, now);
  carry_out(coordinator_.tick(now));
  for (auto& [id, peer] : peers_) peer.channel.keep_alive(options_.keep_alive / 4, now);
}

void RendezvousHost::serve(int id, Clock::time_point now) {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;
  for (const auto& message : found->second.channel.exchange(now)) handle(id, message, now);
  Peer& peer = found->second;
  std::string why;
  if (peer.channel.closed()) {
    why = "is gone: its launcher ended";
  } else if (now - peer.channel.last_heard() > options_.keep_alive) {
    why = str("has been silent for ", seconds_text(options_.keep_alive),
              ": the machine or the network to it is down");
  } else if (!peer.introduced && now - peer.since > kTimeForHello) {
    peers_.erase(found);
    return;
  }
  if (why.empty()) return;
  const bool introduced = peer.introduced;
  peers_.erase(found);
  if (introduced) carry_out(coordinator_.lost(id, why, now));
}

void RendezvousHost::handle(int id, const AgentMessage& message, Clock::time_point now) {
  Peer& peer = peers_.at(id);
  if (message.kind == Kind::kHello && !peer.introduced) {
    peer.introduced = true;
    peer.channel.send({.kind = Kind::kWelcome});
    auto member = message.member;
    if (member.address.empty()) member.address = peer.address;
    return carry_out(coordinator_.join(id, member, now));
  }
  if (!peer.introduced) return;
  switch (message.kind) {
    case Kind::kFailed:
      for (const auto& failure : message.failures) {
        carry_out(coordinator_.failed(id, failure, now));
      }
      if (message.all_ended) carry_out(coordinator_.all_ended(id, now));
      return;
    case Kind::kSucceeded:
      return carry_out(coordinator_.succeeded(id, now));
    case Kind::kStopped:
      return carry_out(coordinator_.stopped(id, message.failures, now));
    case Kind::kLeaving:
      return carry_out(coordinator_.leaves(id, message.signal, now));
    case Kind::kPassedOn:
      return coordinator_.passed_on(message.signal);
    default:
      return;
  }
}

void RendezvousHost::carry_out(const std::vector<Coordinator::Order>& orders) {
  for (const auto& order : orders) {
    const auto peer = peers_.find(order.to);
    if (peer == peers_.end()) continue;
    AgentMessage message = order.message;
    message.master_port = options_.master_port;
    message.agent_store = options_.agent_store;
    peer->second.channel.send(message);
  }
}

bool RendezvousHost::over() const {
  if (!coordinator_.ended()) return false;
  return std::ranges::all_of(peers_, [](const auto& each) {
    return each.second.channel.idle() || each.second.channel.closed();
  });
}

}  // namespace accelerate::detail::launch
