// src/state/step_graph.h - work of a device that is recorded once and repeated.
//
// A backend that can record has `StepGraphMaker` as a second base class.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>

#include "accelerate/api.h"

namespace accelerate::detail::state {

class StepGraph {
 public:
  virtual ~StepGraph() = default;
  /// Gives the recorded work to the device, on the current stream.
  virtual void replay() = 0;
};

/// Graphs that share memory: one of them runs at a time, and only results outlive it.
class StepGraphs {
 public:
  virtual ~StepGraphs() = default;
  /// Runs `body` where recordings run, so that libraries make there what they need once.
  virtual void warm_up(const std::function<void()>& body) = 0;
  /// Runs `body` and records what it gives to the device, which does not carry it out. Throws what
  /// `body` throws, and for work that cannot be recorded.
  [[nodiscard]] virtual std::unique_ptr<StepGraph> record(const std::function<void()>& body) = 0;
};

class ACCELERATE_API StepGraphMaker {
 public:
  virtual ~StepGraphMaker() = default;
  /// nullptr for a device whose work cannot be recorded.
  [[nodiscard]] virtual std::unique_ptr<StepGraphs> make_step_graphs(c10::Device device) = 0;
};

}  // namespace accelerate::detail::state
