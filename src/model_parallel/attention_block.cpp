#include "model_parallel/attention_block.h"

#include <ATen/ATen.h>

#include <cstdint>
#include <limits>

namespace accelerate::detail::model_parallel {
namespace {

enum class Kernel : std::uint8_t { kFlashOnCpu, kFlashOnGpu, kProducts };

Kernel kernel_for(const at::Tensor& query, const at::Tensor& value) {
  const auto width = query.size(-1);
  if (value.size(-1) != width) return Kernel::kProducts;
  if (query.is_cpu()) return Kernel::kFlashOnCpu;
  const bool half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  if (query.is_cuda() && half && width % 8 == 0 && width <= 256) return Kernel::kFlashOnGpu;
  return Kernel::kProducts;
}

/// As many heads as queries have: kernels differ in what they do with fewer.
at::Tensor for_all_heads(const at::Tensor& tensor, const at::Tensor& query) {
  const auto times = query.size(1) / tensor.size(1);
  return times == 1 ? tensor : tensor.repeat_interleave(times, 1);
}

/// Gradients of repeated heads, added up for the `heads` there are.
at::Tensor for_own_heads(const at::Tensor& gradient, std::int64_t heads) {
  if (gradient.size(1) == heads) return gradient;
  return gradient.unflatten(1, {heads, -1}).sum(2);
}

/// Kernels take any strides but that of the last dimension.
at::Tensor dense_rows(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

// ---- by matrix products -------------------------------------------------------------------------

at::Tensor scores_of(const at::Tensor& query, const at::Tensor& key, bool causal, double scale) {
  const auto type = accumulation_type(query);
  auto scores = at::matmul(query.to(type) * scale, key.to(type).transpose(-2, -1));
  if (!causal) return scores;
  const auto later = at::ones({scores.size(-2), scores.size(-1)}, scores.options().dtype(at::kBool))
                         .triu(/*diagonal=*/1);
  return scores.masked_fill_(later, -std::numeric_limits<double>::infinity());
}

PartialAttention attend_by_products(const at::Tensor& query, const at::Tensor& key,
                                    const at::Tensor& value, bool causal, double scale) {
  const auto scores = scores_of(query, key, causal, scale);
  auto log_sum = scores.logsumexp(-1);
  const auto weights = (scores - log_sum.unsqueeze(-1)).exp();
  return {at::matmul(weights, value.to(weights.scalar_type())), std::move(log_sum)};
}

AttentionGradients gradients_by_products(const at::Tensor& gradient, const PartialAttention& all,
                                         const at::Tensor& query, const at::Tensor& key,
                                         const at::Tensor& value, bool causal, double scale) {
  const auto type = accumulation_type(query);
  const auto weights =
      (scores_of(query, key, causal, scale) - all.log_sum.unsqueeze(-1)).exp();  // [.., q, k]
  const auto from = gradient.to(type);
  const auto of_weights = at::matmul(from, value.to(type).transpose(-2, -1));
  const auto mean = (from * all.out.to(type)).sum(-1, /*keepdim=*/true);
  const auto of_scores = weights * (of_weights - mean) * scale;
  return {.query = at::matmul(of_scores, key.to(type)),
          .key = at::matmul(of_scores.transpose(-2, -1), query.to(type)),
          .value = at::matmul(weights.transpose(-2, -1), from)};
}

// ---- by fused kernels ---------------------------------------------------------------------------

AttentionGradients gradients_on_gpu(const at::Tensor& gradient, const PartialAttention& all,
                                    const at::Tensor& query, const at::Tensor& key,
                                    const at::Tensor& value, bool causal, double scale) {
  // Without dropout neither is read.
  const auto no_random = at::zeros({2}, query.options().dtype(at::kLong));
  auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_backward(
      gradient, query, key, value, all.out, all.log_sum, /*cum_seq_q=*/{}, /*cum_seq_k=*/{},
      query.size(2), key.size(2), /*dropout_p=*/0.0, causal, no_random, no_random, scale);
  return {of_query, of_key, of_value};
}

}  // namespace

at::ScalarType accumulation_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

PartialAttention attend_block(const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, bool causal, double scale) {
  const auto keys = for_all_heads(key, query);
  const auto values = for_all_heads(value, query);
  switch (kernel_for(query, value)) {
    case Kernel::kFlashOnCpu: {
      auto [out, log_sum] = at::_scaled_dot_product_flash_attention_for_cpu(
          dense_rows(query), dense_rows(keys), dense_rows(values), /*dropout_p=*/0.0, causal,
          /*attn_mask=*/{}, scale);
      return {std::move(out), std::move(log_sum)};
    }
    case Kernel::kFlashOnGpu: {
      auto result = at::_scaled_dot_product_flash_attention(
          dense_rows(query), dense_rows(keys), dense_rows(values), /*dropout_p=*/0.0, causal,
          /*return_debug_mask=*/false, scale);
      return {std::get<0>(result), std::get<1>(result)};
    }
    case Kernel::kProducts:
      break;
  }
  return attend_by_products(query, keys, values, causal, scale);
}

void merge(const PartialAttention& all, const PartialAttention& block) {
  // Of one sigmoid, so that nothing overflows: exp(b) / (exp(a) + exp(b)) = sigmoid(b - a).
  const auto log_sum = block.log_sum.to(all.log_sum.scalar_type());
  const auto share = at::sigmoid(log_sum - all.log_sum).unsqueeze(-1);
  all.out.sub_(share * (all.out - block.out));
  all.log_sum.sub_(at::log_sigmoid(all.log_sum - log_sum));
}

AttentionGradients block_gradients(const at::Tensor& gradient, const PartialAttention& all,
                                   const at::Tensor& query, const at::Tensor& key,
                                   const at::Tensor& value, bool causal, double scale) {
  const auto keys = for_all_heads(key, query);
  const auto values = for_all_heads(value, query);
  AttentionGradients result;
  switch (kernel_for(query, value)) {
    case Kernel::kFlashOnCpu:
      std::tie(result.query, result.key, result.value) =
          at::_scaled_dot_product_flash_attention_for_cpu_backward(
              gradient, dense_rows(query), dense_rows(keys), dense_rows(values), all.out,
              all.log_sum, /*dropout_p=*/0.0, causal, /*attn_mask=*/{}, scale);
      break;
    case Kernel::kFlashOnGpu:
      result = gradients_on_gpu(gradient, all, dense_rows(query), dense_rows(keys),
                                dense_rows(values), causal, scale);
      break;
    case Kernel::kProducts:
      result = gradients_by_products(gradient, all, query, keys, values, causal, scale);
      break;
  }
  result.key = for_own_heads(result.key, key.size(1));
  result.value = for_own_heads(result.value, key.size(1));
  return result;
}

}  // namespace accelerate::detail::model_parallel
