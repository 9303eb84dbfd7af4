#include "training/gradient_hooks.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <optional>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail {
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

/// The gradients of a bucket in another dtype, averaged, and back in their own. The mean is taken
/// of what was rounded, as in Python.
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
        [own, cast](Future& future) {
          own.copy_(c10d::detail::parseCppCommHookResult(future.value()));
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

}  // namespace

std::unique_ptr<c10d::CommHookInterface> make_gradient_hook(
    const DistributedDataParallelKwargs& options, Group group) {
  // A wrapper without a hook does nothing, as in Python.
  if (options.comm_hook == DDPCommunicationHookType::kNo) return nullptr;
  const auto hook = dtype_of(options.comm_hook);
  if (!hook) {
    throw UnsupportedError(str("comm_hook is ", to_string(options.comm_hook),
                               ", which is not there yet. Choose fp16 or bf16, or leave it out."));
  }
  std::vector<at::ScalarType> dtypes;
  if (const auto wrapper = dtype_of(options.comm_wrapper)) dtypes.push_back(*wrapper);
  dtypes.push_back(*hook);
  return std::make_unique<CastHook>(std::move(group), std::move(dtypes));
}

}  // namespace accelerate::detail
