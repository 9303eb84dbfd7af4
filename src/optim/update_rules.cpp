#include "optim/update_rules.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "accelerate/errors.h"
#include "core/huge_pages.h"
#include "core/text.h"
#include "state/step_recording.h"

namespace accelerate::detail::optim {
namespace {

using at::Tensor;
using at::TensorList;

/// One number for each parameter of a list, or one for all of them. Numbers are on the device if
/// they are computed from a step count or a learning rate on the device, else on the host.
class Numbers {
 public:
  Numbers(double value) : host_{value} {}  // NOLINT(google-explicit-constructor): 1 - numbers
  explicit Numbers(std::vector<double> values) : host_(std::move(values)) {}
  explicit Numbers(Tensor device) : device_(std::move(device)) {}

  [[nodiscard]] bool on_host() const { return !device_.defined(); }
  [[nodiscard]] const std::vector<double>& host() const { return host_; }
  [[nodiscard]] const Tensor& device() const { return device_; }
  [[nodiscard]] double at(std::size_t i) const { return host_.size() == 1 ? host_[0] : host_[i]; }
  /// A host number becomes a CPU scalar, which kernels of any device accept as an argument.
  [[nodiscard]] Tensor tensor() const {
    return on_host() ? at::scalar_tensor(host_[0], at::kDouble) : device_;
  }
  /// The number of parameter `i` alone.
  [[nodiscard]] Numbers only(std::size_t i) const {
    if (on_host()) return at(i);
    return Numbers(device_.dim() == 0 ? device_ : device_.select(0, static_cast<std::int64_t>(i)));
  }

  template <class F>
  [[nodiscard]] Numbers map(const F& f) const {
    if (!on_host()) return Numbers(f(device_));
    auto result = host_;
    for (auto& value : result) value = f(value);
    return Numbers(std::move(result));
  }

