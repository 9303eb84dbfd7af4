// src/profiler/profile_schedule.h - what a profiler does in each step. No Torch.
#pragma once

#include <cstdint>
#include <span>

#include "accelerate/kwargs.h"

namespace accelerate::detail::profiler {

enum class Action : std::uint8_t { kNone, kWarmup, kRecord, kRecordAndSave };

/// What is done in step `step`, from 0 on.
[[nodiscard]] Action action_at(const ProfileSchedule& schedule, std::int64_t step);

enum class Transition : std::uint8_t { kPrepare, kStart, kStop, kTraceReady, kWarn };

/// What is to be done, in this order, between two steps.
[[nodiscard]] std::span<const Transition> transitions(Action from, Action to);
/// What is to be done after the last step.
[[nodiscard]] std::span<const Transition> last_transitions(Action from);

}  // namespace accelerate::detail::profiler
