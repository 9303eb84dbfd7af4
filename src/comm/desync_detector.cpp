#include "comm/desync_detector.h"

#include <algorithm>
#include <set>
#include <utility>

#include "core/text.h"
#include "state/countdown.h"

namespace accelerate::detail::comm {
namespace {

using std::chrono::duration;
using std::chrono::duration_cast;
using std::chrono::seconds;

// A rank can be this many calls ahead of the others and still be compared.
constexpr std::size_t kMostReports = 256;

// A rank reports that it waits a little later than it starts to wait.
constexpr auto kDelay = std::chrono::milliseconds(500);

std::string in_seconds(DesyncDetector::Clock::duration time) {
  return str(duration_cast<seconds>(time).count(), " s");
}

}  // namespace

DesyncDetector::DesyncDetector(std::vector<std::string> names, const DetectorTimes& times,
                               Clock::time_point now)
    : times_(times) {
  for (auto& name : names) ranks_.push_back({.name = std::move(name), .heard = now});
}

void DesyncDetector::Rank::learn(const ReportedCall& call) {
  if (call.sequence >= latest.sequence) latest = call;
  open = std::max(open, call.open);
}

void DesyncDetector::heard(int rank, Clock::time_point now) { ranks_.at(rank).heard = now; }

void DesyncDetector::waits(int rank, const ReportedCall& call, Clock::time_point now) {
  reports(rank, call, now);
  Rank& each = ranks_.at(rank);
  if (!each.waits || each.waits->sequence != call.sequence) each.waits_since = now;
  each.waits = call;
}

void DesyncDetector::moves_on(int rank) { ranks_.at(rank).waits.reset(); }

void DesyncDetector::reports(int rank, const ReportedCall& call, Clock::time_point now) {
  Rank& each = ranks_.at(rank);
  each.heard = now;
  if (call.sequence == 0) return;
  each.reported[call.sequence] = call;
  while (each.reported.size() > kMostReports) each.reported.erase(each.reported.begin());
  each.learn(call);
}

void DesyncDetector::left(int rank, const ReportedCall& last) {
  Rank& each = ranks_.at(rank);
  each.has_left = true;
  each.learn(last);
  if (last.sequence != 0) each.reported[last.sequence] = last;  // it cannot be asked later
}

void DesyncDetector::threw(int rank, const std::string& message) {
  ranks_.at(rank).exception = message;
}

void DesyncDetector::died(int rank) {
  Rank& each = ranks_.at(rank);
  if (!each.has_left && !each.exception) each.is_dead = true;
}

void DesyncDetector::transport_failed(int rank, const ReportedCall& call,
                                      const std::string& message, Clock::time_point now) {
  Rank& each = ranks_.at(rank);
  reports(rank, call, now);
  each.last_broken = std::max(each.last_broken, call.sequence);
  if (each.transport) return;
  each.transport = message;
  each.transport_in = call;
  each.transport_at = now;
}

void DesyncDetector::forgive(Clock::time_point now) {
  for (auto& each : ranks_) each.heard = now;
}

void DesyncDetector::seen(int rank, const std::string& state, const ReportedCall& last) {
  Rank& each = ranks_.at(rank);
  each.state = state;
  each.learn(last);
}

std::uint64_t DesyncDetector::disputed() const {
  std::uint64_t first = 0;
  for (const auto& each : ranks_) {
    if (each.waits && (first == 0 || each.waits->sequence < first)) first = each.waits->sequence;
  }
  return first;
}

std::vector<int> DesyncDetector::suspects(Clock::time_point now) const {
  std::vector<int> result;
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    const Rank& each = ranks_[r];
    if (each.is_dead || (!each.has_left && now - each.heard > times_.silence / 2)) {
      result.push_back(static_cast<int>(r));
    }
  }
  return result;
}

