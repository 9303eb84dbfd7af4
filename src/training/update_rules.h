// src/training/update_rules.h - what one optimizer step does to lists of tensors.
//
// The rules are PyTorch's. Behind them are the fused kernels where there is one for the device, and
// `_foreach_` kernels otherwise; both the user's torch::optim objects and our own optimizers come
// here, each with tensors of its own state.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <array>
#include <cstddef>
#include <string_view>
#include <vector>

#include "accelerate/optim.h"

namespace accelerate::detail {

inline constexpr std::size_t kMaxSlots = 4;

/// Parameters that one kernel takes together, with their gradients and state.
struct TensorBucket {
  c10::Device device = c10::kCPU;
  at::ScalarType dtype = at::kFloat;
  /// Memory is laid out as fused kernels want it.
  bool fusable = false;
  /// SGD: the momentum buffers have no content yet.
  bool first = false;
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> grads;
  /// As the names of the rule order them. Step counts (float, one element each) are on the host or
  /// on the device, all of a bucket on the same.
  std::array<std::vector<at::Tensor>, kMaxSlots> slots;
};

/// The buckets of a parameter group. Their memory is kept when they are emptied.
class TensorBuckets {
 public:
  /// Lets go of all tensors.
  void clear();
  /// The bucket of such tensors.
  TensorBucket& at(c10::Device device, at::ScalarType dtype, bool fusable, bool first = false);

  [[nodiscard]] std::vector<TensorBucket>::iterator begin() { return buckets_.begin(); }
  [[nodiscard]] std::vector<TensorBucket>::iterator end() {
    return buckets_.begin() + static_cast<std::ptrdiff_t>(used_);
  }

 private:
  std::vector<TensorBucket> buckets_;
  std::size_t used_ = 0;
};

/// Empties buckets at the end of a scope: a step must not keep gradients alive.
class BucketsScope {
 public:
  explicit BucketsScope(TensorBuckets& buckets) : buckets_(buckets) { buckets_.clear(); }
  ~BucketsScope() { buckets_.clear(); }
  BucketsScope(const BucketsScope&) = delete;
  BucketsScope& operator=(const BucketsScope&) = delete;

 private:
  TensorBuckets& buckets_;
};

/// Whether fused kernels exist for `device` and would read these tensors, element by element in the
/// order of memory, as belonging together. (They do not look at strides.)
[[nodiscard]] bool fusable(const at::Tensor& parameter, const at::Tensor& grad);
[[nodiscard]] bool same_layout(const at::Tensor& a, const at::Tensor& b);

/// What the gradients of a scaled loss need. Either may be undefined.
struct GradScaling {
  at::Tensor grad_scale;
  at::Tensor found_inf;

  /// Whether `found_inf` is set. Waits for a GPU.
  [[nodiscard]] bool overflowed() const;
  /// Whether it is known without waiting.
  [[nodiscard]] bool on_host() const;
};

/// For each optimizer: the names of its state, whether fused kernels exist, and its rule. A rule
/// changes parameters and state; step counts have been advanced before. `found_inf` matters to
/// fused kernels only: the others are not called when it is set.
template <class Options>
struct UpdateRule;

#define ACCELERATE_UPDATE_RULE(Options, name, fused, ...)                                   \
  template <>                                                                               \
  struct UpdateRule<Options> {                                                              \
    static constexpr std::string_view kName = name;                                         \
    static constexpr bool kFused = fused;                                                   \
    static constexpr auto kStates = std::to_array<std::string_view>({__VA_ARGS__});         \
    static void apply(TensorBucket& bucket, const Options& options, const LearningRate& lr, \
                      const GradScaling& scaling);                                          \
  };
ACCELERATE_UPDATE_RULE(AdamOptions, "Adam", true, "step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
ACCELERATE_UPDATE_RULE(AdamWOptions, "AdamW", true, "step", "exp_avg", "exp_avg_sq",
                       "max_exp_avg_sq")
ACCELERATE_UPDATE_RULE(SGDOptions, "SGD", true, "momentum_buffer")
ACCELERATE_UPDATE_RULE(AdagradOptions, "Adagrad", true, "step", "sum")
ACCELERATE_UPDATE_RULE(RMSpropOptions, "RMSprop", false, "step", "square_avg", "momentum_buffer",
                       "grad_avg")
ACCELERATE_UPDATE_RULE(NAdamOptions, "NAdam", false, "step", "mu_product", "exp_avg", "exp_avg_sq")
ACCELERATE_UPDATE_RULE(RAdamOptions, "RAdam", false, "step", "exp_avg", "exp_avg_sq")
ACCELERATE_UPDATE_RULE(AdamaxOptions, "Adamax", false, "step", "exp_avg", "exp_inf")
ACCELERATE_UPDATE_RULE(LionOptions, "Lion", false, "exp_avg")
ACCELERATE_UPDATE_RULE(AdafactorOptions, "Adafactor", false, "step", "row_var", "col_var",
                       "variance")
#undef ACCELERATE_UPDATE_RULE

}  // namespace accelerate::detail
