#include "accelerate/nn/swiglu.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

#include "nn/fused.h"
#include "nn/kernels.h"

namespace accelerate::nn {
namespace {

namespace fused = detail::nn;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int kElementThreads = 256;

/// silu(gate) * up
struct SiluProduct final : torch::autograd::Function<SiluProduct> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate,
                            const at::Tensor& up) {
    RECORD_FUNCTION("accelerate::nn::silu_product", {});
    const fused::KernelScope scope(gate);
    context->save_for_backward({gate, up});
    auto result = at::empty_like(gate);
    const auto pack = fused::pack_of(gate.numel(), {gate, up, result});
    const auto packs = gate.numel() / pack;
    fused::kernel_for(fused::kernels::kSiluProduct, gate, {pack, fused::number_of(gate)})
        .launch({.blocks = fused::ceil_div(packs, kElementThreads), .threads = kElementThreads},
                fused::address(gate), fused::address(up), fused::address(result),
                static_cast<long long>(packs));
    return result;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    RECORD_FUNCTION("accelerate::nn::silu_product_backward", {});
    const auto saved = context->get_saved_variables();
    const auto &gate = saved[0], &up = saved[1];
    if (at::GradMode::is_enabled()) {
      return fused::differentiable_gradients(
          [](const variable_list& inputs) { return at::silu(inputs[0]) * inputs[1]; }, saved,
          gradients[0]);
    }
    const fused::KernelScope scope(gate);
    const auto gradient = gradients[0].contiguous();
    auto of_gate = at::empty_like(gate), of_up = at::empty_like(up);
    const auto pack = fused::pack_of(gate.numel(), {gradient, gate, up, of_gate, of_up});
    const auto packs = gate.numel() / pack;
    fused::kernel_for(fused::kernels::kSiluProductBackward, gate, {pack, fused::number_of(gate)})
        .launch({.blocks = fused::ceil_div(packs, kElementThreads), .threads = kElementThreads},
                fused::address(gradient), fused::address(gate), fused::address(up),
                fused::address(of_gate), fused::address(of_up), static_cast<long long>(packs));
    return {of_gate, of_up};
  }
};

at::Tensor silu_product(const at::Tensor& gate, const at::Tensor& up) {
  if (!fused::fused_here({gate, up}) || gate.scalar_type() != up.scalar_type() ||
      gate.sizes() != up.sizes()) {
    return at::silu(gate) * up;
  }
  return SiluProduct::apply(gate, up);
}

}  // namespace

SwiGLUImpl::SwiGLUImpl(std::int64_t features_, std::int64_t hidden_features_,
                       const SwiGLUOptions& options_)
    : features(features_), hidden_features(hidden_features_), options(options_) {
  SwiGLUImpl::reset();
}

SwiGLUImpl::~SwiGLUImpl() = default;

void SwiGLUImpl::reset() {
  const auto linear = [&](std::int64_t in, std::int64_t out) {
    return Linear(torch::nn::LinearOptions(in, out).bias(options.bias));
  };
  gate_proj = register_module("gate_proj", linear(features, hidden_features));
  up_proj = register_module("up_proj", linear(features, hidden_features));
  down_proj = register_module("down_proj", linear(hidden_features, features));
}

at::Tensor SwiGLUImpl::forward(const at::Tensor& x) {
  return down_proj(silu_product(gate_proj(x), up_proj(x)));
}

}  // namespace accelerate::nn
