#include "accelerate/nn/normalization.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/init.h>

#include <algorithm>
#include <limits>
#include <ostream>
#include <string_view>

#include "accelerate/errors.h"
#include "core/text.h"
#include "nn/fused.h"
#include "nn/kernels.h"

namespace accelerate::nn {
namespace {

namespace fused = detail::nn;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using MaybeTensor = std::optional<at::Tensor>;

enum class Norm : std::uint8_t { kLayer, kRms };

struct NormCall {
  Norm norm;
  std::vector<std::int64_t> shape;
  std::optional<double> eps;
  at::Tensor weight;
  at::Tensor bias;
  /// Of the result; nullopt: that of the input.
  std::optional<at::ScalarType> dtype = std::nullopt;
};

double eps_of(const NormCall& call, at::ScalarType dtype) {
  if (call.eps) return *call.eps;
  switch (dtype) {
    case at::kBFloat16:
      return std::numeric_limits<at::BFloat16>::epsilon();
    case at::kHalf:
      return std::numeric_limits<at::Half>::epsilon();
    case at::kDouble:
      return std::numeric_limits<double>::epsilon();
    default:
      return std::numeric_limits<float>::epsilon();
  }
}

at::Tensor as_dtype(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() ? tensor.to(dtype) : tensor;
}

at::Tensor or_nothing(const MaybeTensor& tensor) { return tensor.value_or(at::Tensor()); }

MaybeTensor maybe(const at::Tensor& tensor) {
  return tensor.defined() ? MaybeTensor(tensor) : std::nullopt;
}

/// By operators of LibTorch.
at::Tensor composed(const at::Tensor& x, const NormCall& call) {
  const auto norm = [&](const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                        std::optional<double> eps) {
    if (call.norm == Norm::kLayer) {
      return at::layer_norm(input, call.shape, weight, bias, call.eps.value());
    }
    // An undefined weight is no weight to layer_norm alone.
    return at::rms_norm(input, call.shape, maybe(weight), eps);
  };
  if (!call.dtype) return norm(x, call.weight, call.bias, call.eps);
  const fused::NoAutocast no_autocast;
  return norm(x.to(at::kFloat), as_dtype(call.weight, at::kFloat), as_dtype(call.bias, at::kFloat),
              eps_of(call, x.scalar_type()))
      .to(*call.dtype);
}

/// How threads share a row.
struct RowPlan {
  std::int32_t pack;
  std::int32_t threads;
  std::int32_t steps;
};

constexpr std::int64_t kMaxWidth = 65536;

RowPlan plan_for(std::int64_t width, std::int32_t pack) {
  const auto packs = width / pack;
  const auto threads = std::min<std::int64_t>(1024, fused::ceil_div(packs, 32) * 32);
  return {pack, static_cast<std::int32_t>(threads),
          static_cast<std::int32_t>(fused::ceil_div(packs, threads))};
}

/// {norm(x)}, or {norm(x + residual), x + residual}.
struct NormFunction final : torch::autograd::Function<NormFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x,
                               const MaybeTensor& maybe_residual, const MaybeTensor& maybe_weight,
                               const MaybeTensor& maybe_bias, const NormCall& call) {
    RECORD_FUNCTION("accelerate::nn::norm", {});
    const fused::KernelScope scope(x);
    const auto residual = or_nothing(maybe_residual);
    const auto weight = or_nothing(maybe_weight), bias = or_nothing(maybe_bias);
    const bool is_rms = call.norm == Norm::kRms;
    auto sum = x;
    if (residual.defined()) {
      sum = at::empty(x.sizes(), x.options().dtype(at::result_type(x, residual)));
    }
    auto result = at::empty(x.sizes(), x.options().dtype(call.dtype.value_or(sum.scalar_type())));
    const auto width = c10::multiply_integers(call.shape);
    const auto rows = x.numel() / width;
    const auto floats = x.options().dtype(at::kFloat);
    const auto means = is_rms ? at::Tensor() : at::empty({rows}, floats);
    const auto scales = at::empty({rows}, floats);
    const auto plan =
        plan_for(width, fused::pack_of(width, {x, residual, sum, weight, bias, result}));
    const auto& kernel = fused::kernel_for(
        fused::kernels::kNormForward, x,
        {plan.pack, fused::number_of(x), fused::number_of(residual), fused::number_of(sum),
         fused::number_of(result), fused::number_of(weight), is_rms, plan.threads, plan.steps});
    kernel.launch({.blocks = rows, .threads = plan.threads}, fused::address(x),
                  fused::address(residual), fused::address(sum), fused::address(weight),
                  fused::address(bias), fused::address(result), fused::address(means),
                  fused::address(scales), static_cast<int>(width),
                  static_cast<float>(eps_of(call, sum.scalar_type())));
    context->save_for_backward({sum, means, scales, weight, bias});
    context->set_materialize_grads(false);
    auto& data = context->saved_data;
    data["is_rms"] = is_rms;
    data["shape"] = call.shape;
    data["eps"] = eps_of(call, sum.scalar_type());
    data["x"] = static_cast<std::int64_t>(x.scalar_type());
    data["result"] = static_cast<std::int64_t>(result.scalar_type());
    data["residual"] = residual.defined() ? static_cast<std::int64_t>(residual.scalar_type()) : -1;
    if (!residual.defined()) return {result};
    return {result, sum};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    RECORD_FUNCTION("accelerate::nn::norm_backward", {});
    const auto saved = context->get_saved_variables();
    const auto of_sum = gradients.size() > 1 ? gradients[1] : at::Tensor();
    if (!gradients[0].defined()) return inputs(context, of_sum, {}, {});
    if (at::GradMode::is_enabled()) return differentiable(context, saved, gradients[0], of_sum);
    const fused::KernelScope scope(saved[0]);
    return by_kernel(context, saved, gradients[0].contiguous(),
                     of_sum.defined() ? of_sum.contiguous() : of_sum);
  }