 private:
  std::vector<double> host_;
  Tensor device_;  // [] or [number of parameters], double
};

template <class F>
Numbers combined(const Numbers& a, const Numbers& b, const F& f) {
  if (!a.on_host() || !b.on_host()) return Numbers(f(a.tensor(), b.tensor()));
  std::vector<double> result(std::max(a.host().size(), b.host().size()));
  for (std::size_t i = 0; i < result.size(); ++i) result[i] = f(a.at(i), b.at(i));
  return Numbers(std::move(result));
}

// clang-format off
Numbers operator+(const Numbers& a, const Numbers& b) {
  return combined(a, b, [](const auto& x, const auto& y) { return x + y; });
}
Numbers operator-(const Numbers& a, const Numbers& b) {
  return combined(a, b, [](const auto& x, const auto& y) { return x - y; });
}
Numbers operator*(const Numbers& a, const Numbers& b) {
  return combined(a, b, [](const auto& x, const auto& y) { return x * y; });
}
Numbers operator/(const Numbers& a, const Numbers& b) {
  return combined(a, b, [](const auto& x, const auto& y) { return x / y; });
}
// clang-format on

double power(double base, double exponent) { return std::pow(base, exponent); }
Tensor power(double base, const Tensor& exponent) { return at::pow(base, exponent); }
Tensor power(const Tensor& base, double exponent) { return at::pow(base, exponent); }

Numbers pow(double base, const Numbers& exponents) {
  return exponents.map([&](const auto& exponent) { return power(base, exponent); });
}
Numbers pow(const Numbers& bases, double exponent) {
  return bases.map([&](const auto& base) { return power(base, exponent); });
}
Numbers sqrt(const Numbers& numbers) { return pow(numbers, 0.5); }

/// `yes` where `condition` is above 0, `no` elsewhere.
Numbers select(const Numbers& condition, const Numbers& yes, const Numbers& no) {
  if (!condition.on_host()) {
    // Copying a host number to the device is not allowed while a graph is captured.
    const auto on_device = [&](const Numbers& numbers) {
      return numbers.on_host() ? at::full({}, numbers.at(0), condition.device().options())
                               : numbers.device();
    };
    return Numbers(at::where(condition.device() > 0, on_device(yes), on_device(no)));
  }
  std::vector<double> result(condition.host().size());
  for (std::size_t i = 0; i < result.size(); ++i) {
    result[i] = condition.at(i) > 0 ? yes.at(i) : no.at(i);
  }
  return Numbers(std::move(result));
}

/// The numbers in one-element tensors: read if they are on the host, kept on the device otherwise.
Numbers values_of(const std::vector<Tensor>& scalars) {
  if (!scalars.front().is_cpu()) {
    std::vector<Tensor> flat;
    flat.reserve(scalars.size());
    for (const auto& scalar : scalars) flat.push_back(scalar.reshape({}));
    return Numbers(at::stack(flat).to(at::kDouble));
  }
  std::vector<double> values;
  values.reserve(scalars.size());
  for (const auto& scalar : scalars) {
    values.push_back(scalar.scalar_type() == at::kFloat
                         ? static_cast<double>(*scalar.const_data_ptr<float>())
                         : scalar.item<double>());
  }
  // The usual case: all parameters have taken equally many steps, so one number is enough.
  const auto first = values.front();
  if (std::ranges::all_of(values, [&](double value) { return value == first; })) return first;
  return Numbers(std::move(values));
}

Numbers number(const LearningRate& lr) {
  return lr.tensor.defined() ? Numbers(lr.tensor.to(at::kDouble)) : Numbers(lr.value);
}

std::vector<at::Scalar> scalars(const Numbers& numbers) {
  return {numbers.host().begin(), numbers.host().end()};
}

void mul_(TensorList tensors, const Numbers& factors) {
  if (!factors.on_host()) {
    if (factors.device().dim() == 0) {
      at::_foreach_mul_(tensors, factors.device());
    } else {
      at::_foreach_mul_(tensors, factors.device().unbind());
    }
  } else if (factors.host().size() == 1) {
    at::_foreach_mul_(tensors, factors.host()[0]);
  } else {
    at::_foreach_mul_(tensors, scalars(factors));
  }
}

/// tensors += values * factors
void add_(TensorList tensors, TensorList values, const Numbers& factors) {
  if (factors.on_host() && factors.host().size() == 1) {
    at::_foreach_add_(tensors, values, factors.host()[0]);
    return;
  }
  const auto products = at::_foreach_mul(values, 1);
  mul_(products, factors);
  at::_foreach_add_(tensors, products);
}

/// tensors += a / b * factors
void addcdiv_(TensorList tensors, TensorList a, TensorList b, const Numbers& factors) {
  if (!factors.on_host()) {
    const auto quotients = at::_foreach_div(a, b);
    mul_(quotients, factors);
    at::_foreach_add_(tensors, quotients);
  } else if (factors.host().size() == 1) {
    at::_foreach_addcdiv_(tensors, a, b, factors.host()[0]);
  } else {
    at::_foreach_addcdiv_(tensors, a, b, scalars(factors));
  }
}

/// averages = averages * decay + squares of grads * (1 - decay)
void decay_squares_(TensorList averages, TensorList grads, double decay) {
  at::_foreach_mul_(averages, decay);
  at::_foreach_addcmul_(averages, grads, grads, 1 - decay);
}

/// The gradients that a rule uses, unscaled, negated for `maximize` and with weight decay added.
/// `made` keeps tensors that are not the parameters' own.
TensorList gradients(const TensorBucket& bucket, const GradScaling& scaling, bool maximize,
                     double coupled_decay, std::vector<Tensor>& made) {
  if (scaling.grad_scale.defined()) {
    // In place like the fused kernels, so that the user reads unscaled gradients afterwards.
    at::_foreach_div_(bucket.grads, scaling.grad_scale.to(bucket.device).reshape({}));
  }
  if (maximize) made = at::_foreach_neg(bucket.grads);
  if (coupled_decay != 0) {
    if (maximize) {
      at::_foreach_add_(made, bucket.params, coupled_decay);
    } else {
      made = at::_foreach_add(bucket.grads, bucket.params, coupled_decay);
    }
  }
  return made.empty() ? TensorList(bucket.grads) : TensorList(made);
}

/// `gradients` for rules whose weight decay may be decoupled: that one shrinks the parameters here.
template <class Options>
TensorList gradients_with_decay(TensorBucket& bucket, const Options& options, const Numbers& lr,
                                const GradScaling& scaling, std::vector<Tensor>& made) {
  const auto decoupled = options.decoupled_weight_decay ? options.weight_decay : 0;
  const auto grads =
      gradients(bucket, scaling, options.maximize, options.weight_decay - decoupled, made);
  if (decoupled != 0) mul_(bucket.params, 1 - lr * decoupled);
  return grads;
}

/// A tensor as fused kernels expect it: on the device of the parameters, or nullopt.
std::optional<Tensor> for_kernel(const Tensor& tensor, const TensorBucket& bucket) {
  if (!tensor.defined()) return std::nullopt;
  return tensor.to(bucket.device);
}

/// Calls `kernel` with the learning rate as a number or a tensor: both are overloads.
template <class F>
void with_rate(const LearningRate& lr, const F& kernel) {
  if (lr.tensor.defined()) {
    kernel(lr.tensor);
  } else {
    kernel(lr.value);
  }
}

void adam_on_lists(TensorBucket& bucket, const AdamOptions& options, const LearningRate& rate,
                   const GradScaling& scaling) {
  auto& [steps, exp_avgs, exp_avg_sqs, max_exp_avg_sqs] = bucket.slots;
  const auto [beta1, beta2] = options.betas;
  const auto lr = number(rate);
  const auto step = values_of(steps);
  std::vector<Tensor> made;
  const auto grads = gradients_with_decay(bucket, options, lr, scaling, made);
  at::_foreach_lerp_(exp_avgs, grads, 1 - beta1);
  decay_squares_(exp_avg_sqs, grads, beta2);
  if (options.amsgrad) at::_foreach_maximum_(max_exp_avg_sqs, exp_avg_sqs);
  const auto denominators = at::_foreach_sqrt(options.amsgrad ? max_exp_avg_sqs : exp_avg_sqs);
  mul_(denominators, 1 / sqrt(1 - pow(beta2, step)));
  at::_foreach_add_(denominators, options.eps);
  addcdiv_(bucket.params, exp_avgs, denominators, 0 - lr / (1 - pow(beta1, step)));
}

}  // namespace

void TensorBuckets::clear() {
  for (auto& bucket : buckets_) {
    bucket.params.clear();
    bucket.grads.clear();
    for (auto& slot : bucket.slots) slot.clear();
  }
  used_ = 0;
}

TensorBucket& TensorBuckets::at(c10::Device device, at::ScalarType dtype, bool fusable,
                                bool first) {
  for (auto& bucket : *this) {
    if (bucket.device == device && bucket.dtype == dtype && bucket.fusable == fusable &&
        bucket.first == first) {
      return bucket;
    }
  }
  if (used_ == buckets_.size()) buckets_.emplace_back();
  auto& bucket = buckets_[used_++];
  bucket.device = device;
  bucket.dtype = dtype;
  bucket.fusable = fusable;
  bucket.first = first;
  return bucket;
}

bool same_layout(const Tensor& a, const Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.device() != b.device()) return false;
  if (a.is_contiguous() && b.is_contiguous()) return a.numel() == b.numel();
  return a.sizes() == b.sizes() && a.strides() == b.strides() && a.is_non_overlapping_and_dense();
}

