#include "sharding/tape.h"

#include <algorithm>

namespace accelerate::detail::sharding {

void Tape::begin() {
  position_ = 0;
  next_gather_ = 0;
  taken_gathers_ = 0;
  if (missed_) {
    ++failures_;
    learned_ = missed_ = false;
  }
  if (!learned_) events_.clear();
}

std::uint64_t Tape::hash() const {
  std::uint64_t hash = 1469598103934665603U;  // FNV-1a
  for (const auto& event : events_) {
    hash = (hash ^ (2 * event.index + static_cast<std::uint64_t>(event.kind))) * 1099511628211U;
  }
  return hash;
}

void Tape::learn() {
  std::vector<std::size_t> units;
  for (const auto& event : events_) {
    if (event.kind == TapeEvent::Kind::kGather) units.push_back(event.index);
  }
  schedule_.clear();
  gathers_.clear();
  std::size_t issued = 0;
  const auto gather_ahead = [&](bool reduced) {
    const bool is_time = reduced == after_reductions_;
    const auto wanted = gathers_.size() + (is_time ? static_cast<std::size_t>(ahead_) : 0);
    for (; issued < std::min(wanted, units.size()); ++issued) {
      schedule_.push_back({.kind = TapeEvent::Kind::kGather, .index = units[issued]});
    }
  };
  gather_ahead(/*reduced=*/false);
  start_ = schedule_.size();
  for (const auto& event : events_) {
    if (event.kind == TapeEvent::Kind::kReduce) {
      schedule_.push_back(event);
      gather_ahead(/*reduced=*/true);
      continue;
    }
    gathers_.push_back({.unit = event.index, .until = 0});
    gather_ahead(/*reduced=*/false);
    gathers_.back().until = schedule_.size();
  }
  learned_ = true;
  position_ = schedule_.size();
  next_gather_ = gathers_.size();
}

std::optional<std::size_t> Tape::reach(std::size_t unit) {
  for (auto i = next_gather_; i < gathers_.size(); ++i) {
    if (gathers_[i].unit != unit) continue;
    next_gather_ = i + 1;
    return i;
  }
  missed_ = true;
  return std::nullopt;
}

TapeEvent Tape::take() {
  const auto event = schedule_[position_++];
  if (event.kind == TapeEvent::Kind::kGather) ++taken_gathers_;
  return event;
}

bool Tape::reduces_later(std::size_t buffer) const {
  const TapeEvent wanted{.kind = TapeEvent::Kind::kReduce, .index = buffer};
  return std::find(schedule_.begin() + static_cast<std::ptrdiff_t>(position_), schedule_.end(),
                   wanted) != schedule_.end();
}

}  // namespace accelerate::detail::sharding