 private:
  static at::ScalarType dtype(AutogradContext* context, const char* of) {
    return static_cast<at::ScalarType>(context->saved_data[of].toInt());
  }

  /// Gradients of all inputs from that of the sum.
  static variable_list inputs(AutogradContext* context, const at::Tensor& sum,
                              const at::Tensor& weight, const at::Tensor& bias) {
    const auto x = as_dtype(sum, dtype(context, "x"));
    at::Tensor residual;
    if (context->saved_data["residual"].toInt() >= 0) {
      residual = as_dtype(sum, dtype(context, "residual"));
    }
    return {x, residual, weight, bias, at::Tensor()};
  }

  static variable_list differentiable(AutogradContext* context, const variable_list& saved,
                                      const at::Tensor& gradient, const at::Tensor& of_sum) {
    const bool is_rms = context->saved_data["is_rms"].toBool();
    NormCall call{is_rms ? Norm::kRms : Norm::kLayer,
                  context->saved_data["shape"].toIntVector(),
                  context->saved_data["eps"].toDouble(),
                  {},
                  {},
                  dtype(context, "result")};
    const auto found = fused::differentiable_gradients(
        [&](const variable_list& of) {
          call.weight = of[1];
          call.bias = of[2];
          return composed(of[0], call);
        },
        {saved[0], saved[3], saved[4]}, gradient);
    const bool both = of_sum.defined() && found[0].defined();
    const auto sum = both ? found[0] + of_sum : (of_sum.defined() ? of_sum : found[0]);
    return inputs(context, sum, found[1], found[2]);
  }

