#include "optim/fused_step.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/optim.h"
#include "optim/torch_optimizers.h"
#include "optim/update_rules.h"

namespace accelerate::detail::optim {
namespace {

using at::Tensor;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

/// Step counts as tensors for the kernels. Parameters that have taken equally many steps share one
/// tensor, whose value is valid until the end of the call. Those of the host serve the next call.
class StepTensors {
 public:
  Tensor at(std::int64_t step, c10::Device device) {
    for (std::size_t i = 0; i < used_; ++i) {
      if (known_[i].step == step && known_[i].tensor.device() == device) return known_[i].tensor;
    }
    if (used_ == known_.size()) known_.emplace_back();
    auto& [value, tensor] = known_[used_++];
    value = step;
    if (device.is_cpu() && tensor.defined()) {
      *tensor.mutable_data_ptr<float>() = static_cast<float>(step);
    } else {
      const auto options = at::TensorOptions(at::kFloat).device(device);
      tensor = at::full({}, static_cast<double>(step), options);
    }
    return tensor;
  }
  void clear() {
    std::erase_if(known_, [](const Known& one) { return !one.tensor.is_cpu(); });
    used_ = 0;
  }

 private:
  struct Known {
    std::int64_t step = 0;
    Tensor tensor = {};
  };
  std::vector<Known> known_;
  std::size_t used_ = 0;
};

/// Whether the kernels accept all gradients.
bool accepts_gradients(Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto& grad = parameter.grad();
      if (!grad.defined()) continue;
      if (grad.layout() != at::kStrided || parameter.layout() != at::kStrided ||
          !at::isFloatingType(parameter.scalar_type()) ||
          grad.scalar_type() != parameter.scalar_type() || grad.device() != parameter.device()) {
        return false;
      }
    }
  }
  return true;
}

/// Steps one group. Returns false if the step is skipped.
template <class Adapter>
bool step_group(Optimizer& optimizer, OptimizerParamGroup& group, StepTensors& steps,
                GradScaling& scaling) {
  constexpr bool kFused = kTraits<typename Adapter::OwnOptions>.fused;
  thread_local TensorBuckets buckets;  // keeps memory only: empty between calls
  const BucketsScope scope(buckets);
  const auto options = Adapter::own_options(group.options());
  for (const auto& parameter : group.params()) {
    if (!parameter.grad().defined()) continue;
    const bool fused = kFused && fusable(parameter, parameter.grad());
    const auto device = fused ? parameter.device() : c10::Device(c10::kCPU);
    std::array<Tensor*, kMaxSlots> slots{};
    Tensor count;
    // False for SGD without momentum: LibTorch keeps no state then either.
    if (uses_slot(options, 0, parameter)) {
      auto* const key = parameter.unsafeGetTensorImpl();
      // A skipped step must not make a momentum buffer: the next step would not be the first.
      if (scaling.found_inf.defined() && optimizer.state().count(key) == 0 && !scaling.resolve()) {
        return false;
      }
      auto& state = optimizer.state()[key];
      if (state == nullptr) state = std::make_unique<typename Adapter::State>();
      std::size_t slot = 0;
      Adapter::for_each_state(static_cast<typename Adapter::State&>(*state),
                              [&]<class T>(std::string_view /*name*/, T& field) {
                                if constexpr (std::is_same_v<T, Tensor>) {
                                  slots[slot++] = &field;
                                } else {
                                  ++field;
                                  // RMSprop, the one without fused kernels, does not read it.
                                  if (kFused) count = steps.at(field, device);
                                  slots[slot++] = kFused ? &count : nullptr;
                                }
                              });
    }
    add_to_bucket(buckets, options, parameter, slots, device);
  }
  for (auto& bucket : buckets) {
    if (scaling.found_inf.defined() && !bucket.fusable && !scaling.resolve()) return false;
    update(bucket, options, {.value = options.lr, .tensor = {}}, scaling);
  }
  return true;
}

}  // namespace

bool fused_step(Optimizer& optimizer, const Tensor& grad_scale, const Tensor& found_inf) {
  if (!accepts_gradients(optimizer)) return false;
  const at::NoGradGuard no_grad;
  if (auto* const own = dynamic_cast<FusedOptimizer*>(&optimizer)) {
    own->step_scaled(grad_scale, found_inf);
    return true;
  }
  return with_torch_adapter(optimizer, [&]<class Adapter>(Adapter) {
    GradScaling scaling{.grad_scale = grad_scale, .found_inf = found_inf};
    // LibTorch counts steps on the host, so a skipped step must be known now; SGD counts none.
    constexpr bool kCounts = kTraits<typename Adapter::OwnOptions>.counts_steps();
    if ((kCounts || scaling.on_host()) && !scaling.resolve()) return;
    thread_local StepTensors steps;
    const struct Clearing {
      StepTensors& of;
      ~Clearing() { of.clear(); }
    } clearing{steps};
    for (auto& group : optimizer.param_groups()) {
      if (!step_group<Adapter>(optimizer, group, steps, scaling)) return;
    }
  });
}

bool fused_step(Optimizer& optimizer) { return fused_step(optimizer, {}, {}); }

}  // namespace accelerate::detail::optim
