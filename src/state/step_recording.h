// src/state/step_recording.h - what a recorded step does on the host, where a graph has no part.
//
// A graph repeats the work of a device only. Counters, schedules and flags that change in a step
// register how, and each replay does it again.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>
#include <vector>

namespace accelerate::detail::state {

class StepRecording {
 public:
  /// While it lives, this thread runs the body of the recorded step.
  class Scope {
   public:
    explicit Scope(StepRecording& recording) noexcept
        : before_(std::exchange(current_, &recording)) {}
    ~Scope() { current_ = before_; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    StepRecording* before_;
  };

  /// nullptr outside of a recorded step.
  [[nodiscard]] static StepRecording* current() noexcept { return current_; }

  /// `effect` runs before, or after, the work of the device in each replay, in the order of these
  /// calls. Ignored where a body runs again.
  void before_replay(std::function<void()> effect) { add(before_, std::move(effect)); }
  void after_replay(std::function<void()> effect) { add(after_, std::move(effect)); }
  /// False where a body runs again.
  [[nodiscard]] bool is_open() const { return open_; }

  /// The flag for infinite or NaN gradients of the step that is being made; undefined without
  /// float16.
  at::Tensor found_inf;
  /// Of this thread: `zero_grad` writes zeros, whatever it is asked for, because several recordings
  /// use the same gradients.
  static inline thread_local bool keeps_gradients = false;

  /// Of this thread: a step has counted its batch, by `accumulate`.
  static inline thread_local bool batch_counted = false;

  /// The body was run once.
  void close() { open_ = false; }
  void run_before() const { run(before_); }
  void run_after() const { run(after_); }

 private:
  using Effects = std::vector<std::function<void()>>;

  void add(Effects& effects, std::function<void()> effect) const {
    if (open_) effects.push_back(std::move(effect));
  }
  static void run(const Effects& effects) {
    for (const auto& effect : effects) effect();
  }

  static inline thread_local StepRecording* current_ = nullptr;
  Effects before_;
  Effects after_;
  bool open_ = true;
};

}  // namespace accelerate::detail::state