  static variable_list by_kernel(AutogradContext* context, const variable_list& saved,
                                 const at::Tensor& gradient, const at::Tensor& of_sum) {
    const auto &sum = saved[0], &weight = saved[3], &bias = saved[4];
    const bool is_rms = context->saved_data["is_rms"].toBool();
    const auto width = c10::multiply_integers(context->saved_data["shape"].toIntVector());
    const auto rows = sum.numel() / width;
    const auto result = at::empty(sum.sizes(), sum.options());
    const auto x_dtype = dtype(context, "x");
    const bool has_residual = context->saved_data["residual"].toInt() >= 0;
    const auto residual_dtype = has_residual ? dtype(context, "residual") : sum.scalar_type();
    // At most one of both inputs has another dtype than their sum, see `add_is_fused`.
    const auto other_dtype = x_dtype != sum.scalar_type() ? x_dtype : residual_dtype;
    at::Tensor other;
    if (other_dtype != sum.scalar_type()) {
      other = at::empty(sum.sizes(), sum.options().dtype(other_dtype));
    }
    const auto plan =
        plan_for(width, fused::pack_of(width, {gradient, of_sum, sum, weight, result, other}));
    constexpr std::int64_t kThreads = 65536;  // of all blocks
    const auto blocks = std::clamp<std::int64_t>(kThreads / plan.threads, 1, rows);
    const auto partial = [&](const at::Tensor& parameter) {
      return parameter.defined() && parameter.requires_grad()
                 ? at::empty({blocks, width}, sum.options().dtype(at::kFloat))
                 : at::Tensor();
    };
    const auto of_weight = partial(weight), of_bias = partial(bias);
    const auto& kernel = fused::kernel_for(
        fused::kernels::kNormBackward, sum,
        {plan.pack, fused::number_of(other_dtype), fused::number_of(sum),
         fused::number_of(gradient), fused::number_of(weight), is_rms, plan.threads, plan.steps});
    kernel.launch({.blocks = blocks, .threads = plan.threads}, fused::address(gradient),
                  fused::address(of_sum), fused::address(sum), fused::address(saved[1]),
                  fused::address(saved[2]), fused::address(weight), fused::address(result),
                  fused::address(other), fused::address(of_weight), fused::address(of_bias),
                  static_cast<long long>(rows), static_cast<int>(width));
    at::Tensor weight_gradient, bias_gradient;
    if (of_weight.defined()) weight_gradient = at::empty_like(weight);
    if (of_bias.defined()) bias_gradient = at::empty_like(bias);
    if (of_weight.defined()) {
      fused::column_sums(of_weight, weight_gradient, of_bias, bias_gradient);
    } else if (of_bias.defined()) {
      fused::column_sums(of_bias, bias_gradient);
    }
    const auto of_x = x_dtype == sum.scalar_type() ? result : other;
    at::Tensor of_residual;
    if (has_residual) of_residual = residual_dtype == sum.scalar_type() ? result : other;
    return {of_x, of_residual, weight_gradient, bias_gradient, at::Tensor()};
  }
};

/// The kernels take the shape of the parameters as one dimension of at most 64K elements.
bool is_fused(const at::Tensor& x, const at::Tensor& residual, const NormCall& call) {
  const auto dims = static_cast<std::int64_t>(call.shape.size());
  return fused::fused_here({x, residual, call.weight, call.bias}) && x.dim() >= dims &&
         x.sizes().slice(static_cast<std::size_t>(x.dim() - dims)) == call.shape &&
         c10::multiply_integers(call.shape) <= kMaxWidth &&
         (!call.weight.defined() || !call.bias.defined() ||
          call.weight.scalar_type() == call.bias.scalar_type());
}

bool add_is_fused(const at::Tensor& x, const at::Tensor& residual) {
  const auto dtype = at::result_type(x, residual);
  return x.scalar_type() == dtype || residual.scalar_type() == dtype;
}

at::Tensor normed(const at::Tensor& x, NormCall call) {
  call.dtype = fused::autocast_dtype(x);
  if (!is_fused(x, {}, call)) return composed(x, call);
  return NormFunction::apply(x, MaybeTensor(), maybe(call.weight), maybe(call.bias), call)[0];
}