bool fusable(const Tensor& parameter, const Tensor& grad) {
  return (parameter.is_cpu() || parameter.is_cuda()) && same_layout(parameter, grad);
}

bool GradScaling::resolve() {
  if (found_inf.defined() && found_inf.item<double>() != 0) return false;
  found_inf = Tensor();
  return true;
}

bool is_number(std::string_view name) { return name == "step" || name == "mu_product"; }

std::vector<std::int64_t> state_shape(std::string_view name, const Tensor& parameter) {
  auto shape = parameter.sizes().vec();
  if (name == "row_var" && !shape.empty()) shape[shape.size() - 1] = 1;
  if (name == "col_var" && shape.size() > 1) shape[shape.size() - 2] = 1;
  return shape;
}

Tensor empty_state_tensor(std::string_view name, const Tensor& parameter,
                          c10::Device number_device) {
  if (is_number(name)) return at::empty({}, at::TensorOptions(at::kFloat).device(number_device));
  Tensor tensor;
  if (name == "row_var" || name == "col_var") {
    tensor = at::empty(state_shape(name, parameter), parameter.options().requires_grad(false));
  } else {
    tensor = at::empty_like(parameter, at::TensorOptions().requires_grad(false),
                            at::MemoryFormat::Preserve);
  }
  if (tensor.is_cpu()) advise_huge_pages(tensor.mutable_data_ptr(), tensor.nbytes());
  return tensor;
}

Tensor new_state_tensor(std::string_view name, const Tensor& parameter, c10::Device number_device,
                        double value) {
  if (state::StepRecording::current() != nullptr) {
    // Each replay would fill it again.
    throw UnsupportedError(
        detail::str("a parameter of shape ", parameter.sizes(),
                    " has its first gradient in the recorded step, after the warm-up"));
  }
  return empty_state_tensor(name, parameter, number_device).fill_(value);
}

