// src/accelerator/preemption.h - a run that is asked to stop saves its state first.
//
// SIGTERM and SIGUSR1 (schedulers of clusters send them, and `accelerate launch` passes them on)
// may reach processes at different moments, or one of them only. All must save at the same step,
// and no process may wait for one that does not know of the signal yet. So they agree through the
// store, while training goes on: a process that got the signal leaves a request; each one that sees
// it answers at the end of a batch; when all have answered, process 0 names the step after the one
// it is at. A process cannot have passed that step, since gradients are averaged once more before
// it. A run that ends before that step ends as if there had been no signal.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <optional>
#include <string>

#include "accelerate/state.h"

namespace accelerate::detail::accelerator {

class Preemption {
 public:
  /// Takes over the two signals of this process, until the object is destroyed.
  explicit Preemption(const AcceleratorState& state);
  ~Preemption();
  Preemption(const Preemption&) = delete;
  Preemption& operator=(const Preemption&) = delete;

  /// At the end of a batch, when gradients were averaged `synchronized` times: whether all
  /// processes save now.
  [[nodiscard]] bool stops_here(std::int64_t synchronized);
  /// "SIGTERM", or that another process got the signal.
  [[nodiscard]] std::string reason() const;

 private:
  using Clock = std::chrono::steady_clock;

  [[nodiscard]] bool is_requested();
  [[nodiscard]] bool is_agreed(std::int64_t synchronized);
  [[nodiscard]] std::string key(const std::string& name) const;

  c10::intrusive_ptr<c10d::Store> store_ = nullptr;  // null with one process
  c10::Device device_;
  int rank_ = 0;
  int size_ = 1;
  int number_ = 0;  // of this object, the same on all processes
  Clock::time_point asked_ = {};
  bool requested_ = false;
  bool answered_ = false;
  bool decided_ = false;
  std::optional<std::int64_t> stop_at_ = std::nullopt;
};

}  // namespace accelerate::detail::accelerator
