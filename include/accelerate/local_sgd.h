// accelerate/local_sgd.h - independent training per process, with parameters averaged periodically.
//
//     run_local_sgd(accelerator, model, {.local_sgd_steps = 8}, [&](LocalSGD& local_sgd) {
//       for (auto& [x, y] : loader) {
//         auto accumulating = accelerator.accumulate(model);
//         accelerator.backward(loss_of(model(x), y));
//         optimizer.step();
//         optimizer.zero_grad();
//         local_sgd.step();
//       }
//     });
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <source_location>
#include <utility>

#include "accelerate/accelerator.h"
#include "accelerate/api.h"

namespace accelerate {

struct LocalSGDOptions {
  /// Parameters are averaged after this many calls of `step`.
  std::int64_t local_sgd_steps = 8;
  /// false averages gradients in each step, as without local SGD.
  bool enabled = true;
};

/// The argument of the function that `run_local_sgd` calls.
class ACCELERATE_API LocalSGD {
 public:
  /// Throws `ArgumentError` for less than one step, and `UnsupportedError` if a process does not
  /// hold the whole model.
  LocalSGD(const Accelerator& accelerator, std::shared_ptr<torch::nn::Module> module,
           const LocalSGDOptions& options);

  /// Collective at every `local_sgd_steps`th call: all processes that train the same model (those
  /// of "dp_replicate", if there is a `parallelism_config`) continue with the mean of their
  /// parameters.
  void step(std::source_location where = std::source_location::current());
  /// Collective. Averages the parameters now.
  void average(std::source_location where = std::source_location::current());

  /// False with one process.
  [[nodiscard]] bool enabled() const noexcept { return enabled_; }
  [[nodiscard]] std::int64_t num_steps() const noexcept { return num_steps_; }

 private:
  std::shared_ptr<torch::nn::Module> module_;
  /// Null for all processes.
  std::shared_ptr<DeviceMesh> mesh_;
  std::int64_t local_sgd_steps_;
  bool enabled_;
  std::int64_t num_steps_ = 0;
};

/// Collective at its end. Runs `f` without averaging gradients, then averages parameters once more.
/// Buffers are not averaged, as in Python. If `f` throws, nothing is sent.
template <class Model, class F>
void run_local_sgd(const Accelerator& accelerator, const Model& model,
                   const LocalSGDOptions& options, F&& f,
                   std::source_location where = std::source_location::current()) {
  static_assert(std::invocable<F, LocalSGD&>,
                "accelerate: the function of run_local_sgd takes a LocalSGD&, whose step() it "
                "calls after each step of the optimizer.");
  LocalSGD local_sgd(accelerator, detail::accelerator::module_of(model), options);
  if (!local_sgd.enabled()) {
    std::forward<F>(f)(local_sgd);
    return;
  }
  {
    const auto alone = accelerator.no_sync(model);
    std::forward<F>(f)(local_sgd);
  }
  local_sgd.average(where);
}

}  // namespace accelerate