void update(TensorBucket& bucket, const AdamOptions& options, const LearningRate& lr,
            const GradScaling& scaling) {
  if (!bucket.fusable) {
    adam_on_lists(bucket, options, lr, scaling);
    return;
  }
  const auto& [steps, exp_avgs, exp_avg_sqs, max_exp_avg_sqs] = bucket.slots;
  const auto maxima = options.amsgrad ? TensorList(max_exp_avg_sqs) : TensorList();
  with_rate(lr, [&, &avgs = exp_avgs, &squares = exp_avg_sqs, &counts = steps](const auto& rate) {
    const auto kernel = [&](auto function) {
      function(bucket.params, bucket.grads, avgs, squares, maxima, counts, rate,
               options.betas.first, options.betas.second, options.weight_decay, options.eps,
               options.amsgrad, options.maximize, for_kernel(scaling.grad_scale, bucket),
               for_kernel(scaling.found_inf, bucket));
    };
    if (options.decoupled_weight_decay) {
      kernel([](auto&&... arguments) { at::_fused_adamw_(arguments...); });
    } else {
      kernel([](auto&&... arguments) { at::_fused_adam_(arguments...); });
    }
  });
}

void update(TensorBucket& bucket, const AdamWOptions& options, const LearningRate& lr,
            const GradScaling& scaling) {
  const AdamOptions adam{.lr = options.lr,
                         .betas = options.betas,
                         .eps = options.eps,
                         .weight_decay = options.weight_decay,
                         .amsgrad = options.amsgrad,
                         .maximize = options.maximize,
                         .capturable = options.capturable,
                         .decoupled_weight_decay = true};
  update(bucket, adam, lr, scaling);
}

void update(TensorBucket& bucket, const SGDOptions& options, const LearningRate& lr,
            const GradScaling& scaling) {
  const bool has_momentum = options.momentum != 0;
  auto& buffers = bucket.slots[0];
  if (bucket.fusable) {
    with_rate(lr, [&](const auto& rate) {
      // Without momentum the kernels reject buffers, dampening and a first step.
      at::_fused_sgd_(
          bucket.params, bucket.grads, has_momentum ? TensorList(buffers) : TensorList(),
          options.weight_decay, options.momentum, rate, has_momentum ? options.dampening : 0,
          options.nesterov, options.maximize, has_momentum && bucket.first,
          for_kernel(scaling.grad_scale, bucket), for_kernel(scaling.found_inf, bucket));
    });
    return;
  }
  std::vector<Tensor> made;
  auto grads = gradients(bucket, scaling, options.maximize, options.weight_decay, made);
  std::vector<Tensor> ahead;
  if (has_momentum) {
    if (bucket.first) {
      at::_foreach_copy_(buffers, grads);
    } else {
      at::_foreach_mul_(buffers, options.momentum);
      at::_foreach_add_(buffers, grads, 1 - options.dampening);
    }
    if (options.nesterov) ahead = at::_foreach_add(grads, buffers, options.momentum);
    grads = options.nesterov ? TensorList(ahead) : TensorList(buffers);
  }
  add_(bucket.params, grads, 0 - number(lr));
}

void update(TensorBucket& bucket, const AdagradOptions& options, const LearningRate& lr,
            const GradScaling& scaling) {
  auto& steps = bucket.slots[0];
  auto& sums = bucket.slots[1];
  if (bucket.fusable) {
    with_rate(lr, [&](const auto& rate) {
      at::_fused_adagrad_(bucket.params, bucket.grads, sums, steps, rate, options.lr_decay,
                          options.weight_decay, options.eps, options.maximize,
                          for_kernel(scaling.grad_scale, bucket),
                          for_kernel(scaling.found_inf, bucket));
    });
    return;
  }
  std::vector<Tensor> made;
  const auto grads = gradients(bucket, scaling, options.maximize, options.weight_decay, made);
  at::_foreach_addcmul_(sums, grads, grads, 1);
  const auto denominators = at::_foreach_sqrt(sums);
  at::_foreach_add_(denominators, options.eps);
  const auto rate = number(lr) / (1 + (values_of(steps) - 1) * options.lr_decay);
  addcdiv_(bucket.params, grads, denominators, 0 - rate);
}

