#include "accelerate/nn/attention.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/init.h>

#include <map>
#include <mutex>
#include <ostream>
#include <tuple>

#include "accelerate/errors.h"
#include "core/text.h"
#include "nn/fused.h"
#include "nn/kernels.h"

namespace accelerate::nn {
namespace {

namespace fused = detail::nn;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Float32 [max_positions, dim / 2].
struct Angles {
  at::Tensor cosines;
  at::Tensor sines;
};

struct Rotation {
  Angles angles;
  /// int64 [batch or 1, length]; undefined: 0, 1, ...
  at::Tensor positions;
  /// -1 rotates back.
  int sign = 1;
};

/// x * cos + rotate_half(x) * sin
at::Tensor composed_rotation(const at::Tensor& x, const Rotation& rotation) {
  const auto of_positions = [&](const at::Tensor& table) {  // [batch or 1, 1, length, dim / 2]
    const auto rows = rotation.positions.defined()
                          ? table.index({rotation.positions}).unsqueeze(1)
                          : table.slice(0, 0, x.size(2)).unsqueeze(0).unsqueeze(0);
    const auto both = at::cat({rows, rows}, -1);
    return x.scalar_type() == at::kDouble ? both.to(at::kDouble) : both;
  };
  const auto halves = x.chunk(2, -1);
  const auto turned = at::cat({halves[1].neg(), halves[0]}, -1);
  return (x * of_positions(rotation.angles.cosines) + turned * of_positions(rotation.angles.sines))
      .to(x.scalar_type());
}

/// x [batch, heads, length, dim], whose heads are contiguous.
struct RotateFunction final : torch::autograd::Function<RotateFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const Rotation& rotation) {
    RECORD_FUNCTION("accelerate::nn::rotate", {});
    const fused::KernelScope scope(x);
    context->saved_data["cosines"] = rotation.angles.cosines;
    context->saved_data["sines"] = rotation.angles.sines;
    context->saved_data["positions"] = rotation.positions;
    context->saved_data["sign"] = rotation.sign;
    return rotated(x, rotation);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    auto& data = context->saved_data;
    const Rotation back{{data["cosines"].toTensor(), data["sines"].toTensor()},
                        data["positions"].toTensor(),
                        -static_cast<int>(data["sign"].toInt())};
    auto gradient = gradients[0];
    if (gradient.stride(-1) != 1) gradient = gradient.contiguous();
    // The rotation is linear: autograd can differentiate this one again.
    return {apply(gradient, back), at::Tensor()};
  }

 private:
  static at::Tensor rotated(const at::Tensor& x, const Rotation& rotation) {
    constexpr int kThreads = 256;
    // By tokens, as products make them and attention reads them without a copy.
    auto result =
        at::empty({x.size(0), x.size(2), x.size(1), x.size(3)}, x.options()).transpose(1, 2);
    const auto pairs = x.numel() / 2;
    const auto& positions = rotation.positions;
    const auto number = [](std::int64_t value) { return static_cast<long long>(value); };
    fused::kernel_for(fused::kernels::kRotate, x, {1, fused::number_of(x)})
        .launch({.blocks = fused::ceil_div(pairs, kThreads), .threads = kThreads},
                fused::address(x), fused::address(result), fused::address(rotation.angles.cosines),
                fused::address(rotation.angles.sines), fused::address(positions), number(pairs),
                static_cast<int>(x.size(1)), static_cast<int>(x.size(2)),
                static_cast<int>(x.size(3) / 2), static_cast<int>(rotation.angles.cosines.size(0)),
                number(x.stride(0)), number(x.stride(1)), number(x.stride(2)),
                number(result.stride(0)), number(result.stride(1)), number(result.stride(2)),
                number(positions.defined() && positions.size(0) > 1 ? positions.stride(0) : 0),
                number(positions.defined() ? positions.stride(1) : 0),
                static_cast<float>(rotation.sign));
    return result;
  }
};

