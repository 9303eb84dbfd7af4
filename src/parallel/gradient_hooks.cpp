#include "parallel/gradient_hooks.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <optional>
#include <utility>

#include "accelerate/kwargs/options.h"
#include "parallel/power_sgd.h"

namespace accelerate::detail::parallel {
namespace {

using Future = c10::ivalue::Future;
using FuturePtr = c10::intrusive_ptr<Future>;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

/// The mean of a tensor, which is overwritten, when the messages have come.
FuturePtr average(const Group& group, at::Tensor tensor) {
  tensor.div_(group->getSize());
  std::vector<at::Tensor> tensors{std::move(tensor)};
  return group->allreduce(tensors)->getFuture();
}

/// The gradients of a bucket in another dtype, averaged, and back in their own, by the same way.
/// The mean is taken of what was rounded, as in Python.
class CastHook final : public c10d::CommHookInterface {
 public:
  CastHook(Group group, std::vector<at::ScalarType> dtypes)
      : group_(std::move(group)), dtypes_(std::move(dtypes)) {}

  FuturePtr runHook(c10d::GradBucket& bucket) override {
    const at::Tensor own = bucket.getBuffer();
    at::Tensor cast = own;
    for (const auto dtype : dtypes_) cast = cast.to(dtype);
    const auto averaged = average(group_, cast.is_same(own) ? cast.clone() : cast);
    // In place: the buffer is what gradients may be views of.
    return averaged->then(
        [own, cast, dtypes = dtypes_](Future& future) {
          auto mean = c10d::detail::parseCppCommHookResult(future.value());
          for (std::size_t i = dtypes.size() - 1; i-- > 0;) mean = mean.to(dtypes[i]);
          own.copy_(mean);
          return c10::IValue(own);
        },
        c10::TensorType::get());
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    return c10d::detail::parseCppCommHookResult(result);
  }

 private:
  Group group_;
  std::vector<at::ScalarType> dtypes_;
};

/// PowerSGD of a bucket, which a wrapper gives to it in 16 bits.
class PowerSgdHook final : public c10d::CommHookInterface {
 public:
  PowerSgdHook(Group group, const DistributedDataParallelKwargs& options,
               std::optional<at::ScalarType> dtype)
      : power_sgd_(std::move(group), PowerSgdOptions::of(options.comm_state_option),
                   options.comm_hook == DDPCommunicationHookType::kBatchedPowerSgd),
        dtype_(dtype) {}

  FuturePtr runHook(c10d::GradBucket& bucket) override {
    at::Tensor own = bucket.getBuffer();
    at::Tensor cast = dtype_ ? own.to(*dtype_) : own;
    bucket.setBuffer(cast);
    power_sgd_.average(bucket);
    bucket.setBuffer(own);
    if (!cast.is_same(own)) own.copy_(cast);
    std::vector<c10::Device> devices;
    if (!own.is_cpu()) devices.push_back(own.device());
    auto done = c10::make_intrusive<Future>(c10::TensorType::get(), std::move(devices));
    done->markCompleted(c10::IValue(own));
    return done;
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    return c10d::detail::parseCppCommHookResult(result);
  }

 private:
  PowerSgd power_sgd_;
  std::optional<at::ScalarType> dtype_;
};

class SharedHook final : public c10d::CommHookInterface {
 public:
  explicit SharedHook(GradientHook hook) : hook_(std::move(hook)) {}
  FuturePtr runHook(c10d::GradBucket& bucket) override { return hook_->runHook(bucket); }
  at::Tensor parseHookResult(const c10::IValue& result) override {
    return hook_->parseHookResult(result);
  }

 private:
  GradientHook hook_;
};

std::optional<at::ScalarType> dtype_of(DDPCommunicationHookType type) {
  switch (type) {
    case DDPCommunicationHookType::kFp16:
      return at::kHalf;
    case DDPCommunicationHookType::kBf16:
      return at::kBFloat16;
    default:
      return std::nullopt;
  }
}

/// What stands one behind the other in one message.
struct Flat {
  at::Tensor buffer;
  std::vector<at::Tensor> gradients;
};

std::vector<Flat> flattened(const std::vector<at::Tensor>& gradients) {
  std::vector<Flat> result;
  for (const auto& gradient : gradients) {
    const auto same = std::ranges::find_if(result, [&](const Flat& flat) {
      return flat.gradients[0].scalar_type() == gradient.scalar_type() &&
             flat.gradients[0].device() == gradient.device();
    });
    if (same != result.end()) {
      same->gradients.push_back(gradient);
    } else {
      result.push_back({.buffer = {}, .gradients = {gradient}});
    }
  }
  for (auto& flat : result) {
    std::vector<at::Tensor> parts;
    for (const auto& gradient : flat.gradients) parts.push_back(gradient.reshape(-1));
    flat.buffer = at::cat(parts);
  }
  return result;
}

c10d::GradBucket as_bucket(const Flat& flat, std::size_t index, std::size_t count) {
  std::vector<std::size_t> offsets, lengths;
  std::vector<c10::IntArrayRef> sizes;
  std::size_t begin = 0;
  for (const auto& gradient : flat.gradients) {
    offsets.push_back(begin);
    lengths.push_back(static_cast<std::size_t>(gradient.numel()));
    sizes.push_back(gradient.sizes());
    begin += lengths.back();
  }
  return c10d::GradBucket(index, count, flat.buffer, std::move(offsets), std::move(lengths),
                          std::move(sizes), flat.gradients, std::nullopt);
}

}  // namespace

GradientHook make_gradient_hook(const DistributedDataParallelKwargs& options, Group group) {
  // A wrapper without a hook does nothing, as in Python.
  if (options.comm_hook == DDPCommunicationHookType::kNo) return nullptr;
  const auto wrapper = dtype_of(options.comm_wrapper);
  if (const auto hook = dtype_of(options.comm_hook)) {
    std::vector<at::ScalarType> dtypes;
    if (wrapper) dtypes.push_back(*wrapper);
    dtypes.push_back(*hook);
    return std::make_shared<CastHook>(std::move(group), std::move(dtypes));
  }
  validate(options);
  return std::make_shared<PowerSgdHook>(std::move(group), options, wrapper);
}

std::unique_ptr<c10d::CommHookInterface> shared_hook(GradientHook hook) {
  return std::make_unique<SharedHook>(std::move(hook));
}

void average_gradients(const std::vector<at::Tensor>& gradients, const GradientHook& hook,
                       const Group& group) {
  const at::NoGradGuard no_grad;
  const auto flats = flattened(gradients);
  for (std::size_t i = 0; i < flats.size(); ++i) {
    const auto& flat = flats[i];
    at::Tensor mean = flat.buffer;
    if (hook) {
      auto bucket = as_bucket(flat, i, flats.size());
      const auto done = hook->runHook(bucket);
      done->waitAndThrow();
      mean = hook->parseHookResult(done->value());
    } else {
      mean.div_(group->getSize());
      std::vector<at::Tensor> tensors{mean};
      group->allreduce(tensors)->wait();
    }
    std::int64_t begin = 0;
    for (const auto& gradient : flat.gradients) {
      gradient.copy_(mean.narrow(0, begin, gradient.numel()).view(gradient.sizes()));
      begin += gradient.numel();
    }
  }
}

}  // namespace accelerate::detail::parallel
