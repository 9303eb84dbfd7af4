#include "launch/coordinator.h"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <set>
#include <tuple>
#include <utility>

#include "core/text.h"
#include "launch/failure.h"
#include "launch/rendezvous_conf.h"

namespace accelerate::detail::launch {
namespace {

using Order = Coordinator::Order;
using Orders = Coordinator::Orders;
using Kind = AgentMessage::Kind;

// A worker that lost its peers is seldom the root cause. The root cause (the exit code of another
// worker, a machine that is gone) is usually known within this time.
constexpr auto kRootCauseDelay = std::chrono::seconds(2);
// A worker that a signal ended cannot tell in which call it was; its peers can within this time.
constexpr auto kSurvivorDelay = std::chrono::milliseconds(500);

Order notice(int to, std::string text) {
  return {.to = to, .message = {.kind = Kind::kNotice, .text = std::move(text)}};
}

// Sorts addresses as numbers: 10.0.0.9 before 10.0.0.10.
std::pair<int, std::array<unsigned char, 16>> sort_key(const std::string& address) {
  std::array<unsigned char, 16> bytes{};
  if (::inet_pton(AF_INET, address.c_str(), bytes.data()) == 1) return {4, bytes};
  if (::inet_pton(AF_INET6, address.c_str(), bytes.data()) == 1) return {6, bytes};
  return {9, bytes};
}

}  // namespace

Coordinator::Coordinator(CoordinatorRules rules, Clock::time_point now) : rules_(rules) {
  gather(now);
}

void Coordinator::gather(Clock::time_point now) {
  phase_ = Phase::kGathering;
  failures_.clear();
  decide_at_.reset();
  last_call_until_.reset();
  gather_until_ = now + rules_.join_timeout;
  for (auto& [id, node] : nodes_) node.doing = Doing::kWaits;
}

std::string Coordinator::describe(const Node& node) const {
  const auto place = node.member.address.empty() || node.member.address == node.member.host
                         ? node.member.host
                         : str(node.member.host, ", ", node.member.address);
  return rules_.fixed ? str("machine ", node.member.machine_rank, " (", place, ")")
                      : str("machine ", place);
}

std::optional<std::string> Coordinator::objection(const Member& member) const {
  for (const auto& [id, node] : nodes_) {
    if (node.member.terms == member.terms) continue;
    return str("it was started with ", member.terms, ", and ", describe(node), " with ",
               node.member.terms, ". All machines need the same values.");
  }
  if (rules_.fixed && (member.machine_rank < 0 || member.machine_rank >= rules_.max_nodes)) {
    return str("its --machine_rank is ", member.machine_rank,
               ", and the machines of this job are 0 to ", rules_.max_nodes - 1, ".");
  }
  return std::nullopt;
}

Orders Coordinator::join(Id id, const Member& member, Clock::time_point now) {
  const auto refuse = [&](const std::string& why) {
    const Verdict verdict{.exit_code = kWrongInput,
                          .reason = str("this machine cannot take part in the job: ", why)};
    return Orders{{.to = id, .message = {.kind = Kind::kEnd, .verdict = verdict}}};
  };
  if (ended()) return refuse("it has ended.");
  if (const auto why = objection(member)) return refuse(*why);
  if (rules_.fixed) {
    for (const auto& [other, node] : nodes_) {
      if (node.member.machine_rank != member.machine_rank) continue;
      if (!gathering()) return refuse(str(describe(node), " runs already."));
      const Node twin{member};
      nodes_.emplace(id, twin);
      return end(
          {.exit_code = kWrongInput,
           .reason = str("two machines say that they are number ", member.machine_rank, ": ",
                         node.member.host, " (", node.member.address, ") and ", member.host, " (",
                         member.address, "). Give each machine its own --machine_rank, from 0 to ",
                         rules_.max_nodes - 1, ".")});
    }
  }
  nodes_.emplace(id, Node{member});
  if (gathering()) return start_if_complete(now);
  if (static_cast<int>(nodes_.size()) > rules_.max_nodes) {
    return {notice(id, str("the job runs on ", rules_.max_nodes,
                           " machines, which is its most; waiting until one leaves"))};
  }
  if (phase_ == Phase::kStopping) return {};
  // A new round with one more machine.
  auto orders = stop(now);
  announce(str(describe(nodes_.at(id)), " joins"), orders);
  return orders;
}

bool Coordinator::enough() const {
  return static_cast<int>(nodes_.size()) >= (rules_.fixed ? rules_.max_nodes : rules_.min_nodes);
}

Orders Coordinator::start_if_complete(Clock::time_point now) {
  if (!enough()) {
    last_call_until_.reset();
    return {};
  }
  if (static_cast<int>(nodes_.size()) >= rules_.max_nodes) return start();
  if (!last_call_until_) last_call_until_ = now + rules_.last_call;
  return now >= *last_call_until_ ? start() : Orders{};
}

std::vector<Coordinator::Id> Coordinator::in_rank_order() const {
  std::vector<Id> ids;
  for (const auto& [id, node] : nodes_) ids.push_back(id);
  std::sort(ids.begin(), ids.end(), [&](Id a, Id b) {
    const Member& left = nodes_.at(a).member;
    const Member& right = nodes_.at(b).member;
    if (rules_.fixed) return std::pair(left.machine_rank, a) < std::pair(right.machine_rank, b);
    return std::tuple(sort_key(left.address), left.address, a) <
           std::tuple(sort_key(right.address), right.address, b);
  });
  // Machines above the limit, the last to join, wait for the next round.
  if (static_cast<int>(ids.size()) > rules_.max_nodes) {
    auto latest = ids;
    std::sort(latest.begin(), latest.end());
    latest.resize(static_cast<std::size_t>(rules_.max_nodes));
    std::erase_if(ids, [&](Id id) { return std::ranges::find(latest, id) == latest.end(); });
  }
  return ids;
}

Orders Coordinator::start() {
  phase_ = Phase::kRunning;
  passed_on_ = 0;
  const auto ids = in_rank_order();
  LaunchRound round{.number = rounds_++,
                    .restart_count = restarts_,
                    .nodes = static_cast<int>(ids.size()),
                    .world_size = 0};
  for (const Id id : ids) round.world_size += nodes_.at(id).member.nproc;
  Orders orders;
  for (const Id id : ids) {
    Node& node = nodes_.at(id);
    node.doing = Doing::kRuns;
    node.all_ended = false;
    orders.push_back({.to = id, .message = {.kind = Kind::kStart, .round = round}});
    ++round.node_rank;
    round.first_rank += node.member.nproc;
  }
  return orders;
}

Orders Coordinator::stop(Clock::time_point now) {
  phase_ = Phase::kStopping;
  decide_at_.reset();
  Orders orders;
  for (auto& [id, node] : nodes_) {
    if (node.doing == Doing::kWaits || node.doing == Doing::kStops) continue;
    node.doing = Doing::kStops;
    orders.push_back({.to = id, .message = {.kind = Kind::kStop}});
  }
  return orders.empty() ? after_stop(now) : orders;
}

Orders Coordinator::after_stop(Clock::time_point now) {
  for (const auto& [id, node] : nodes_) {
    if (node.doing == Doing::kStops) return {};
  }
  if (verdict_) {
    for (const auto& failure : failures_) verdict_->failures.push_back(failure);
    if (is_preemption(verdict_->failures)) verdict_->exit_code = kPreemptedExitCode;
    return end(*verdict_);
  }
  gather(now);
  return start_if_complete(now);
}

Orders Coordinator::end(const Verdict& verdict) {
  phase_ = Phase::kEnded;
  Orders orders;
  for (const auto& [id, node] : nodes_) {
    orders.push_back({.to = id, .message = {.kind = Kind::kEnd, .verdict = verdict}});
  }
  return orders;
}

Orders Coordinator::end_if_all_succeeded() {
  const bool running = std::ranges::any_of(
      nodes_, [](const auto& each) { return each.second.doing == Doing::kRuns; });
  return running || !failures_.empty() ? Orders{} : end({});
}

void Coordinator::announce(const std::string& text, Orders& orders) const {
  for (const auto& [id, node] : nodes_) orders.insert(orders.begin(), notice(id, text));
}

bool Coordinator::ended_on_request(const WorkerFailure& cause) const noexcept {
  return passed_on_ != 0 && (cause.is_preempted() || cause.status.signal == passed_on_);
}

Orders Coordinator::fail_or_restart(Verdict verdict, Clock::time_point now) {
  const auto cause = root_cause(verdict.failures);
  if (restarts_ < rules_.max_restarts && !(cause && ended_on_request(*cause))) {
    ++restarts_;
    std::string text = verdict.reason;
    if (cause) {
      text = str("rank ", cause->rank, " on ", cause->host, " ended with ", cause->status.text(),
                 cause->is_preempted() ? " (preempted)" : "");
    }
    auto orders = stop(now);
    announce(str(text, "; restart ", restarts_, " of ", rules_.max_restarts), orders);
    return orders;
  }
  verdict_ = std::move(verdict);
  failures_.clear();
  return stop(now);
}

// False if no worker can change the verdict any more: all have ended, or one was killed and another
// has told of it.
bool Coordinator::more_to_learn() const {
  const auto told = std::ranges::count_if(failures_, &WorkerFailure::is_consequence);
  const auto preempted = std::ranges::count_if(failures_, &WorkerFailure::is_preempted);
  if (told > 0 && told + preempted < std::ssize(failures_)) return false;
  return std::ranges::any_of(nodes_, [](const auto& each) {
    return each.second.doing == Doing::kRuns && !each.second.all_ended;
  });
}

Orders Coordinator::failed(Id id, const WorkerFailure& failure, Clock::time_point now) {
  if (!nodes_.contains(id)) return {};
  if (phase_ == Phase::kStopping && verdict_) {
    verdict_->failures.push_back(failure);
    return {};
  }
  if (phase_ != Phase::kRunning) return {};
  failures_.push_back(failure);
  auto time = now;
  if (failure.is_consequence()) time += kRootCauseDelay;
  if (failure.status.signal != 0) time += kSurvivorDelay;
  if (failure.is_preempted()) time += rules_.shutdown_timeout;
  decide_at_ = decide_at_ ? std::min(*decide_at_, time) : time;
  return decide_if_due(now);
}

Orders Coordinator::all_ended(Id id, Clock::time_point now) {
  const auto node = nodes_.find(id);
  if (node == nodes_.end()) return {};
  node->second.all_ended = true;
  return decide_if_due(now);
}

Orders Coordinator::decide_if_due(Clock::time_point now) {
  if (phase_ != Phase::kRunning || !decide_at_) return {};
  return now >= *decide_at_ || !more_to_learn() ? decide_about_failures(now) : Orders{};
}

Orders Coordinator::decide_about_failures(Clock::time_point now) {
  Verdict verdict{.exit_code = kFailure, .reason = {}, .failures = failures_};
  // The code of a preemption is for all workers: `after_stop` looks at those that still run.
  const auto cause = root_cause(failures_);
  if (cause && !cause->is_preempted()) verdict.exit_code = cause->status.shell_code();
  return fail_or_restart(std::move(verdict), now);
}

Orders Coordinator::succeeded(Id id, Clock::time_point now) {
  const auto node = nodes_.find(id);
  if (node == nodes_.end() || phase_ != Phase::kRunning) return {};
  node->second.doing = Doing::kSucceeded;
  return failures_.empty() ? end_if_all_succeeded() : decide_if_due(now);
}

Orders Coordinator::stopped(Id id, const std::vector<WorkerFailure>& terminated,
                            Clock::time_point now) {
  const auto node = nodes_.find(id);
  if (node == nodes_.end()) return {};
  node->second.doing = Doing::kWaits;
  if (phase_ != Phase::kStopping) return {};
  failures_.insert(failures_.end(), terminated.begin(), terminated.end());
  return after_stop(now);
}

Orders Coordinator::lost(Id id, const std::string& why, Clock::time_point now) {
  const auto found = nodes_.find(id);
  if (found == nodes_.end() || ended()) return {};
  const Node node = found->second;
  nodes_.erase(found);
  if (gathering()) return start_if_complete(now);
  if (phase_ == Phase::kStopping) return after_stop(now);
  // The machine had no workers in this round, or they had finished.
  if (node.doing == Doing::kWaits) return {};
  if (node.doing == Doing::kSucceeded) return end_if_all_succeeded();
  const bool finishing = std::ranges::any_of(
      nodes_, [](const auto& each) { return each.second.doing == Doing::kSucceeded; });
  // Workers of other machines that lost their peers failed because of it.
  failures_.clear();
  if (!rules_.fixed && !finishing) {
    auto orders = stop(now);
    announce(str(describe(node), " ", why), orders);
    return orders;
  }
  return fail_or_restart({.exit_code = kPeerGone, .reason = str(describe(node), " ", why)}, now);
}

Orders Coordinator::leaves(Id id, int signal, Clock::time_point now) {
  const auto found = nodes_.find(id);
  if (found == nodes_.end() || ended()) return {};
  const auto why = str("was told to end by ", signal_name(signal));
  // The job needs the machine that hosts the rendezvous (id 0).
  if (!rules_.fixed && id != 0) return lost(id, why, now);
  const auto reason = str(describe(found->second), " ", why);
  nodes_.erase(found);
  verdict_ = Verdict{.exit_code = 128 + signal, .reason = reason};
  failures_.clear();
  return stop(now);
}

std::string Coordinator::missing() const {
  if (!rules_.fixed) {
    return str(nodes_.size(), " of at least ", rules_.min_nodes, " machines are here");
  }
  std::set<int> absent;
  for (int rank = 0; rank < rules_.max_nodes; ++rank) absent.insert(rank);
  for (const auto& [id, node] : nodes_) absent.erase(node.member.machine_rank);
  return str("missing: machine ", detail::join(absent, ", machine "));
}

Orders Coordinator::tick(Clock::time_point now) {
  if (!gathering()) return decide_if_due(now);
  if (last_call_until_ && now >= *last_call_until_) return start_if_complete(now);
  if (now < gather_until_ || enough()) return {};
  return end({.exit_code = kFailure,
              .reason = str(
                  nodes_.size(), " of ", rules_.fixed ? rules_.max_nodes : rules_.min_nodes,
                  " machines arrived within ", seconds_text(rules_.join_timeout), "; ", missing(),
                  ". Is the launcher started there, with the same address and port?")});
}

Coordinator::Clock::time_point Coordinator::next_event() const {
  auto next = Clock::time_point::max();
  if (phase_ == Phase::kRunning && decide_at_) next = *decide_at_;
  if (gathering() && last_call_until_) next = std::min(next, *last_call_until_);
  if (gathering() && !enough()) next = std::min(next, gather_until_);
  return next;
}

}  // namespace accelerate::detail::launch
