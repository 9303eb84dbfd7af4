// accelerate/scheduler/reduce_lr_on_plateau.h - a lower learning rate when a metric stops
// improving.
//
// Part of accelerate/scheduler.h.
//
//     ReduceLROnPlateau schedule(optimizer, {.factor = 0.5, .patience = 3});
//     schedule.step(validation_loss);
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/enums.h"
#include "accelerate/scheduler/lr_scheduler.h"

namespace accelerate {

/// Whether a metric is better when it is lower or higher.
enum class PlateauMode : std::uint8_t { kMin, kMax };
/// Whether the threshold is a fraction of the best metric or an absolute difference.
enum class PlateauThresholdMode : std::uint8_t { kRel, kAbs };

struct ReduceLROnPlateauOptions {
  PlateauMode mode = PlateauMode::kMin;
  /// Below 1.
  double factor = 0.1;
  /// The number of consecutive epochs without improvement that are tolerated.
  std::int64_t patience = 10;
  /// The least improvement that counts.
  double threshold = 1e-4;
  PlateauThresholdMode threshold_mode = PlateauThresholdMode::kRel;
  /// The number of epochs after a reduction that are not counted.
  std::int64_t cooldown = 0;
  PerGroup min_lr = 0.0;
  /// Smaller reductions are not performed.
  double eps = 1e-8;
};

/// Multiplies by `factor` when the metric has not improved for more than `patience` epochs.
class ACCELERATE_API ReduceLROnPlateau : public LRScheduler {
 public:
  explicit ReduceLROnPlateau(torch::optim::Optimizer& optimizer,
                             const ReduceLROnPlateauOptions& options = {});

  /// Steps with the metric of an epoch; a tensor must have one element.
  void step(double metric);
  void step(const at::Tensor& metric);
  /// Throws `StateError`: a step needs a metric.
  void step() override;

  [[nodiscard]] std::int64_t step_count() const override { return last_epoch() + 1; }
  [[nodiscard]] double best() const { return best_; }
  [[nodiscard]] std::int64_t num_bad_epochs() const { return num_bad_epochs_; }
  [[nodiscard]] bool in_cooldown() const { return cooldown_counter_ > 0; }

 protected:
  [[nodiscard]] std::vector<double> get_lr() override;
  void write_state(Value::Dict& state) const override;
  void read_state(const Value::Dict& state) override;

 private:
  static auto state_fields();
  [[nodiscard]] bool is_better(double metric) const;
  void reduce_lr();

  double factor_;
  std::optional<double> default_min_lr_;
  std::vector<double> min_lrs_;
  std::int64_t patience_;
  std::int64_t cooldown_;
  double eps_;
  PlateauMode mode_;
  double threshold_;
  PlateauThresholdMode threshold_mode_;
  double mode_worse_;  // Python's name: the worst metric of the mode
  double best_;
  std::int64_t cooldown_counter_ = 0;
  std::int64_t num_bad_epochs_ = 0;
};

namespace detail::inline core {
// clang-format off
template <> inline constexpr EnumTable kEnumTable<PlateauMode>{"PlateauMode", {"min", "max"}};
template <> inline constexpr EnumTable kEnumTable<PlateauThresholdMode>{"PlateauThresholdMode",
    {"rel", "abs"}};
// clang-format on
}  // namespace detail::inline core

}  // namespace accelerate