void update(TensorBucket& bucket, const RMSpropOptions& options, const LearningRate& lr,
            const GradScaling& scaling) {
  auto& [steps, square_avgs, buffers, grad_avgs] = bucket.slots;
  std::vector<Tensor> made;
  const auto grads = gradients(bucket, scaling, options.maximize, options.weight_decay, made);
  decay_squares_(square_avgs, grads, options.alpha);
  std::vector<Tensor> roots;
  if (options.centered) {
    at::_foreach_lerp_(grad_avgs, grads, 1 - options.alpha);
    roots = at::_foreach_addcmul(square_avgs, grad_avgs, grad_avgs, -1);
    at::_foreach_sqrt_(roots);
  } else {
    roots = at::_foreach_sqrt(square_avgs);
  }
  at::_foreach_add_(roots, options.eps);
  if (options.momentum > 0) {
    at::_foreach_mul_(buffers, options.momentum);
    at::_foreach_addcdiv_(buffers, grads, roots);
    add_(bucket.params, buffers, 0 - number(lr));
  } else {
    addcdiv_(bucket.params, grads, roots, 0 - number(lr));
  }
}

void update(TensorBucket& bucket, const NAdamOptions& options, const LearningRate& rate,
            const GradScaling& scaling) {
  auto& [steps, mu_products, exp_avgs, exp_avg_sqs] = bucket.slots;
  const auto [beta1, beta2] = options.betas;
  const auto lr = number(rate);
  const auto step = values_of(steps);
  std::vector<Tensor> made;
  const auto grads = gradients_with_decay(bucket, options, lr, scaling, made);
  constexpr double kScheduleBase = 0.96;  // from the paper; fixed in PyTorch too
  const auto mu = beta1 * (1 - 0.5 * pow(kScheduleBase, step * options.momentum_decay));
  const auto mu_next = beta1 * (1 - 0.5 * pow(kScheduleBase, (step + 1) * options.momentum_decay));
  mul_(mu_products, mu);
  const auto product = values_of(mu_products);

  at::_foreach_lerp_(exp_avgs, grads, 1 - beta1);
  decay_squares_(exp_avg_sqs, grads, beta2);
  const auto denominators = at::_foreach_sqrt(exp_avg_sqs);
  mul_(denominators, 1 / sqrt(1 - pow(beta2, step)));
  at::_foreach_add_(denominators, options.eps);
  addcdiv_(bucket.params, grads, denominators, 0 - lr * (1 - mu) / (1 - product));
  addcdiv_(bucket.params, exp_avgs, denominators, 0 - lr * mu_next / (1 - product * mu_next));
}

void update(TensorBucket& bucket, const RAdamOptions& options, const LearningRate& rate,
            const GradScaling& scaling) {
  auto& exp_avgs = bucket.slots[1];
  auto& exp_avg_sqs = bucket.slots[2];
  const auto [beta1, beta2] = options.betas;
  const auto lr = number(rate);
  const auto step = values_of(bucket.slots[0]);
  std::vector<Tensor> made;
  const auto grads = gradients_with_decay(bucket, options, lr, scaling, made);
  at::_foreach_lerp_(exp_avgs, grads, 1 - beta1);
  decay_squares_(exp_avg_sqs, grads, beta2);
  const auto bias1 = 1 - pow(beta1, step);
  const auto bias2 = 1 - pow(beta2, step);
  const double rho_inf = 2 / (1 - beta2) - 1;
  const auto rho = rho_inf - 2 * step * pow(beta2, step) / bias2;
  // The rectified update applies once the variance is tractable, the plain one before.
  const auto tractable = rho - 5;
  const auto safe_rho = select(tractable, rho, 6);
  const auto rectified =
      sqrt((safe_rho - 4) * (safe_rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * safe_rho));
  const auto adaptive = 0 - select(tractable, lr * rectified * sqrt(bias2) / bias1, 0);
  const auto plain = 0 - select(tractable, 0, lr / bias1);

  const auto denominators = at::_foreach_sqrt(exp_avg_sqs);
  at::_foreach_add_(denominators, options.eps);
  addcdiv_(bucket.params, exp_avgs, denominators, adaptive);
  add_(bucket.params, exp_avgs, plain);
}

