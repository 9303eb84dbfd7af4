// src/fp8/linear_rule.h - the rule that computes the products of a linear layer in 8 bits.
//
// The weight of a converted layer has this rule (lazy/operator_rule.h); the module and its
// parameters stay as they are. Products of an input with the transposed weight are replaced, all
// other operators on the weight run as ever.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <variant>

#include "accelerate/kwargs/fp8_recipes.h"
#include "fp8/delayed_scaling.h"
#include "lazy/operator_rule.h"

namespace accelerate::detail::fp8 {

/// One layer of a model that scales by earlier maxima.
struct DelayedLayer {
  std::shared_ptr<DelayedScaling> scaling;
  std::int64_t layer = 0;
};

struct LinearSettings {
  /// The dotted name of the module, for messages.
  std::string name;
  /// Scales of the current tensors, or delayed ones.
  std::variant<Float8LinearConfig, DelayedLayer> recipe = {};
  bool emulate = false;
  /// Counts values that are clamped, and looks for NaN, on GPUs too. Makes the host wait for a GPU.
  bool debug = false;
};

class LinearRule final : public lazy::OperatorRule,
                         public std::enable_shared_from_this<LinearRule> {
 public:
  explicit LinearRule(LinearSettings settings) : settings_(std::move(settings)) {}

  bool run(const c10::OperatorHandle& op, torch::jit::Stack& stack, std::size_t argument) override;

  [[nodiscard]] const LinearSettings& settings() const { return settings_; }
  /// How many values were beyond the largest number; of what `count_on_device` has counted, how
  /// many scales. Waits for a GPU.
  [[nodiscard]] std::int64_t clamped() const;
  void count_clamped(std::int64_t values, const char* of) const;
  /// `beyond` is true for scales that do not fit their tensor. Does not wait for the GPU.
  void count_on_device(const at::Tensor& beyond) const;

 private:
  LinearSettings settings_;
  mutable std::atomic<std::int64_t> clamped_ = 0;
  mutable std::mutex mutex_ = {};
  /// Written to and not replaced, so that a captured step finds it.
  mutable at::Tensor on_device_ = {};
};

}  // namespace accelerate::detail::fp8
