// Products with packed weights, and their gradients.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "accelerate/errors.h"
#include "core/text.h"
#include "quantization/gpu_kernels.h"
#include "quantization/tensors.h"

namespace accelerate {
namespace detail::quantization {
namespace {

using quant::Int8Weight;
using quant::QuantState;

/// Rows up to which decoding a weight several times is faster than expanding it (make bench:
/// quantization).
constexpr std::int64_t kMostDecodedRows = 16;
constexpr std::int64_t kTileBytes = std::int64_t{4} << 20;

/// Rows of a weight that are expanded at once. Layers may have no inputs, or no outputs.
std::int64_t tile_rows(std::int64_t inputs, std::int64_t outputs) {
  const auto fitting = kTileBytes / (4 * std::max<std::int64_t>(1, inputs));
  return std::clamp<std::int64_t>(fitting, 1, std::max<std::int64_t>(1, outputs));
}

/// A 4-bit weight on the CPU, ready for kernels.
struct HostWeight {
  HostWeight(const at::Tensor& packed, const QuantState& state)
      : bytes(packed.view(at::kByte)),
        scales(block_scales(state)),
        outputs(state.shape[0]),
        matrix{.type = four_bit_type(state.quant_type),
               .packed = bytes.const_data_ptr<std::uint8_t>(),
               .absmax = scales.const_data_ptr<float>(),
               .blocksize = state.blocksize,
               .inputs = state.shape[1]} {}

  /// `f(first row, rows of the weight as float32)` for tiles of the weight.
  template <class F>
  void for_tiles(const F& f) const {
    const auto inputs = matrix.inputs;
    const auto size = tile_rows(inputs, outputs);
    const auto grain = std::max<std::int64_t>(1, 32768 / std::max<std::int64_t>(1, inputs));
    const auto memory = at::empty({size, inputs}, at::kFloat);
    auto* const to = memory.mutable_data_ptr<float>();
    for (std::int64_t begin = 0; begin < outputs; begin += size) {
      const auto count = std::min(size, outputs - begin);
      at::parallel_for(0, count, grain, [&](std::int64_t first, std::int64_t end) {
        dequantize_4bit(matrix.type, matrix.packed, matrix.absmax, matrix.blocksize,
                        (begin + first) * inputs, (end - first) * inputs, to + first * inputs);
      });
      f(begin, memory.narrow(0, 0, count));
    }
  }

  at::Tensor bytes;
  at::Tensor scales;
  std::int64_t outputs;
  FourBitMatrix matrix;
};

at::Tensor multiply_few(const at::Tensor& x, const HostWeight& weight) {
  const auto rows = x.size(0);
  const auto outputs = weight.outputs;
  const auto half = weight.matrix.inputs / 2;
  const auto pairs = x.view({rows, half, 2});
  const auto even = pairs.select(2, 0).contiguous();
  const auto odd = pairs.select(2, 1).contiguous();
  auto y = at::empty({rows, outputs}, at::kFloat);
  const auto* const first = even.const_data_ptr<float>();
  const auto* const second = odd.const_data_ptr<float>();
  auto* const to = y.mutable_data_ptr<float>();
  const auto grain = std::max<std::int64_t>(1, 65536 / std::max<std::int64_t>(1, half));
  at::parallel_for(0, outputs, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = 0; r < rows; r += kMostFusedRows) {
      multiply_4bit(weight.matrix, first + r * half, second + r * half,
                    std::min(kMostFusedRows, rows - r), begin, end, to + r * outputs, outputs);
    }
  });
  return y;
}

at::Tensor multiply_tiles(const at::Tensor& x, const HostWeight& weight) {
  auto y = at::empty({x.size(0), weight.outputs}, at::kFloat);
  weight.for_tiles([&](std::int64_t begin, const at::Tensor& tile) {
    y.narrow(1, begin, tile.size(0)).copy_(at::mm(x, tile.t()));
  });
  return y;
}

/// codes * weight^T as int32, exactly.
at::Tensor multiply_codes(const at::Tensor& codes, const at::Tensor& weight) {
  const auto rows = codes.size(0);
  const auto inputs = codes.size(1);
  const auto outputs = weight.size(0);
  if (codes.is_cpu() && rows <= kMostDecodedRows) {
    auto y = at::empty({rows, outputs}, at::kInt);
    const auto* const from = codes.const_data_ptr<std::int8_t>();
    const auto* const matrix = weight.const_data_ptr<std::int8_t>();
    auto* const to = y.mutable_data_ptr<std::int32_t>();
    const auto grain = std::max<std::int64_t>(1, 65536 / std::max<std::int64_t>(1, inputs));
    at::parallel_for(0, outputs, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = 0; r < rows; ++r) {
        multiply_int8(from + r * inputs, matrix, inputs, begin, end, to + r * outputs);
      }
    });
    return y;
  }
  // float32 holds sums of 1024 products of codes exactly: 1024 * 127^2 < 2^24.
  constexpr std::int64_t kExact = 1024;
  auto y = at::zeros({rows, outputs}, codes.options().dtype(at::kInt));
  for (std::int64_t begin = 0; begin < inputs; begin += kExact) {
    const auto count = std::min(kExact, inputs - begin);
    const auto part = codes.narrow(1, begin, count).to(at::kFloat);
    y.add_(at::mm(part, weight.narrow(1, begin, count).to(at::kFloat).t()).to(at::kInt));
  }
  return y;
}