std::pair<at::Tensor, at::Tensor> normed_sum(const at::Tensor& x, const at::Tensor& residual,
                                             NormCall call) {
  if (x.sizes() != residual.sizes()) {
    throw ArgumentError(detail::str("forward_add got x of shape ", x.sizes(),
                                    " and a residual of shape ", residual.sizes(),
                                    ". Give tensors of one shape."));
  }
  call.dtype = fused::autocast_dtype(x);
  if (!is_fused(x, residual, call) || !add_is_fused(x, residual)) {
    const auto sum = x + residual;
    return {composed(sum, call), sum};
  }
  const auto found =
      NormFunction::apply(x, MaybeTensor(residual), maybe(call.weight), maybe(call.bias), call);
  return {found[0], found[1]};
}

NormCall call_of(const LayerNormImpl& layer) {
  return {Norm::kLayer, layer.options.normalized_shape(), layer.options.eps(), layer.weight,
          layer.bias};
}

NormCall call_of(const RMSNormImpl& layer) {
  return {Norm::kRms, layer.options.normalized_shape, layer.options.eps, layer.weight, {}};
}

}  // namespace

LayerNormImpl::LayerNormImpl(const torch::nn::LayerNormImpl& other)
    : torch::nn::LayerNormImpl(other) {}

LayerNormImpl::~LayerNormImpl() = default;

at::Tensor LayerNormImpl::forward(const at::Tensor& input) { return normed(input, call_of(*this)); }

std::pair<at::Tensor, at::Tensor> LayerNormImpl::forward_add(const at::Tensor& x,
                                                             const at::Tensor& residual) {
  return normed_sum(x, residual, call_of(*this));
}

std::shared_ptr<torch::nn::Module> LayerNormImpl::clone(
    const std::optional<c10::Device>& device) const {
  const auto base = torch::nn::LayerNormImpl::clone(device);
  return std::shared_ptr<LayerNormImpl>(
      new LayerNormImpl(dynamic_cast<const torch::nn::LayerNormImpl&>(*base)));
}

RMSNormImpl::RMSNormImpl(RMSNormOptions options_) : options(std::move(options_)) {
  if (options.normalized_shape.empty()) {
    throw ArgumentError(
        "RMSNorm has an empty normalized_shape. Give the sizes of the last dimensions of its "
        "input, for example {768}.");
  }
  RMSNormImpl::reset();
}

RMSNormImpl::RMSNormImpl(std::int64_t width, std::optional<double> eps)
    : RMSNormImpl(RMSNormOptions{.normalized_shape = {width}, .eps = eps}) {}

RMSNormImpl::~RMSNormImpl() = default;

void RMSNormImpl::reset() {
  weight = register_parameter(
      "weight", options.elementwise_affine ? at::empty(options.normalized_shape) : at::Tensor(),
      /*requires_grad=*/options.elementwise_affine);
  reset_parameters();
}

void RMSNormImpl::reset_parameters() {
  if (weight.defined()) torch::nn::init::ones_(weight);
}

void RMSNormImpl::pretty_print(std::ostream& stream) const {
  stream << "accelerate::nn::RMSNorm(" << at::IntArrayRef(options.normalized_shape) << ", eps=";
  if (options.eps) {
    stream << *options.eps;
  } else {
    stream << "None";
  }
  stream << std::boolalpha << ", elementwise_affine=" << options.elementwise_affine << ")";
}

at::Tensor RMSNormImpl::forward(const at::Tensor& input) { return normed(input, call_of(*this)); }

std::pair<at::Tensor, at::Tensor> RMSNormImpl::forward_add(const at::Tensor& x,
                                                           const at::Tensor& residual) {
  return normed_sum(x, residual, call_of(*this));
}

}  // namespace accelerate::nn
