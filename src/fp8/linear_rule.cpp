#include "fp8/linear_rule.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "accelerate/errors.h"
#include "core/log.h"
#include "core/text.h"
#include "fp8/scaled_product.h"
#include "modeling/forward_context.h"

namespace accelerate::detail::fp8 {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Rule = std::shared_ptr<const LinearRule>;
using Role = DelayedScaling::Role;

/// Types are chosen here; autocast would make the products of the emulation bfloat16.
class NoAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard_{c10::autocast_dispatch_keyset};
};

// -- the numbers of a layer
// ------------------------------------------------------------------------

/// Which dimension of each factor of a product is summed over.
enum Side : std::uint8_t { kRight, kLeft };

/// One forward or backward of a layer.
class Casts {
 public:
  explicit Casts(const LinearRule& rule) : rule_(rule), settings_(rule.settings()) {
    if (const auto* config = std::get_if<Float8LinearConfig>(&settings_.recipe)) {
      by_rows_ = config->recipe != "tensorwise";
      power_of_2_ = by_rows_ || config->round_scales_to_power_of_2;
      high_grad_weight_ = config->recipe == "rowwise_with_gw_hp";
      pad_inner_dim_ = config->pad_inner_dim;
    } else {
      delayed_ = &std::get<DelayedLayer>(settings_.recipe);
    }
  }

  [[nodiscard]] const DelayedLayer* delayed() const { return delayed_; }
  [[nodiscard]] bool by_rows() const { return by_rows_; }
  /// A product that stays in the type of its input: of forward, of the gradient of the input, or of
  /// that of the weight.
  [[nodiscard]] bool is_high(std::size_t product) const {
    if (delayed_) return delayed_->scaling->kwargs().override_linear_precision->at(product);
    return product == kGradWeight && high_grad_weight_;
  }
  static constexpr std::size_t kOutput = 0;
  static constexpr std::size_t kGradInput = 1;
  static constexpr std::size_t kGradWeight = 2;

  /// With the scale of the tensor itself, by rows if the recipe says so.
  [[nodiscard]] Scaled current(const at::Tensor& tensor, Role role, Side side, bool by_rows) const {
    const auto dtype = role == Role::kGradient && !by_rows_ ? kE5m2 : kE4m3;
    const auto amax = by_rows ? amax_of(tensor, side) : amax_of(tensor);
    if (is_watched(amax)) {
      check_finite(amax, role);
    } else {
      rule_.count_on_device((amax - amax).ne(0));  // infinite or NaN
    }
    return scaled(tensor, scale_for(amax, dtype, power_of_2_), dtype);
  }
  /// With its scale of earlier steps, one of `scales`; records its maximum for later ones.
  [[nodiscard]] Scaled recorded(const at::Tensor& tensor, const at::Tensor& scales,
                                Role role) const {
    const auto amax = amax_of(tensor);
    const auto scale = scale_of(scales, role);
    const auto dtype = delayed_->scaling->dtype(role);
    if (modeling::forward_context().repeats) {
      // The first call has counted.
    } else if (!is_watched(tensor)) {
      rule_.count_on_device((amax.to(at::kFloat) * scale).le(largest(dtype)).logical_not());
    } else {
      if (role == Role::kWeight) check_finite(amax, role);
      const auto beyond = (tensor.to(at::kFloat) * scale).abs() > largest(dtype);
      const auto count = beyond.sum().to(at::kCPU);
      rule_.count_clamped(*count.const_data_ptr<std::int64_t>(), kNames[role]);
    }
    delayed_->scaling->record(delayed_->layer, role, amax);
    return scaled(tensor, scale, dtype);
  }
  [[nodiscard]] at::Tensor scale_of(const at::Tensor& scales, Role role) const {
    return delayed_->scaling->scale(scales, delayed_->layer, role);
  }

  [[nodiscard]] at::Tensor multiply(const Scaled& a, const Scaled& b, std::size_t product,
                                    at::ScalarType dtype) const {
    try {
      return scaled_product(a, b,
                            {.dtype = dtype,
                             .emulate = settings_.emulate,
                             .fast_accumulation = product == kOutput,
                             .pad_inner_dim = pad_inner_dim_ || delayed_ != nullptr});
    } catch (const ArgumentError& error) {
      throw ArgumentError(str("fp8: the layer '", settings_.name, "': ", error.what()));
    }
  }

 private:
  static constexpr const char* kNames[] = {"input", "weight", "gradient"};

  /// Whether its values are looked at, which makes the host wait for a GPU.
  [[nodiscard]] bool is_watched(const at::Tensor& tensor) const {
    return tensor.is_cpu() || settings_.debug;
  }

  /// Without `item()`, which no step can be recorded with.
  void check_finite(const at::Tensor& amax, Role role) const {
    const auto values = amax.to(at::kCPU, at::kFloat).contiguous();
    const std::span all(values.const_data_ptr<float>(), static_cast<std::size_t>(values.numel()));
    if (std::ranges::all_of(all, [](float value) { return std::isfinite(value); })) return;
    throw StateError(
        str("fp8: the ", kNames[role], " of the layer '", settings_.name,
            "' has NaN or infinite values, so that no scale fits it. Look for the step "
            "that made them: a learning rate that is too high, or a loss that is NaN."));
  }