void check_inputs(const at::Tensor& x, std::int64_t inputs) {
  if (x.size(-1) == inputs) return;
  throw ArgumentError(str("The input of a quantized layer has ", x.size(-1),
                          " features, and the layer takes ", inputs, "."));
}

struct Held final : torch::CustomClassHolder {
  explicit Held(std::shared_ptr<const LinearProduct> of) : weight(std::move(of)) {}
  std::shared_ptr<const LinearProduct> weight;
};

class Product : public torch::autograd::Function<Product> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const std::optional<at::Tensor>& bias,
                            const std::shared_ptr<const LinearProduct>& weight) {
    ctx->saved_data["weight"] = c10::IValue::make_capsule(c10::make_intrusive<Held>(weight));
    if (bias) ctx->saved_data["bias_dtype"] = bias->scalar_type();
    return weight->forward(x, bias.value_or(at::Tensor()));
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& gradients) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto held = ctx->saved_data["weight"].toCapsule();
    const auto& weight = *static_cast<const Held&>(*held).weight;
    const auto& gradient = gradients[0];
    at::Tensor for_x;
    at::Tensor for_bias;
    if (ctx->needs_input_grad(0)) {
      // Gradients of gradients need operators that autograd knows.
      for_x = at::GradMode::is_enabled() ? gradient.matmul(weight.values(gradient.scalar_type()))
                                         : weight.backward(gradient);
    }
    if (ctx->saved_data.count("bias_dtype") > 0 && ctx->needs_input_grad(1)) {
      for_bias = gradient.sum(0).to(ctx->saved_data["bias_dtype"].toScalarType());
    }
    return {for_x, for_bias, at::Tensor()};
  }
};

}  // namespace

at::Tensor product_4bit(const at::Tensor& x, const at::Tensor& packed, const QuantState& state,
                        const at::Tensor& bias) {
  check_inputs(x, state.shape[1]);
  if (auto y = product_4bit_on_gpu(x, packed, state, bias)) return *std::move(y);
  if (!x.is_cpu()) return at::linear(x, dequantize_4bit(packed, state, x.scalar_type()), bias);
  const HostWeight weight(packed, state);
  const auto rows = x.to(at::kFloat).contiguous();
  const bool whole_blocks = weight.matrix.inputs % weight.matrix.blocksize == 0;
  auto y = whole_blocks && x.size(0) <= kMostDecodedRows ? multiply_few(rows, weight)
                                                         : multiply_tiles(rows, weight);
  if (bias.defined()) y.add_(bias.to(at::kFloat));
  return y.to(x.scalar_type());
}

at::Tensor backward_4bit(const at::Tensor& gradient, const at::Tensor& packed,
                         const QuantState& state) {
  if (!gradient.is_cpu()) {
    return gradient.matmul(dequantize_4bit(packed, state, gradient.scalar_type()));
  }
  const HostWeight weight(packed, state);
  const auto from = gradient.to(at::kFloat);
  auto result = at::zeros({gradient.size(0), weight.matrix.inputs}, at::kFloat);
  weight.for_tiles([&](std::int64_t begin, const at::Tensor& tile) {
    result.addmm_(from.narrow(1, begin, tile.size(0)), tile);
  });
  return result.to(gradient.scalar_type());
}

at::Tensor product_int8(const at::Tensor& x, const Int8Weight& weight, const at::Tensor& bias,
                        double threshold) {
  check_inputs(x, weight.CB.size(1));
  if (auto y = product_int8_on_gpu(x, weight, bias, threshold)) return *std::move(y);
  bool is_finite = true;  // a row that is not gives a row that is not
  const auto a = quantize_rows(x, threshold, is_finite);
  const auto scales = a.SCB.unsqueeze(1) * weight.SCB.unsqueeze(0) * (1.0 / 16129.0);
  auto y = multiply_codes(a.CB, weight.CB).to(at::kFloat).mul_(scales);
  const bool bias_inside = bias.defined() && bias.scalar_type() == at::kHalf;
  if (bias_inside) y.add_(bias);
  // The reference passes through float16 for every dtype of the input.
  y = y.to(at::kHalf).to(x.scalar_type());
  if (bias.defined() && !bias_inside) y.add_(bias.to(y.scalar_type()));
  const auto& columns = a.outlier_columns;
  if (!columns.defined() || columns.numel() == 0) return y;
  const Int8Weight part{.CB = weight.CB.index_select(1, columns), .SCB = weight.SCB};
  return y.addmm(x.index_select(1, columns), dequantize_int8(part, x.scalar_type()).t());
}

