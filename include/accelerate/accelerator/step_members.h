// accelerate/accelerator/step_members.h - what an `Accelerator` does with whole steps: profiles and
// records them.
//
// Part of accelerate/accelerator.h: a base class of `Accelerator`.
#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <source_location>
#include <type_traits>
#include <utility>

#include "accelerate/accelerator/captured_step.h"
#include "accelerate/accelerator/profiler.h"
#include "accelerate/api.h"
#include "accelerate/kwargs.h"

namespace accelerate {

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
  /// Profiles with the `ProfileKwargs` of `kwargs_handlers`, or the defaults.
  template <class F>
    requires std::invocable<F&, Profiler&> || std::invocable<F&>
  Profiler profile(F&& f, std::source_location where = std::source_location::current()) const {
    return profiled(nullptr, function_of(f), where);
  }

  /// A function that runs `f` in a captured step (docs/capture.md). On a GPU, after `warmup` calls
  /// with tensors of the same shapes, what `f` gives to the device is recorded once and then
  /// repeated with the tensors of each batch: it takes a fraction of the time on the host. Learning
  /// rates, step counts, the factor of float16, random numbers and accumulation go on as without.
  /// On a CPU `f` is called each time.
  ///
  /// `f` takes and returns tensors or trees of them (accelerate/tree.h), has the whole step from
  /// `accumulate` to `zero_grad`, and uses optimizers of accelerate/optim.h. The first call throws
  /// `UnsupportedError` that names what cannot be recorded, unless `fallback_to_eager` is set.
  template <class F>
  [[nodiscard]] CapturedStep<std::decay_t<F>> capture(
      F&& f, const CaptureOptions& options = {},
      std::source_location where = std::source_location::current()) const {
    return {std::forward<F>(f),
            std::make_unique<detail::accelerator::StepCapture>(steps_of_, options, where)};
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
