// accelerate/local_sgd.h - processes that train by themselves, and average parameters now and then.
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

#include <cstdint>
#include <memory>
#include <source_location>
#include <utility>

#include "accelerate/accelerator.h"
#include "accelerate/api.h"

namespace accelerate {

struct LocalSGDOptions {
  /// After how many calls of `step` parameters are averaged.
  std::int64_t local_sgd_steps = 8;
  /// false: gradients are averaged in each step, as without.
  bool enabled = true;
};

/// What the function of `run_local_sgd` is given.
class ACCELERATE_API LocalSGD {
 public:
  /// Throws `ArgumentError` for less than one step, `UnsupportedError` where processes do not
  /// hold whole models.
  LocalSGD(const Accelerator& accelerator, std::shared_ptr<torch::nn::Module> module,
           const LocalSGDOptions& options);

  /// Collective with every `local_sgd_steps`th call: all go on with the mean of their parameters.
  void step(std::source_location where = std::source_location::current());
  /// Collective. The same now.
  void average(std::source_location where = std::source_location::current());

  /// Not with one process.
  [[nodiscard]] bool enabled() const noexcept { return enabled_; }
  [[nodiscard]] std::int64_t num_steps() const noexcept { return num_steps_; }

 private:
  std::shared_ptr<torch::nn::Module> module_;
  std::int64_t local_sgd_steps_;
  bool enabled_;
  std::int64_t num_steps_ = 0;
};

/// Collective at its end. Runs `f` without averaging gradients, then averages parameters once more.
/// Buffers stay as they are, as in Python. Where `f` throws nothing is sent.
template <detail::AnyModel Model, class F>
void run_local_sgd(const Accelerator& accelerator, const Model& model,
                   const LocalSGDOptions& options, F&& f,
                   std::source_location where = std::source_location::current()) {
  LocalSGD local_sgd(accelerator, detail::module_of(model), options);
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