at::Tensor rotate(const at::Tensor& x, const Rotation& rotation) {
  // Any order of batches, heads and tokens will do: what must be contiguous is a head.
  const bool fits =
      x.stride(-1) == 1 && fused::kernels_read(x) && rotation.angles.cosines.device() == x.device();
  return fits ? RotateFunction::apply(x, rotation) : composed_rotation(x, rotation);
}

void check_attention(const CausalSelfAttentionOptions& options) {
  const auto heads = options.num_heads, shared = options.num_kv_heads.value_or(heads);
  if (heads > 0 && shared > 0 && options.embed_dim > 0 && options.embed_dim % heads == 0 &&
      heads % shared == 0 && options.dropout >= 0 && options.dropout < 1) {
    return;
  }
  throw ArgumentError(detail::str(
      "CausalSelfAttentionOptions has embed_dim = ", options.embed_dim, ", num_heads = ", heads,
      ", num_kv_heads = ", shared, " and dropout = ", options.dropout,
      ". The heads must divide embed_dim, num_kv_heads the heads, and dropout is from 0 to below "
      "1."));
}

}  // namespace

// -- rotary positions
// ------------------------------------------------------------------------------

struct RotaryEmbeddingImpl::Tables {
  std::mutex mutex;
  std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, Angles> by_device;

  /// Computed on the CPU when a device first needs them.
  Angles on(const c10::Device& device, const RotaryEmbeddingOptions& options) {
    const std::scoped_lock lock(mutex);
    auto& angles = by_device[{device.type(), device.index()}];
    if (!angles.cosines.defined()) {
      const at::NoGradGuard no_grad;
      const fused::NoAutocast no_autocast;
      const auto floats = at::TensorOptions().dtype(at::kFloat).device(at::kCPU);
      const auto exponents =
          at::arange(0, options.dim, 2, floats) / static_cast<double>(options.dim);
      const auto frequencies = at::pow(options.base, exponents).reciprocal();
      const auto all = at::outer(at::arange(options.max_positions, floats), frequencies);
      angles = {all.cos().to(device), all.sin().to(device)};
    }
    return angles;
  }
};

RotaryEmbeddingImpl::RotaryEmbeddingImpl(const RotaryEmbeddingOptions& options_)
    : options(options_) {
  if (options.dim <= 0 || options.dim % 2 != 0 || options.max_positions <= 0) {
    throw ArgumentError(detail::str("RotaryEmbeddingOptions has dim = ", options.dim,
                                    " and max_positions = ", options.max_positions,
                                    ". Give an even dim and a positive number of positions."));
  }
  RotaryEmbeddingImpl::reset();
}

RotaryEmbeddingImpl::~RotaryEmbeddingImpl() = default;

void RotaryEmbeddingImpl::reset() { tables_ = std::make_shared<Tables>(); }

void RotaryEmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "accelerate::nn::RotaryEmbedding(" << options.dim
         << ", max_positions=" << options.max_positions << ", base=" << options.base << ")";
}

std::pair<at::Tensor, at::Tensor> RotaryEmbeddingImpl::forward(const at::Tensor& q,
                                                               const at::Tensor& k,
                                                               const at::Tensor& positions) {
  for (const auto& x : {q, k}) {
    if (x.dim() == 4 && x.size(3) == options.dim && x.size(2) == q.size(2) &&
        x.size(0) == q.size(0)) {
      continue;
    }
    throw ArgumentError(detail::str("RotaryEmbedding got tensors of shapes ", q.sizes(), " and ",
                                    k.sizes(), ". Give [batch, heads, length, ", options.dim,
                                    "] with one batch and length."));
  }
  const auto length = q.size(2);
  Rotation rotation{tables_->on(q.device(), options), positions};
  if (!positions.defined() && length > options.max_positions) {
    throw ArgumentError(detail::str("RotaryEmbedding got a sequence of ", length,
                                    " tokens, but max_positions is ", options.max_positions,
                                    ". Give it a larger max_positions."));
  }
  if (positions.defined()) {
    // Kernels read them, and operators would copy them once per tensor.
    rotation.positions = positions.to(q.device());
    if (positions.dim() == 1) rotation.positions = rotation.positions.unsqueeze(0);
    const auto& two = rotation.positions;
    if (two.scalar_type() != at::kLong || two.dim() != 2 || two.size(1) != length ||
        (two.size(0) != 1 && two.size(0) != q.size(0))) {
      throw ArgumentError(detail::str("RotaryEmbedding got positions of shape ", positions.sizes(),
                                      " and dtype ", positions.scalar_type(),
                                      ". Give int64 positions of shape [", length, "] or [",
                                      q.size(0), ", ", length, "]."));
    }
  }
  return {rotate(q, rotation), rotate(k, rotation)};
}

