// src/optim/update_rules.h - one optimizer step on lists of tensors.
//
// The formulas are PyTorch's. They run fused kernels where the device has them and `_foreach_`
// kernels otherwise, for our own optimizers and for the user's torch::optim objects.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "accelerate/optim.h"
#include "optim/optimizer_traits.h"

namespace accelerate::detail::optim {

/// Parameters that one kernel call processes together, with their gradients and state.
struct TensorBucket {
  c10::Device device = c10::kCPU;
  at::ScalarType dtype = at::kFloat;
  /// All tensors have the memory layout that fused kernels need.
  bool fusable = false;
  /// SGD: the momentum buffers are new and take their first values from the gradients.
  bool first = false;
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> grads;
  /// State tensors in the order of `OptimizerTraits::states`. The step counts of a bucket (float32,
  /// one element each) are all on the host or all on the device.
  std::array<std::vector<at::Tensor>, kMaxSlots> slots;
};

/// The buckets of a parameter group. `clear` keeps their memory for reuse.
class TensorBuckets {
 public:
  /// Releases all tensors.
  void clear();
  /// The bucket for tensors with these properties; made if there is none.
  TensorBucket& at(c10::Device device, at::ScalarType dtype, bool fusable, bool first = false);

  [[nodiscard]] std::vector<TensorBucket>::iterator begin() { return buckets_.begin(); }
  [[nodiscard]] std::vector<TensorBucket>::iterator end() {
    return buckets_.begin() + static_cast<std::ptrdiff_t>(used_);
  }

 private:
  std::vector<TensorBucket> buckets_;
  std::size_t used_ = 0;
};

/// Clears buckets at the end of a scope, so that a step keeps no gradient alive.
class BucketsScope {
 public:
  explicit BucketsScope(TensorBuckets& buckets) : buckets_(buckets) { buckets_.clear(); }
  ~BucketsScope() { buckets_.clear(); }
  BucketsScope(const BucketsScope&) = delete;
  BucketsScope& operator=(const BucketsScope&) = delete;

 private:
  TensorBuckets& buckets_;
};

/// Whether the device has fused kernels and they can process both tensors: the kernels ignore
/// strides and combine elements by their position in memory.
[[nodiscard]] bool fusable(const at::Tensor& parameter, const at::Tensor& grad);
/// Whether elements at the same position in memory belong together.
[[nodiscard]] bool same_layout(const at::Tensor& a, const at::Tensor& b);

/// The factor in the gradients of a scaled loss and the flag for infinite or NaN gradients, one
/// float32 each. Either may be undefined.
struct GradScaling {
  at::Tensor grad_scale;
  at::Tensor found_inf;

  /// Whether `found_inf` can be read without waiting for a GPU.
  [[nodiscard]] bool on_host() const { return !found_inf.defined() || found_inf.is_cpu(); }
  /// Reads `found_inf`, which may wait for a GPU. Returns false if the step must be skipped; resets
  /// `found_inf` otherwise.
  [[nodiscard]] bool resolve();
};

/// True for a state tensor that is one number for the whole parameter.
[[nodiscard]] bool is_number(std::string_view name);
/// The shape of a state tensor that is not a number.
[[nodiscard]] std::vector<std::int64_t> state_shape(std::string_view name,
                                                    const at::Tensor& parameter);
/// A new state tensor: numbers on `number_device`, others like `parameter`.
[[nodiscard]] at::Tensor empty_state_tensor(std::string_view name, const at::Tensor& parameter,
                                            c10::Device number_device);
/// A new state tensor that is filled with `value`.
[[nodiscard]] at::Tensor new_state_tensor(std::string_view name, const at::Tensor& parameter,
                                          c10::Device number_device, double value = 0);

/// Adds a parameter with its gradient and state to the bucket that fits. `slots[i]` points to state
/// tensor i, or is null. Makes the tensors that the options use and that are undefined, and moves
/// numbers to `number_device`.
template <class Options>
void add_to_bucket(TensorBuckets& buckets, const Options& options, const at::Tensor& parameter,
                   const std::array<at::Tensor*, kMaxSlots>& slots, c10::Device number_device) {
  const auto& grad = parameter.grad();
  const auto& names = kTraits<Options>.slots;
  bool fused = kTraits<Options>.fused && fusable(parameter, grad);
  bool first = false;
  for (std::size_t i = 0; i < kMaxSlots; ++i) {
    if (slots[i] == nullptr || !uses_slot(options, i, parameter)) continue;
    auto& tensor = *slots[i];
    if (!tensor.defined()) {
      const auto value = first_value(options, names[i]);
      tensor = new_state_tensor(names[i], parameter, number_device, value);
      first = std::same_as<Options, SGDOptions>;
    }
    if (!is_number(names[i])) {
      fused = fused && same_layout(parameter, tensor);
    } else if (tensor.device() != number_device) {
      tensor = tensor.to(number_device);
    }
  }
  auto& bucket = buckets.at(parameter.device(), parameter.scalar_type(), fused, first);
  bucket.params.push_back(parameter);
  bucket.grads.push_back(grad);
  for (std::size_t i = 0; i < kMaxSlots; ++i) {
    // Unused tensors too, which are undefined: positions must match those of the parameters.
    if (slots[i] != nullptr) bucket.slots[i].push_back(*slots[i]);
  }
}

// One step of each optimizer on the tensors of a bucket, whose step counts were advanced before.
// Only fused kernels read `scaling.found_inf`: without them the caller skips the step itself.
void update(TensorBucket&, const AdamOptions&, const LearningRate&, const GradScaling&);
void update(TensorBucket&, const AdamWOptions&, const LearningRate&, const GradScaling&);
void update(TensorBucket&, const SGDOptions&, const LearningRate&, const GradScaling&);
void update(TensorBucket&, const AdagradOptions&, const LearningRate&, const GradScaling&);
void update(TensorBucket&, const RMSpropOptions&, const LearningRate&, const GradScaling&);
void update(TensorBucket&, const NAdamOptions&, const LearningRate&, const GradScaling&);
void update(TensorBucket&, const RAdamOptions&, const LearningRate&, const GradScaling&);
void update(TensorBucket&, const AdamaxOptions&, const LearningRate&, const GradScaling&);
void update(TensorBucket&, const LionOptions&, const LearningRate&, const GradScaling&);
void update(TensorBucket&, const AdafactorOptions&, const LearningRate&, const GradScaling&);

}  // namespace accelerate::detail::optim
