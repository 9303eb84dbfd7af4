// accelerate/accelerator/step_members.h - what an `Accelerator` does with whole steps: profiles
// them.
//
// Part of accelerate/accelerator.h: a base class of `Accelerator`.
#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <source_location>
#include <type_traits>
#include <utility>

#include "accelerate/accelerator/profiler.h"
#include "accelerate/api.h"
#include "accelerate/kwargs.h"

namespace accelerate {

namespace detail::accelerator {
struct AcceleratorCore;
}

class ACCELERATE_API StepMembers {
 public:
  StepMembers(const StepMembers&) = delete;
  StepMembers& operator=(const StepMembers&) = delete;

  /// Collective at its end if `output_trace_dir` is set: then each process has written the last
  /// recording to profile_<process_index>.json in that folder, which is made.
  ///
  /// Calls `f` under a profiler, and gives it the profiler if it takes one: with a schedule it must
  /// call `step()` after each step. Returns the profiler, for its table. If `f` throws, the file is
  /// written too, and the exception goes on without waiting for other processes.
  template <class F>
    requires std::invocable<F&, Profiler&> || std::invocable<F&>
  Profiler profile(const ProfileKwargs& options, F&& f,
                   std::source_location where = std::source_location::current()) const {
    return profiled(&options, function_of(f), where);
  }
  /// The same with the `ProfileKwargs` of `kwargs_handlers`, or the defaults.
  template <class F>
    requires std::invocable<F&, Profiler&> || std::invocable<F&>
  Profiler profile(F&& f, std::source_location where = std::source_location::current()) const {
    return profiled(nullptr, function_of(f), where);
  }

 protected:
  explicit StepMembers(std::shared_ptr<detail::accelerator::AcceleratorCore> core);
  ~StepMembers();

 private:
  template <class F>
  static std::function<void(Profiler&)> function_of(F& f) {
    return [&f](Profiler& profiler) {
      if constexpr (std::invocable<F&, Profiler&>) {
        f(profiler);
      } else {
        f();
      }
    };
  }
  Profiler profiled(const ProfileKwargs* options, const std::function<void(Profiler&)>& f,
                    std::source_location where) const;

  std::shared_ptr<detail::accelerator::AcceleratorCore> steps_of_;
};

}  // namespace accelerate