  const LinearRule& rule_;
  const LinearSettings& settings_;
  const DelayedLayer* delayed_ = nullptr;
  bool by_rows_ = false;
  bool power_of_2_ = false;
  bool high_grad_weight_ = false;
  bool pad_inner_dim_ = false;
};

at::Tensor high_product(const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype) {
  return at::mm(a.to(dtype), b.to(dtype));
}

// -- forward and backward
// --------------------------------------------------------------------------

/// What a product needs beside its operands. Not a tensor argument: those must be defined.
struct Call {
  Rule rule;
  /// Delayed scales, else undefined.
  at::Tensor scales = {};
};

struct RuleHolder final : torch::CustomClassHolder {
  explicit RuleHolder(Rule one) : rule(std::move(one)) {}
  Rule rule;
};

/// x [M, K] times the transpose of weight [N, K]. As torchao and Transformer Engine do it, the
/// weight is cast again in backward; so is x with current scales, while delayed ones keep x in 8
/// bits.
struct LinearFunction final : torch::autograd::Function<LinearFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const Call& call) {
    const auto& [rule, scales] = call;
    const NoAutocast no_autocast;
    const Casts casts(*rule);
    const auto dtype = x.scalar_type();
    context->saved_data["rule"] = c10::IValue::make_capsule(c10::make_intrusive<RuleHolder>(rule));
    context->saved_data["dtype"] = static_cast<std::int64_t>(dtype);
    auto kept = x;
    const auto product = [&](const Scaled& left, const Scaled& right) {
      return casts.is_high(Casts::kOutput) ? high_product(x, weight.t(), dtype)
                                           : casts.multiply(left, right, Casts::kOutput, dtype);
    };
    at::Tensor result;
    if (casts.delayed()) {
      const auto left = casts.recorded(x, scales, Role::kInput);
      const auto right = casts.recorded(weight, scales, Role::kWeight);
      result = product(left, right.t());
      context->saved_data["scales"] = scales;
      if (!casts.is_high(Casts::kGradWeight)) kept = left.values;
    } else {
      result = product(casts.current(x, Role::kInput, kLeft, casts.by_rows()),
                       casts.current(weight.t(), Role::kWeight, kRight, casts.by_rows()));
    }
    context->save_for_backward({kept, weight});
    return result;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const NoAutocast no_autocast;
    const auto rule =
        c10::static_intrusive_pointer_cast<RuleHolder>(context->saved_data["rule"].toCapsule())
            ->rule;
    const auto dtype = static_cast<at::ScalarType>(context->saved_data["dtype"].toInt());
    const Casts casts(*rule);
    const auto saved = context->get_saved_variables();
    const auto gradient = gradients[0].contiguous();  // [M, N]
    const bool wants_x = context->needs_input_grad(0);
    const bool wants_weight = context->needs_input_grad(1);
    auto [grad_x, grad_weight] =
        casts.delayed() ? delayed(casts, gradient, saved, context->saved_data["scales"].toTensor(),
                                  wants_x, wants_weight)
                        : current(casts, gradient, saved, wants_x, wants_weight);
    if (grad_x.defined()) grad_x = grad_x.to(dtype);
    return {grad_x, grad_weight, at::Tensor()};
  }

 private:
  using Pair = std::pair<at::Tensor, at::Tensor>;

  static Pair current(const Casts& casts, const at::Tensor& gradient, const variable_list& saved,
                      bool wants_x, bool wants_weight) {
    const auto &x = saved[0], &weight = saved[1];
    const auto dtype = gradient.scalar_type();
    Pair result;
    Scaled scaled_gradient;
    if (wants_x || !casts.by_rows()) {
      scaled_gradient = casts.current(gradient, Role::kGradient, kLeft, casts.by_rows());
    }
    if (wants_x) {
      // With its gradient in high precision, one scale for all of the weight is enough.
      const bool by_rows = casts.by_rows() && !casts.is_high(Casts::kGradWeight);
      const auto right = casts.current(weight, Role::kWeight, kRight, by_rows);
      result.first = casts.multiply(scaled_gradient, right, Casts::kGradInput, dtype);
    }
    if (!wants_weight) return result;
    if (casts.is_high(Casts::kGradWeight)) {
      result.second = high_product(gradient.t(), x, dtype);
      return result;
    }
    const auto left = casts.by_rows()
                          ? casts.current(gradient.t(), Role::kGradient, kLeft, /*by_rows=*/true)
                          : scaled_gradient.t();
    result.second = casts.multiply(left, casts.current(x, Role::kInput, kRight, casts.by_rows()),
                                   Casts::kGradWeight, dtype);
    return result;
  }

  static Pair delayed(const Casts& casts, const at::Tensor& gradient, const variable_list& saved,
                      const at::Tensor& scales, bool wants_x, bool wants_weight) {
    const auto &x = saved[0], &weight = saved[1];
    const auto dtype = gradient.scalar_type();
    const auto left = casts.recorded(gradient, casts.delayed()->scaling->scales(), Role::kGradient);
    Pair result;
    if (wants_x && casts.is_high(Casts::kGradInput)) {
      result.first = high_product(gradient, weight, dtype);
    } else if (wants_x) {
      const auto scale = casts.scale_of(scales, Role::kWeight);
      const auto right = scaled(weight, scale, casts.delayed()->scaling->dtype(Role::kWeight));
      result.first = casts.multiply(left, right, Casts::kGradInput, dtype);
    }
    if (wants_weight && casts.is_high(Casts::kGradWeight)) {
      result.second = high_product(gradient.t(), x, dtype);
    } else if (wants_weight) {
      const Scaled right{x, casts.scale_of(scales, Role::kInput)};
      result.second = casts.multiply(left.t(), right, Casts::kGradWeight, dtype);
    }
    return result;
  }
};

