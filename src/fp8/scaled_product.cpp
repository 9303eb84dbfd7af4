#include "fp8/scaled_product.h"

#include <ATen/ATen.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>

#include <limits>

#include "accelerate/checks.h"
#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::fp8 {
namespace {

// torchao's guard against a division by zero.
constexpr double kSmallestAmax = 1e-12;
constexpr std::int64_t kKernelMultiple = 16;

template <class T>
double largest_of() {
  return static_cast<double>(static_cast<float>(std::numeric_limits<T>::max()));
}

at::Tensor high_precision(const Scaled& tensor) {
  return tensor.values.to(at::kFloat) / tensor.scale;
}

void check_kernel_sizes(std::int64_t inner, std::int64_t columns, bool padded) {
  if (columns % kKernelMultiple == 0 && (padded || inner % kKernelMultiple == 0)) return;
  throw ArgumentError(
      str("The kernels for products in 8 bits take inner dimensions and columns in "
          "multiples of ",
          kKernelMultiple, ", here they are ", inner, " and ", columns,
          ". Set pad_inner_dim, which pads the inner dimension, and leave layers "
          "with other feature counts out (module_filter_func)."));
}

/// A number becomes one number per row, for kernels that take both scales by row.
at::Tensor spread(const at::Tensor& scale, at::IntArrayRef sizes) {
  return scale.dim() == 2 ? scale : scale.expand(sizes).contiguous();
}

// What kernels demand: `a` by rows, `b` by columns, factors inverted, rowwise ones for both or
// none. The rowwise kernel has results in bfloat16 only, and is slow without fast accumulation:
// then one product without factors is multiplied by both.
at::Tensor kernel_product(const Scaled& a, const Scaled& b, const ProductOptions& options) {
  if (!check_cuda_fp8_capability()) {
    throw UnsupportedError(
        "Products in 8 bits need a GPU of compute capability 8.9 or more. Set "
        "ACCELERATE_FP8_EMULATE=1 for the same numbers without such kernels, or use bf16.");
  }
  const auto inner = a.values.size(1);
  check_kernel_sizes(inner, b.values.size(1), options.pad_inner_dim);
  auto left = a.values;
  auto right = b.values.t();  // [N, K]
  if (const auto missing = (kKernelMultiple - inner % kKernelMultiple) % kKernelMultiple) {
    left = at::constant_pad_nd(left, {0, missing});
    right = at::constant_pad_nd(right, {0, missing});
  }
  left = left.contiguous();
  right = right.contiguous().t();
  auto left_scale = a.scale.reciprocal();
  auto right_scale = b.scale.reciprocal();
  const bool by_rows = left_scale.dim() == 2 || right_scale.dim() == 2;
  at::Tensor afterwards;
  if (by_rows && !options.fast_accumulation) {
    afterwards = left_scale * right_scale;
    left_scale = at::ones({}, left_scale.options());
    right_scale = left_scale;
  } else if (by_rows) {
    left_scale = spread(left_scale, {left.size(0), 1});
    right_scale = spread(right_scale, {1, right.size(1)});
  }
  const auto dtype = by_rows && !afterwards.defined() ? at::kBFloat16 : options.dtype;
  auto result = at::_scaled_mm(left, right, left_scale, right_scale, /*bias=*/std::nullopt,
                               /*scale_result=*/std::nullopt, dtype, options.fast_accumulation);
  if (afterwards.defined()) result = result * afterwards;
  return result.to(options.dtype);
}

}  // namespace

double largest(c10::ScalarType dtype) {
  return dtype == kE4m3 ? largest_of<c10::Float8_e4m3fn>() : largest_of<c10::Float8_e5m2>();
}

Scaled Scaled::t() const { return {values.t(), scale.dim() == 2 ? scale.t() : scale}; }

at::Tensor amax_of(const at::Tensor& tensor, std::optional<std::int64_t> dim) {
  return dim ? at::amax(tensor.abs(), *dim, /*keepdim=*/true) : tensor.abs().max();
}

at::Tensor scale_for(const at::Tensor& amax, c10::ScalarType dtype, bool power_of_2) {
  // In torchao's order, which is that of Python's `number / tensor`.
  auto scale =
      amax.to(at::kDouble).clamp_min(kSmallestAmax).reciprocal().mul(largest(dtype)).to(at::kFloat);
  return power_of_2 ? scale.log2().floor().exp2() : scale;
}

Scaled scaled(const at::Tensor& tensor, const at::Tensor& scale, c10::ScalarType dtype) {
  const double limit = largest(dtype);
  return {(tensor.to(at::kFloat) * scale).clamp_(-limit, limit).to(dtype), scale};
}

at::Tensor scaled_product(const Scaled& a, const Scaled& b, const ProductOptions& options) {
  if (!options.emulate && a.values.is_cuda()) return kernel_product(a, b, options);
  return at::mm(high_precision(a), high_precision(b)).to(options.dtype);
}

}  // namespace accelerate::detail::fp8