std::string DesyncDetector::where(const Rank& rank) const {
  if (rank.latest.sequence == 0) return "before its first collective";
  return str(rank.latest.complete ? "after " : "in ", rank.latest.text);
}

std::string DesyncDetector::end_of(const Rank& rank) const {
  return str(rank.name, rank.is_dead ? " died " : " has ended ", where(rank));
}

std::optional<Finding> DesyncDetector::finding(Clock::time_point now) {
  if (auto found = by_exception()) return found;
  if (auto found = by_dispute(now)) return found;
  if (auto found = by_end()) return found;
  if (auto found = by_silence(now)) return found;
  if (auto found = by_misfit(now)) return found;
  return by_transport(now);
}

std::optional<Finding> DesyncDetector::by_exception() const {
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    const Rank& each = ranks_[r];
    if (!each.exception) continue;
    return Finding{static_cast<int>(r),
                   str(each.name, " failed ", where(each), ": ", *each.exception)};
  }
  return std::nullopt;
}

// Ranks that report different calls under one number. The reports of the others are awaited, so
// that the minority is known.
std::optional<Finding> DesyncDetector::by_dispute(Clock::time_point now) {
  std::map<std::uint64_t, std::set<std::uint64_t>> signatures;
  for (const auto& each : ranks_) {
    for (const auto& [sequence, call] : each.reported) signatures[sequence].insert(call.signature);
  }
  for (const auto& [sequence, different] : signatures) {
    if (different.size() < 2) continue;
    const auto since = disputes_.try_emplace(sequence, now).first->second;
    const auto reported = std::ranges::count_if(
        ranks_, [&](const Rank& each) { return each.reported.contains(sequence); });
    if (reported < std::ssize(ranks_) && now - since < times_.dispute) return std::nullopt;
    return disagreement(sequence);
  }
  return std::nullopt;
}

Finding DesyncDetector::disagreement(std::uint64_t sequence) const {
  std::map<std::uint64_t, std::vector<int>> camps;
  std::string lines;
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    const Rank& each = ranks_[r];
    const auto call = each.reported.find(sequence);
    const bool here = call != each.reported.end();
    if (here) camps[call->second.signature].push_back(static_cast<int>(r));
    lines += str("\n  ", each.name, ": ",
                 here ? call->second.text : str("not there yet, ", where(each)));
  }
  std::size_t largest = 0;
  for (const auto& [signature, members] : camps) largest = std::max(largest, members.size());
  const auto leaders =
      std::ranges::count_if(camps, [&](const auto& camp) { return camp.second.size() == largest; });
  if (leaders > 1) return {-1, str("the ranks are in different collectives:", lines)};
  std::vector<int> strayed;
  for (const auto& [signature, members] : camps) {
    if (members.size() < largest) strayed.insert(strayed.end(), members.begin(), members.end());
  }
  std::ranges::sort(strayed);
  return {strayed.front(),
          str("rank ", join(strayed, ", rank "), strayed.size() == 1 ? " is" : " are",
              " in another collective than the others:", lines)};
}

// A rank that has ended, in order or not, is at fault if another one waits in a collective that it
// cannot complete any more.
std::optional<Finding> DesyncDetector::by_end() const {
  const auto sequence = disputed();
  if (sequence == 0) return std::nullopt;
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    const Rank& each = ranks_[r];
    if (!each.is_gone() || each.open > sequence) continue;
    const auto waiting = std::ranges::find_if(ranks_, [&](const Rank& other) {
      return other.waits && other.waits->sequence == sequence;
    });
    return Finding{static_cast<int>(r),
                   str(end_of(each), ", and ", waiting->name, " waits in ", waiting->waits->text)};
  }
  return std::nullopt;
}

