#include "accelerate/nn/linear.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <ostream>

#include "accelerate/errors.h"
#include "core/text.h"
#include "modeling/lazy_key.h"
#include "nn/fused.h"
#include "nn/kernels.h"

namespace accelerate::nn {
namespace {

namespace fused = detail::nn;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const char* name_of(Activation activation) {
  static constexpr const char* kNames[] = {"none", "relu", "gelu", "gelu_tanh", "silu"};
  return kNames[static_cast<std::size_t>(activation)];
}

at::Tensor activated(const at::Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return at::relu(x);
    case Activation::kGelu:
      return at::gelu(x);
    case Activation::kGeluTanh:
      return at::gelu(x, "tanh");
    case Activation::kSilu:
      return at::silu(x);
  }
  throw ArgumentError(detail::str("nn::Activation has no member with the number ",
                                  static_cast<int>(activation), "."));
}

/// Threads of a block beside each other in a row, and blocks that share the rows.
detail::state::KernelGrid grid_of_columns(std::int64_t rows, std::int64_t width,
                                          std::int64_t pack) {
  constexpr std::int64_t kThreads = 128;
  constexpr std::int64_t kBlocks = 1024;  // enough for the largest GPUs
  const auto blocks = fused::ceil_div(width / pack, kThreads);
  const auto blocks_y = std::clamp<std::int64_t>(kBlocks / blocks, 1, rows);
  return {.blocks = blocks, .blocks_y = blocks_y, .threads = kThreads};
}

/// activation(x). `x` is the product of a Linear layer with its bias, cut off from the bias: the
/// kernel of backward sums its gradient too.
struct ActivationFunction final : torch::autograd::Function<ActivationFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const std::optional<at::Tensor>& bias, Activation activation) {
    RECORD_FUNCTION("accelerate::nn::activation", {});
    const fused::KernelScope scope(x);
    context->save_for_backward({x, bias.value_or(at::Tensor())});
    context->saved_data["activation"] = static_cast<std::int64_t>(activation);
    auto result = at::empty_like(x);
    const auto width = x.size(-1);
    const auto rows = x.numel() / width;
    const auto pack = fused::pack_of(width, {x, result});
    const auto& kernel =
        fused::kernel_for(fused::kernels::kActivation, x,
                          {pack, fused::number_of(x), static_cast<std::int32_t>(activation)});
    kernel.launch(grid_of_columns(rows, width, pack), fused::address(x), fused::address(result),
                  static_cast<long long>(rows), static_cast<int>(width));
    return result;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    RECORD_FUNCTION("accelerate::nn::activation_backward", {});
    const auto saved = context->get_saved_variables();
    const auto &x = saved[0], &bias = saved[1];
    const auto number = context->saved_data["activation"].toInt();
    const bool wants_bias = bias.defined() && bias.requires_grad();
    if (at::GradMode::is_enabled()) {
      // The gradient depends on the bias too, from which `x` is cut off: add nothing but the edge.
      const auto attached = wants_bias ? x + (bias - bias.detach()).to(x.scalar_type()) : x;
      const auto found = fused::differentiable_gradients(
          [&](const variable_list& inputs) {
            return activated(inputs[0], static_cast<Activation>(number));
          },
          {attached}, gradients[0]);
      at::Tensor of_bias;
      if (wants_bias) of_bias = found[0].flatten(0, -2).sum(0).to(bias.scalar_type());
      return {found[0], of_bias, at::Tensor()};
    }
    const fused::KernelScope scope(x);
    const auto gradient = gradients[0].contiguous();
    const auto width = x.size(-1);
    const auto rows = x.numel() / width;
    auto result = at::empty_like(x);
    const auto pack = fused::pack_of(width, {gradient, x, result});
    const auto grid = grid_of_columns(rows, width, pack);
    at::Tensor partial, of_bias;
    if (wants_bias) {
      partial = at::empty({grid.blocks_y, width}, x.options().dtype(at::kFloat));
      of_bias = at::empty_like(bias);
    }
    const auto& kernel =
        fused::kernel_for(fused::kernels::kActivationBackward, x,
                          {pack, fused::number_of(x), static_cast<std::int32_t>(number)});
    kernel.launch(grid, fused::address(gradient), fused::address(x), fused::address(result),
                  fused::address(partial), static_cast<long long>(rows), static_cast<int>(width));
    if (wants_bias) fused::column_sums(partial, of_bias);
    return {result, of_bias, at::Tensor()};
  }
};

at::Tensor product(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias) {
  // If rows are not contiguous, at::linear runs a product and adds the bias with a second kernel.
  // What a plan has cut is computed by the dimensions of the input.
  if (bias.defined() && input.dim() > 2 && !detail::modeling::is_marked(weight) &&
      input.layout() == at::kStrided && !input.is_nested() && !input.is_contiguous()) {
    auto shape = input.sizes().vec();
    shape.back() = weight.size(0);
    return at::linear(input.flatten(0, -2), weight, bias).view(shape);
  }
  return at::linear(input, weight, bias);
}

}  // namespace

LinearImpl::LinearImpl(const torch::nn::LinearOptions& options, Activation activation)
    : torch::nn::LinearImpl(options), activation_(activation) {}

LinearImpl::LinearImpl(std::int64_t in_features, std::int64_t out_features, Activation activation)
    : torch::nn::LinearImpl(in_features, out_features), activation_(activation) {}

LinearImpl::LinearImpl(const torch::nn::LinearImpl& other, Activation activation)
    : torch::nn::LinearImpl(other), activation_(activation) {}

LinearImpl::~LinearImpl() = default;

at::Tensor LinearImpl::forward(const at::Tensor& input) {
  // Without a gradient of the product there is none for the kernel to sum.
  const bool bias_alone = bias.defined() && bias.requires_grad() && !weight.requires_grad();
  if (activation_ == Activation::kNone || !fused::fused_here({weight, bias}) || bias_alone) {
    return activated(product(input, weight, bias), activation_);
  }
  const auto x = product(input, weight, bias.defined() ? bias.detach() : bias);
  if (input.dim() > 1 && fused::fused_here({x})) {
    return ActivationFunction::apply(
        x, bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt, activation_);
  }
  return activated(product(input, weight, bias), activation_);
}

void LinearImpl::pretty_print(std::ostream& stream) const {
  if (activation_ == Activation::kNone) {
    torch::nn::LinearImpl::pretty_print(stream);
    return;
  }
  stream << std::boolalpha << "accelerate::nn::Linear(in_features=" << options.in_features()
         << ", out_features=" << options.out_features() << ", bias=" << options.bias()
         << ", activation=" << name_of(activation_) << ")";
}

std::shared_ptr<torch::nn::Module> LinearImpl::clone(
    const std::optional<c10::Device>& device) const {
  // The base class clones only itself: wrap its clone.
  const auto base = torch::nn::LinearImpl::clone(device);
  return std::make_shared<LinearImpl>(dynamic_cast<const torch::nn::LinearImpl&>(*base),
                                      activation_);
}

}  // namespace accelerate::nn