at::Tensor backward_int8(const at::Tensor& gradient, const Int8Weight& weight) {
  if (!gradient.is_cpu()) return gradient.matmul(dequantize_int8(weight, gradient.scalar_type()));
  const auto from = gradient.to(at::kFloat);
  const auto inputs = weight.CB.size(1);
  auto result = at::zeros({gradient.size(0), inputs}, at::kFloat);
  const auto size = tile_rows(inputs, weight.CB.size(0));
  for (std::int64_t begin = 0; begin < weight.CB.size(0); begin += size) {
    const auto count = std::min(size, weight.CB.size(0) - begin);
    const Int8Weight part{.CB = weight.CB.narrow(0, begin, count),
                          .SCB = weight.SCB.narrow(0, begin, count)};
    result.addmm_(from.narrow(1, begin, count), dequantize_int8(part, at::kFloat));
  }
  return result.to(gradient.scalar_type());
}

at::Tensor differentiable_product(std::shared_ptr<const LinearProduct> weight, const at::Tensor& x,
                                  const at::Tensor& bias) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  auto shape = x.sizes().vec();
  if (shape.empty()) throw ArgumentError("The input of a quantized layer is a single number.");
  shape.back() = weight->outputs();
  const auto rows = x.dim() == 2 ? x : x.reshape({-1, x.size(-1)});
  // Kernels read one number for each output.
  std::optional<at::Tensor> added;
  if (bias.defined()) added = bias.to(x.device()).expand({weight->outputs()}).contiguous();
  const bool is_recorded =
      at::GradMode::is_enabled() && (x.requires_grad() || (added && bias.requires_grad()));
  const auto y = is_recorded ? Product::apply(rows, added, weight)
                             : weight->forward(rows, added.value_or(at::Tensor()));
  return x.dim() == 2 ? y : y.view(shape);
}

}  // namespace detail::quantization

namespace quant {
namespace {

using namespace detail::quantization;  // NOLINT(google-build-using-namespace)

class FourBitProduct final : public LinearProduct {
 public:
  FourBitProduct(at::Tensor packed, QuantState state)
      : packed_(std::move(packed)), state_(std::move(state)) {}
  at::Tensor forward(const at::Tensor& rows, const at::Tensor& bias) const override {
    return product_4bit(rows, packed_, state_, bias);
  }
  at::Tensor backward(const at::Tensor& gradient) const override {
    return backward_4bit(gradient, packed_, state_);
  }
  at::Tensor values(at::ScalarType dtype) const override {
    return detail::quantization::dequantize_4bit(packed_, state_, dtype);
  }
  std::int64_t outputs() const override { return state_.shape[0]; }

 private:
  at::Tensor packed_;
  QuantState state_;
};

class Int8Product final : public LinearProduct {
 public:
  Int8Product(Int8Weight weight, double threshold)
      : weight_(std::move(weight)), threshold_(threshold) {}
  at::Tensor forward(const at::Tensor& rows, const at::Tensor& bias) const override {
    return product_int8(rows, weight_, bias, threshold_);
  }
  at::Tensor backward(const at::Tensor& gradient) const override {
    return backward_int8(gradient, weight_);
  }
  at::Tensor values(at::ScalarType dtype) const override { return dequantize_int8(weight_, dtype); }
  std::int64_t outputs() const override { return weight_.CB.size(0); }

 private:
  Int8Weight weight_;
  double threshold_;
};

}  // namespace

at::Tensor linear_4bit(const at::Tensor& x, const at::Tensor& packed, const QuantState& state,
                       const std::optional<at::Tensor>& bias,
                       std::optional<c10::ScalarType> compute_dtype) {
  if (state.shape.size() != 2) throw ArgumentError("linear_4bit: the packed tensor is no matrix.");
  const auto [bytes, fitting] = checked("linear_4bit", packed, state);
  check_product("linear_4bit", x, bias.value_or(at::Tensor()), state.shape[0], bytes.device());
  const auto dtype = compute_dtype.value_or(x.scalar_type());
  const auto added = bias && bias->defined() ? bias->to(dtype) : at::Tensor();
  return differentiable_product(std::make_shared<FourBitProduct>(bytes, fitting), x.to(dtype),
                                added)
      .to(x.scalar_type());
}

at::Tensor int8_linear(const at::Tensor& x, const Int8Weight& weight,
                       const std::optional<at::Tensor>& bias, double threshold) {
  const auto fitting = checked("int8_linear", weight);
  if (!(threshold >= 0)) {
    throw ArgumentError(
        str("int8_linear: threshold is ", threshold, ", and 0 or more is expected."));
  }
  const auto added = bias.value_or(at::Tensor());
  check_product("int8_linear", x, added, fitting.CB.size(0), fitting.CB.device());
  return differentiable_product(std::make_shared<Int8Product>(fitting, threshold), x, added);
}

}  // namespace quant
}  // namespace accelerate
