#include "profiler/profile_schedule.h"

#include <array>

namespace accelerate::detail::profiler {
namespace {

using enum Transition;

constexpr std::array kPreparing{kPrepare};
constexpr std::array kStarting{kStart};
constexpr std::array kPreparedStart{kPrepare, kStart};
constexpr std::array kDiscarding{kStart, kStop};
constexpr std::array kWarnedDiscard{kWarn, kStart, kStop};
constexpr std::array kWarnedStop{kWarn, kStop};
constexpr std::array kSaving{kStop, kTraceReady};
constexpr std::array kSaveAndPrepare{kStop, kTraceReady, kPrepare};
constexpr std::array kSaveAndStart{kStop, kTraceReady, kPrepare, kStart};

bool records(Action action) {
  return action == Action::kRecord || action == Action::kRecordAndSave;
}

}  // namespace

Action action_at(const ProfileSchedule& schedule, std::int64_t step) {
  if (step < schedule.skip_first) return Action::kNone;
  step -= schedule.skip_first;
  const auto cycle = schedule.wait + schedule.warmup + schedule.active;
  if (schedule.repeat > 0 && step / cycle >= schedule.repeat) return Action::kNone;
  const auto position = step % cycle;
  if (position < schedule.wait) return Action::kNone;
  if (position < schedule.wait + schedule.warmup) return Action::kWarmup;
  return position < cycle - 1 ? Action::kRecord : Action::kRecordAndSave;
}

std::span<const Transition> transitions(Action from, Action to) {
  switch (from) {
    case Action::kNone:
      if (to == Action::kWarmup) return kPreparing;
      if (records(to)) return kPreparedStart;
      return {};
    case Action::kWarmup:
      if (to == Action::kNone) return kWarnedDiscard;
      if (records(to)) return kStarting;
      return {};
    case Action::kRecord:
      if (!records(to)) return kWarnedStop;
      return {};
    case Action::kRecordAndSave:
      if (to == Action::kWarmup) return kSaveAndPrepare;
      if (records(to)) return kSaveAndStart;
      return kSaving;
  }
  return {};
}

std::span<const Transition> last_transitions(Action from) {
  if (from == Action::kWarmup) return kDiscarding;
  if (records(from)) return kSaving;
  return {};
}

}  // namespace accelerate::detail::profiler
