#include "accelerate/nn/loss.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/enum.h>

#include <cstdint>

#include "nn/fused.h"
#include "nn/kernels.h"

namespace accelerate::nn {
namespace {

namespace fused = detail::nn;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct LossCall {
  at::Reduction::Reduction reduction;
  std::int64_t ignore_index;
  double label_smoothing;
  at::ScalarType dtype;
};

at::Tensor composed_loss(const at::Tensor& logits, const at::Tensor& target,
                         const at::Tensor& weight, const LossCall& call) {
  return at::cross_entropy_loss(logits, target, weight, call.reduction, call.ignore_index,
                                call.label_smoothing);
}

constexpr int kLossThreads = 512;

/// True if only `logits` and the saved variable that it came from can read the elements.
bool is_unused_elsewhere(const at::Tensor& logits) {
  if (logits.use_count() != 2) return false;
  if (!logits.is_view()) return logits.storage().use_count() == 1;
  // The view knows its base, which holds the storage too.
  return logits._base().use_count() == 1 && logits.storage().use_count() == 2;
}

/// Logits [N, C], targets [N].
struct CrossEntropyFunction final : torch::autograd::Function<CrossEntropyFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits,
                            const at::Tensor& target, const LossCall& call) {
    RECORD_FUNCTION("accelerate::nn::cross_entropy", {});
    const fused::KernelScope scope(logits);
    const auto rows = logits.size(0), width = logits.size(1);
    const auto floats = logits.options().dtype(at::kFloat);
    const auto losses = at::empty({rows}, floats);
    const auto logs = at::empty({rows}, floats);
    const auto smoothing = static_cast<float>(call.label_smoothing);
    const auto& kernel =
        fused::kernel_for(fused::kernels::kCrossEntropy, logits, {kPack, fused::number_of(logits)});
    kernel.launch({.blocks = rows, .threads = kLossThreads}, fused::address(logits),
                  fused::address(target), fused::address(losses), fused::address(logs),
                  static_cast<int>(width), static_cast<long long>(call.ignore_index), smoothing);
    auto result = losses;
    at::Tensor divisor;
    if (call.reduction != at::Reduction::None) {
      result = at::empty({}, floats);
      divisor = at::empty({}, floats);
      fused::kernel_for(fused::kernels::kMeanOfRows, logits, {kPack})
          .launch({.threads = 1024}, fused::address(losses), fused::address(target),
                  fused::address(result), fused::address(divisor), static_cast<long long>(rows),
                  static_cast<long long>(call.ignore_index),
                  static_cast<int>(call.reduction == at::Reduction::Mean));
    }
    context->save_for_backward({logits, target, logs, divisor});
    auto& data = context->saved_data;
    data["reduction"] = static_cast<std::int64_t>(call.reduction);
    data["ignore_index"] = call.ignore_index;
    data["label_smoothing"] = call.label_smoothing;
    data["dtype"] = static_cast<std::int64_t>(call.dtype);
    return result.to(call.dtype);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    RECORD_FUNCTION("accelerate::nn::cross_entropy_backward", {});
    const auto saved = context->get_saved_variables();
    const auto &logits = saved[0], &target = saved[1];
    auto& data = context->saved_data;
    const LossCall call{static_cast<at::Reduction::Reduction>(data["reduction"].toInt()),
                        data["ignore_index"].toInt(), data["label_smoothing"].toDouble(),
                        static_cast<at::ScalarType>(data["dtype"].toInt())};
    if (at::GradMode::is_enabled()) {
      const auto found = fused::differentiable_gradients(
          [&](const variable_list& inputs) {
            return composed_loss(inputs[0].to(call.dtype), target, {}, call);
          },
          {logits}, gradients[0]);
      return {found[0], at::Tensor(), at::Tensor()};
    }
    const fused::KernelScope scope(logits);
    const auto gradient = gradients[0].contiguous();
    // A second backward through the same graph must find the logits.
    const bool in_place =
        !torch::autograd::get_current_graph_task_keep_graph() && is_unused_elsewhere(logits);
    auto result = in_place ? logits.detach() : aligned_like(logits);
    const auto& kernel =
        fused::kernel_for(fused::kernels::kCrossEntropyBackward, logits,
                          {kPack, fused::number_of(logits), fused::number_of(gradient)});
    kernel.launch({.blocks = logits.size(0), .threads = kLossThreads}, fused::address(logits),
                  fused::address(result), fused::address(target), fused::address(saved[2]),
                  fused::address(gradient), fused::address(saved[3]),
                  static_cast<int>(call.reduction == at::Reduction::None),
                  static_cast<int>(logits.size(1)), static_cast<long long>(call.ignore_index),
                  static_cast<float>(call.label_smoothing));
    if (in_place) logits.unsafeGetTensorImpl()->bump_version();
    return {result, at::Tensor(), at::Tensor()};
  }

 private:
  static constexpr std::int32_t kPack = 8;

  /// Memory whose address differs from that of `logits` by a multiple of 16 bytes.
  static at::Tensor aligned_like(const at::Tensor& logits) {
    constexpr std::uintptr_t kAlignment = 16;
    const auto offset = reinterpret_cast<std::uintptr_t>(fused::address(logits)) % kAlignment;
    if (offset == 0) return at::empty_like(logits);
    const auto begin = static_cast<std::int64_t>(offset / logits.element_size());
    return at::empty({logits.numel() + begin}, logits.options())
        .slice(0, begin)
        .view(logits.sizes());
  }
};

bool loss_is_fused(const at::Tensor& logits, const at::Tensor& target, const at::Tensor& weight) {
  constexpr std::int64_t kMaxClasses = std::int64_t{1} << 30;
  return fused::fused_here({logits}) && logits.dim() == 2 && logits.size(1) <= kMaxClasses &&
         !weight.defined() && target.scalar_type() == at::kLong && target.dim() == 1 &&
         target.size(0) == logits.size(0) && target.device() == logits.device() &&
         target.is_contiguous();
}

}  // namespace

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& target,
                         const CrossEntropyOptions& options) {
  LossCall call{torch::enumtype::reduction_get_enum(options.reduction()), options.ignore_index(),
                options.label_smoothing(), logits.scalar_type()};
  if (call.label_smoothing < 0 || call.label_smoothing > 1 ||
      !loss_is_fused(logits, target, options.weight())) {
    return composed_loss(logits, target, options.weight(), call);
  }
  if (fused::autocast_dtype(logits)) call.dtype = at::kFloat;
  return CrossEntropyFunction::apply(logits, target, call);
}

CrossEntropyLossImpl::CrossEntropyLossImpl(const CrossEntropyOptions& options)
    : torch::nn::CrossEntropyLossImpl(options) {}

CrossEntropyLossImpl::CrossEntropyLossImpl(const torch::nn::CrossEntropyLossImpl& other)
    : torch::nn::CrossEntropyLossImpl(other) {}

CrossEntropyLossImpl::~CrossEntropyLossImpl() = default;

at::Tensor CrossEntropyLossImpl::forward(const at::Tensor& logits, const at::Tensor& target) {
  auto current = options;  // the buffer may have moved to another device
  return cross_entropy(logits, target, current.weight(weight));
}

std::shared_ptr<torch::nn::Module> CrossEntropyLossImpl::clone(
    const std::optional<c10::Device>& device) const {
  const auto base = torch::nn::CrossEntropyLossImpl::clone(device);
  return std::shared_ptr<CrossEntropyLossImpl>(
      new CrossEntropyLossImpl(dynamic_cast<const torch::nn::CrossEntropyLossImpl&>(*base)));
}

}  // namespace accelerate::nn