// On a device, calls of different sizes are paired: one rank gets all it needs and continues to its
// end, and another waits for the rest.
std::optional<Finding> DesyncDetector::by_misfit(Clock::time_point now) const {
  const auto gone = std::ranges::find_if(ranks_, &Rank::has_left);
  if (gone == ranks_.end()) return std::nullopt;
  for (const auto& each : ranks_) {
    if (!each.waits || now - each.waits_since < times_.silence) continue;
    if (!late_for(each.waits->sequence).empty()) continue;  // it waits for those
    return Finding{
        static_cast<int>(gone - ranks_.begin()),
        str(end_of(*gone), " and has completed what ", each.name, " waits in for ",
            in_seconds(now - each.waits_since), ": ", each.waits->text, ". Do their sizes agree?")};
  }
  return std::nullopt;
}

std::optional<Finding> DesyncDetector::by_silence(Clock::time_point now) const {
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    const Rank& each = ranks_[r];
    if (each.has_left || now - each.heard <= times_.silence) continue;
    const auto state = each.state.empty() ? "" : str(" (the process is ", each.state, ")");
    return Finding{static_cast<int>(r),
                   str(each.name, " has given no sign of life for ", in_seconds(now - each.heard),
                       state, ", ", where(each))};
  }
  return std::nullopt;
}

std::optional<Finding> DesyncDetector::by_transport(Clock::time_point now) const {
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    const Rank& each = ranks_[r];
    if (!each.transport) continue;
    const bool in_time = now - each.transport_at < times_.transport;
    auto gone = std::ranges::find_if(ranks_, &Rank::is_dead);
    if (gone == ranks_.end()) {
      // A rank that left in order may still be needed, and data it had sent may be lost.
      gone = std::ranges::find_if(ranks_, [&](const Rank& other) {
        return other.has_left && (other.open <= each.last_broken || !in_time);
      });
    }
    if (gone != ranks_.end()) {
      return Finding{static_cast<int>(gone - ranks_.begin()), end_of(*gone)};
    }
    // The transport gives up at the timeout setting: the fault of the ranks that are late, unless
    // one of them is found to have died just then.
    const auto& call = each.transport_in;
    const auto late = call.complete ? std::vector<int>{} : late_for(call.sequence);
    const bool time_is_over = each.waits && now - each.waits_since + kDelay >= times_.timeout;
    if (!late.empty() && time_is_over && now - each.transport_at >= times_.dispute) {
      return Finding{late.front(),
                     str(each.name, " has waited for ", state::in_words(times_.timeout),
                         ", which is the timeout, in ", call.text, " for ", where_are(late),
                         ". It is alive, but did not come.")};
    }
    if (in_time) continue;
    return Finding{static_cast<int>(r), str("the connection of ", each.name, " failed ",
                                            where(each), ": ", *each.transport)};
  }
  return std::nullopt;
}

std::vector<int> DesyncDetector::late_for(std::uint64_t sequence) const {
  std::vector<int> late;
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    if (ranks_[r].latest.sequence < sequence) late.push_back(static_cast<int>(r));
  }
  return late;
}

std::string DesyncDetector::where_are(const std::vector<int>& ranks) const {
  std::vector<std::string> texts;
  for (const int rank : ranks) texts.push_back(str(ranks_[rank].name, ", ", where(ranks_[rank])));
  return join(texts, "; ");
}

std::optional<std::string> DesyncDetector::notice(Clock::time_point now) {
  const auto sequence = disputed();
  if (sequence == 0 || sequence == noticed_) return std::nullopt;
  const auto waiting = std::ranges::find_if(
      ranks_, [&](const Rank& each) { return each.waits && each.waits->sequence == sequence; });
  if (now - waiting->waits_since < times_.notice) return std::nullopt;
  noticed_ = sequence;
  const auto late = late_for(sequence);
  if (late.empty()) return std::nullopt;
  return str(waiting->name, " has waited for ", in_seconds(now - waiting->waits_since), " in ",
             waiting->waits->text, " for ", where_are(late),
             ". It is alive; this is no error unless it is stuck.");
}

}  // namespace accelerate::detail::comm
