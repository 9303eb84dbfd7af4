// accelerate/tracking.h - experiment trackers: where a run writes its numbers.
//
// This version has none to choose from. Programs that log keep compiling and running: without a
// tracker `Accelerator::init_trackers`, `log` and `get_tracker` do nothing, as in Python.
#pragma once

#include <cstdint>
#include <optional>

#include "accelerate/value.h"

namespace accelerate {

/// The interface of a tracker. An object of this class itself is blank: its functions do nothing.
class GeneralTracker {
 public:
  GeneralTracker() = default;
  virtual ~GeneralTracker() = default;
  GeneralTracker(const GeneralTracker&) = delete;
  GeneralTracker& operator=(const GeneralTracker&) = delete;

  virtual void start() {}
  virtual void store_init_configuration(const Value::Dict& values) { static_cast<void>(values); }
  virtual void log(const Value::Dict& values, std::optional<std::int64_t> step = std::nullopt) {
    static_cast<void>(values);
    static_cast<void>(step);
  }
  virtual void finish() {}
};

}  // namespace accelerate