// -- attention
// -------------------------------------------------------------------------------------

CausalSelfAttentionImpl::CausalSelfAttentionImpl(const CausalSelfAttentionOptions& options_)
    : options(options_) {
  check_attention(options);
  CausalSelfAttentionImpl::reset();
}

CausalSelfAttentionImpl::~CausalSelfAttentionImpl() = default;

void CausalSelfAttentionImpl::reset() {
  const auto width = options.embed_dim / options.num_heads;
  const auto rows =
      options.embed_dim + 2 * width * options.num_kv_heads.value_or(options.num_heads);
  in_proj_weight = register_parameter("in_proj_weight", at::empty({rows, options.embed_dim}));
  in_proj_bias = register_parameter("in_proj_bias", options.bias ? at::empty({rows}) : at::Tensor(),
                                    /*requires_grad=*/options.bias);
  out_proj = register_module(
      "out_proj",
      Linear(torch::nn::LinearOptions(options.embed_dim, options.embed_dim).bias(options.bias)));
  if (options.rotary_base) {
    rotary = register_module(
        "rotary",
        RotaryEmbedding(RotaryEmbeddingOptions{
            .dim = width, .max_positions = options.max_positions, .base = *options.rotary_base}));
  }
  torch::nn::init::xavier_uniform_(in_proj_weight);
  if (options.bias) {
    torch::nn::init::zeros_(in_proj_bias);
    torch::nn::init::zeros_(out_proj->bias);
  }
}

void CausalSelfAttentionImpl::pretty_print(std::ostream& stream) const {
  stream << "accelerate::nn::CausalSelfAttention(embed_dim=" << options.embed_dim
         << ", num_heads=" << options.num_heads << ")";
}

at::Tensor CausalSelfAttentionImpl::forward(const at::Tensor& x, const at::Tensor& positions) {
  if (x.dim() != 3 || x.size(2) != options.embed_dim) {
    throw ArgumentError(detail::str("CausalSelfAttention got a tensor of shape ", x.sizes(),
                                    ". Give [batch, length, ", options.embed_dim, "]."));
  }
  const auto width = options.embed_dim / options.num_heads;
  const auto shared = options.num_kv_heads.value_or(options.num_heads) * width;
  const auto parts =
      at::linear(x, in_proj_weight, in_proj_bias).split({options.embed_dim, shared, shared}, -1);
  const auto by_head = [&](const at::Tensor& part) {  // [batch, heads, length, width]
    return part.unflatten(-1, {-1, width}).transpose(1, 2);
  };
  auto q = by_head(parts[0]), k = by_head(parts[1]);
  if (rotary) std::tie(q, k) = rotary(q, k, positions);
  const auto y = at::scaled_dot_product_attention(
      q, k, by_head(parts[2]), /*attn_mask=*/{}, is_training() ? options.dropout : 0.0,
      /*is_causal=*/true, /*scale=*/std::nullopt,
      /*enable_gqa=*/options.num_kv_heads.value_or(options.num_heads) != options.num_heads);
  return out_proj(y.transpose(1, 2).flatten(2));
}

}  // namespace accelerate::nn
