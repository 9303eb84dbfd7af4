// accelerate/grad_scaler.h - loss scaling, which keeps float16 gradients in range.
//
//     GradScaler scaler({.init_scale = 1024});
//     scaler.scale(loss).backward();
//     scaler.step(optimizer);   // skipped if a gradient is infinite or NaN
//     scaler.update();          // reduces the factor then, raises it after many good steps
//
// Rules, numbers and state are those of `torch.amp.GradScaler`. An `Accelerator` does all this for
// its optimizers.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/kwargs.h"
#include "accelerate/value.h"

namespace accelerate {

class ACCELERATE_API GradScaler {
 public:
  /// Throws `ArgumentError` for a `growth_factor` up to 1 or a `backoff_factor` from 1.
  explicit GradScaler(const GradScalerKwargs& options = {});

  /// The tensor multiplied by the factor. The first call places the factor on the tensor's device.
  [[nodiscard]] at::Tensor scale(const at::Tensor& output);

  /// Divides the gradients of an optimizer by the factor, for example before clipping. Throws
  /// `StateError` if called twice between two updates or after `step`, and `ArgumentError` for
  /// float16 gradients, which may have overflowed already.
  /// Processes that hold parts of the gradients must agree whether one is infinite or NaN: `agree`,
  /// if given, gets the flag of this process (float32, 0 for none) and returns that of all.
  void unscale_(torch::optim::Optimizer& optimizer,
                const std::function<at::Tensor(const at::Tensor& found_inf)>& agree = nullptr);

  /// Calls `optimizer.step()`, or `carry_out` instead if given, and returns true. Returns false
  /// without a step if a gradient is infinite or NaN. Waits for the device. Throws `StateError` if
  /// called twice between two updates, or if no parameter has a gradient.
  bool step(torch::optim::Optimizer& optimizer, const std::function<void()>& carry_out = nullptr);

  /// Whether `unscale_` or `step` found an infinite or NaN gradient since the last update. Waits
  /// for the device.
  [[nodiscard]] bool found_inf(const torch::optim::Optimizer& optimizer) const;
  /// Whether `unscale_` was called for the optimizer since the last update.
  [[nodiscard]] bool is_unscaled(const torch::optim::Optimizer& optimizer) const;

  /// Sets the factor of the next steps. Throws `StateError` if nothing was unscaled since the last
  /// update.
  void update();
  void update(double new_scale);

  /// The factor; 1 if disabled. Waits for the device.
  [[nodiscard]] double get_scale() const;
  [[nodiscard]] std::int64_t get_growth_tracker() const;
  [[nodiscard]] double get_growth_factor() const { return options_.growth_factor; }
  [[nodiscard]] double get_backoff_factor() const { return options_.backoff_factor; }
  [[nodiscard]] std::int64_t get_growth_interval() const { return options_.growth_interval; }
  [[nodiscard]] bool is_enabled() const { return options_.enabled; }

  /// scale, growth_factor, backoff_factor, growth_interval, _growth_tracker; empty when disabled.
  [[nodiscard]] Value state_dict() const;
  /// Does nothing if disabled. Throws `ArgumentError` for the state of a disabled scaler and for
  /// entries that are missing or of a wrong kind.
  void load_state_dict(const Value& state);

 private:
  enum class Stage : std::uint8_t { kReady, kUnscaled, kStepped };
  struct OfOptimizer {
    Stage stage = Stage::kReady;
    std::vector<at::Tensor> found_inf = {};  // one per device
  };

  void start(c10::Device device);
  void require_factor(const char* what) const;
  [[nodiscard]] OfOptimizer& of(const torch::optim::Optimizer& optimizer);
  void forget_steps();
  [[nodiscard]] static bool any_inf(const OfOptimizer& state);

  GradScalerKwargs options_;
  at::Tensor scale_;           // float, no dimension; undefined until used
  at::Tensor growth_tracker_;  // int
  double next_scale_;
  std::int64_t next_tracker_ = 0;
  /// Entries stay, so that steps allocate none.
  std::map<const torch::optim::Optimizer*, OfOptimizer> optimizers_;
};

}  // namespace accelerate