void update(TensorBucket& bucket, const AdamaxOptions& options, const LearningRate& lr,
            const GradScaling& scaling) {
  auto& exp_avgs = bucket.slots[1];
  auto& exp_infs = bucket.slots[2];
  const auto [beta1, beta2] = options.betas;
  std::vector<Tensor> made;
  const auto grads = gradients(bucket, scaling, options.maximize, options.weight_decay, made);
  at::_foreach_lerp_(exp_avgs, grads, 1 - beta1);
  at::_foreach_mul_(exp_infs, beta2);
  const auto sizes = at::_foreach_abs(grads);
  at::_foreach_add_(sizes, options.eps);
  at::_foreach_maximum_(exp_infs, sizes);
  const auto bias = 1 - pow(beta1, values_of(bucket.slots[0]));
  addcdiv_(bucket.params, exp_avgs, exp_infs, 0 - number(lr) / bias);
}

void update(TensorBucket& bucket, const LionOptions& options, const LearningRate& rate,
            const GradScaling& scaling) {
  auto& exp_avgs = bucket.slots[0];
  const auto [beta1, beta2] = options.betas;
  const auto lr = number(rate);
  std::vector<Tensor> made;
  const auto grads = gradients(bucket, scaling, options.maximize, 0, made);
  if (options.weight_decay != 0) mul_(bucket.params, 1 - lr * options.weight_decay);
  const auto signs = at::_foreach_lerp(exp_avgs, grads, 1 - beta1);
  at::_foreach_sign_(signs);
  add_(bucket.params, signs, 0 - lr);
  at::_foreach_lerp_(exp_avgs, grads, 1 - beta2);
}

namespace {

/// average += (value - average) * weight
void lerp_(const Tensor& average, const Tensor& value, const Numbers& weight) {
  if (weight.on_host()) {
    average.lerp_(value, weight.at(0));
  } else {
    average.lerp_(value, weight.device().to(average.scalar_type()));
  }
}

Tensor mean_square(const Tensor& tensor, std::int64_t dim) {
  return at::linalg_vector_norm(tensor, 2, dim, /*keepdim=*/true).square_().div_(tensor.size(dim));
}

/// Root of the mean square; stays on the device, so nothing waits.
Tensor root_mean_square(const Tensor& tensor) {
  return at::linalg_vector_norm(tensor) / std::sqrt(static_cast<double>(tensor.numel()));
}

}  // namespace

void update(TensorBucket& bucket, const AdafactorOptions& options, const LearningRate& rate,
            const GradScaling& scaling) {
  const auto& [steps, row_vars, col_vars, variances] = bucket.slots;
  const auto all_steps = values_of(steps);
  const auto lr = number(rate);
  std::vector<Tensor> made;
  const auto grads = gradients(bucket, scaling, options.maximize, 0, made);
  const auto smallest = [&] {
    if (options.eps.first) return *options.eps.first;
    switch (bucket.dtype) {
      case at::kDouble:
        return std::numeric_limits<double>::epsilon();
      case at::kHalf:
        return static_cast<double>(std::numeric_limits<at::Half>::epsilon());
      case at::kBFloat16:
        return static_cast<double>(std::numeric_limits<at::BFloat16>::epsilon());
      default:
        return static_cast<double>(std::numeric_limits<float>::epsilon());
    }
  }();

  for (std::size_t i = 0; i < bucket.params.size(); ++i) {
    const auto& parameter = bucket.params[i];
    const auto& grad = grads[i];
    const auto step = all_steps.only(i);
    const auto weight = pow(step, options.beta2_decay);
    const auto slowest = pow(step, -0.5);
    const auto rho = select(slowest - lr, lr, slowest);  // the smaller one
    const auto alpha = root_mean_square(parameter).clamp_min_(options.eps.second);
    if (options.weight_decay != 0) mul_(parameter, 1 - lr * options.weight_decay);

    Tensor update;
    if (grad.dim() > 1) {
      lerp_(row_vars[i], mean_square(grad, -1), weight);
      lerp_(col_vars[i], mean_square(grad, -2), weight);
      update = at::matmul(row_vars[i], col_vars[i]);
      update.div_(row_vars[i].mean(-2, /*keepdim=*/true).clamp_min_(smallest));
    } else {
      lerp_(variances[i], grad * grad, weight);
      update = variances[i].clone();
    }
    update.clamp_min_(smallest * smallest).rsqrt_().mul_(grad);
    const auto clipped = (root_mean_square(update) / options.d).clamp_min_(1);
    const auto size = rho.on_host() ? alpha * rho.at(0) : alpha * rho.device();
    parameter.sub_(update.mul_(size / clipped));
  }
}

}  // namespace accelerate::detail::optim