// -- which operators
// -------------------------------------------------------------------------------

/// The operands of x * weight^T + bias.
struct Operands {
  at::Tensor x;
  at::Tensor weight;  // [N, K]
  at::Tensor bias;
};

bool is_transposed(const at::Tensor& tensor) {
  return tensor.dim() == 2 && tensor.stride(0) == 1 && tensor.stride(1) == tensor.size(0);
}

/// Empty for operators that are something else.
std::optional<Operands> operands_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack,
                                    std::size_t argument) {
  if (!op.schema().overload_name().empty()) return std::nullopt;
  const std::string_view name = op.schema().name();
  const auto count = op.schema().arguments().size();
  const auto at = [&](std::size_t i) -> const c10::IValue& {
    return stack[stack.size() - count + i];
  };
  Operands found;
  if (name == "aten::linear" && argument == 1) {
    found = {at(0).toTensor(), at(1).toTensor().t(), {}};
    if (at(2).isTensor()) found.bias = at(2).toTensor();
  } else if ((name == "aten::matmul" || name == "aten::mm") && argument == 1) {
    found = {at(0).toTensor(), at(1).toTensor(), {}};
  } else if (name == "aten::addmm" && argument == 2 && at(3).toScalar().equal(1) &&
             at(4).toScalar().equal(1)) {
    found = {at(1).toTensor(), at(2).toTensor(), at(0).toTensor()};
  } else {
    return std::nullopt;
  }
  const auto& x = found.x;
  if (!is_transposed(found.weight) || !x.is_floating_point() || x.dim() == 0 || x.numel() == 0 ||
      x.size(-1) != found.weight.size(0)) {
    return std::nullopt;
  }
  found.weight = found.weight.t();
  return found;
}

}  // namespace

bool LinearRule::run(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                     std::size_t argument) {
  const auto* const delayed = std::get_if<DelayedLayer>(&settings_.recipe);
  at::Tensor scales;
  if (delayed != nullptr) {
    const auto* const region = delayed->scaling->region();
    if (region == nullptr) return false;
    scales = region->scales;
  }
  const auto operands = operands_of(op, stack, argument);
  if (!operands) return false;
  auto x = operands->x;
  const auto type = x.device().type();
  if (at::autocast::is_autocast_enabled(type)) x = x.to(at::autocast::get_autocast_dtype(type));
  auto sizes = x.sizes().vec();
  sizes.back() = operands->weight.size(0);
  const auto product = LinearFunction::apply(x.reshape({-1, x.size(-1)}), operands->weight,
                                             Call{shared_from_this(), scales});
  auto result = at::_unsafe_view(product, sizes);
  if (operands->bias.defined()) result = result + operands->bias.to(result.scalar_type());
  torch::jit::drop(stack, op.schema().arguments().size());
  torch::jit::push(stack, std::move(result));
  return true;
}

std::int64_t LinearRule::clamped() const {
  const std::lock_guard lock(mutex_);
  return clamped_ + (on_device_.defined() ? on_device_.item<std::int64_t>() : 0);
}

void LinearRule::count_on_device(const at::Tensor& beyond) const {
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(mutex_);
  if (!on_device_.defined()) {
    const c10::InferenceMode outside(false);  // training adds to it, too
    on_device_ = at::zeros({}, beyond.options().dtype(at::kLong));
  }
  on_device_.add_(beyond.sum());
}

void LinearRule::count_clamped(std::int64_t values, const char* of) const {
  if (values == 0) return;
  clamped_ += values;
  if (!settings_.debug) return;  // a weight that grows is clamped now and then
  warn_once(str("fp8: values of the ", of, " of the layer '", settings_.name,
                "' are beyond the largest number of their format and are clamped. A larger margin "
                "or a longer amax_history_len leaves more room."));
}

}  // namespace accelerate::detail::fp8
