#include "model_parallel/attention_calls.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

#include <torch/nn/modules/activation.h>

#include <cmath>
#include <utility>

#include "accelerate/errors.h"
#include "accelerate/state.h"
#include "accelerate/state/device_mesh.h"
#include "core/log.h"
#include "core/text.h"

namespace accelerate::detail::model_parallel {
namespace {

using state::AttentionCall;

/// Whether a mask hides nothing, what lies behind each position, or anything else.
enum class MaskKind : std::uint8_t { kNone, kCausal, kOther };

MaskKind kind_of(const at::Tensor& mask, std::int64_t queries, std::int64_t keys) {
  const auto shown = mask.scalar_type() == at::kBool ? mask : mask.eq(0);
  if (shown.all().item<bool>()) return MaskKind::kNone;
  if (mask.dim() < 2 || mask.size(-2) != queries || mask.size(-1) != keys || queries != keys) {
    return MaskKind::kOther;
  }
  const auto causal = at::ones({queries, keys}, shown.options()).tril();
  if (!shown.eq(causal).all().item<bool>()) return MaskKind::kOther;
  // What is added to scores hides them only if it is large.
  const bool hides =
      mask.scalar_type() == at::kBool || mask.masked_fill(causal, -1e4).le(-1e4).all().item<bool>();
  return hides ? MaskKind::kCausal : MaskKind::kOther;
}

void check_shapes(const AttentionCall& call, std::string_view what) {
  const auto refuse = [&](std::string_view why) {
    throw ArgumentError(detail::str(what, ": query ", call.query.sizes(), ", key ",
                                    call.key.sizes(), ", value ", call.value.sizes(), ": ", why));
  };
  if (call.query.dim() != 4 || call.key.dim() != 4 || call.value.dim() != 4) {
    refuse("all must have four dimensions: batch, heads, length, width.");
  }
  const auto heads = call.query.size(1);
  const auto key_heads = call.key.size(1);
  const bool fit = call.query.size(0) == call.key.size(0) &&
                   call.key.size(0) == call.value.size(0) &&
                   call.query.size(3) == call.key.size(3) &&
                   call.key.size(2) == call.value.size(2) && key_heads == call.value.size(1);
  if (!fit)
    refuse("batch, heads and length of key and value must agree, and width of query and key.");
  if (heads != key_heads && (!call.enable_gqa || key_heads == 0 || heads % key_heads != 0)) {
    refuse("heads differ. Set enable_gqa if the heads of keys divide those of queries.");
  }
  if (call.is_causal && call.query.size(2) != call.key.size(2)) {
    refuse("is_causal needs as many queries as keys on each process.");
  }
  if (!at::isFloatingType(call.query.scalar_type())) refuse("all must be of floating point.");
}

}  // namespace

GroupHandle group_or_mesh(const GroupHandle& group, std::string_view dimension,
                          std::string_view what) {
  if (group) return group;
  const auto mesh = AcceleratorState::initialized() ? AcceleratorState().device_mesh() : nullptr;
  if (mesh && mesh->has(dimension)) return mesh->get_group(dimension);
  throw StateError(detail::str(what, ": there is no group: this run has no dimension ", dimension,
                               ". Set ", dimension,
                               "_size of the parallelism_config, or give a group."));
}

AttentionCall checked(AttentionCall call, std::string_view what) {
  if (call.mask && call.mask->defined()) {
    const auto kind = kind_of(*call.mask, call.query.size(-2), call.key.size(-2));
    if (kind == MaskKind::kOther || (kind == MaskKind::kCausal && call.is_causal)) {
      throw ArgumentError(detail::str(
          what, ": attn_mask ", call.mask->sizes(),
          " is neither empty nor causal for the part of this process, but no other mask can be cut "
          "over processes. Pass none and set is_causal, and leave padding out of the loss (label "
          "-100)."));
    }
    call.is_causal = call.is_causal || kind == MaskKind::kCausal;
    call.mask.reset();
  }
  check_shapes(call, what);
  const auto device = call.query.device().type();
  if (at::autocast::is_autocast_enabled(device)) {
    const auto type = at::autocast::get_autocast_dtype(device);
    for (auto* tensor : {&call.query, &call.key, &call.value}) {
      *tensor = at::autocast::cached_cast(type, *tensor, device);
    }
  }
  if (call.key.scalar_type() != call.query.scalar_type() ||
      call.value.scalar_type() != call.query.scalar_type()) {
    throw ArgumentError(detail::str(what, ": query is ", call.query.scalar_type(), ", key ",
                                    call.key.scalar_type(), " and value ", call.value.scalar_type(),
                                    ". They must have one type."));
  }
  return call;
}

void refuse_own_attention(const torch::nn::Module& module) {
  for (const auto& entry : module.named_modules()) {
    if (entry.value()->as<torch::nn::MultiheadAttentionImpl>() == nullptr) continue;
    throw UnsupportedError(detail::str(
        "prepare: ", entry.key().empty() ? "the model" : entry.key(),
        " is a torch::nn::MultiheadAttention, which does not compute attention by "
        "at::scaled_dot_product_attention: with cp_size or sp_size above 1 it would see the part "
        "of this process only. Call that function in a module of your own."));
  }
}

void warn_without_attention(const state::AttentionRuleScope& scope, std::string_view name) {
  if (scope.calls() > 0 || !at::GradMode::is_enabled()) return;
  warn_once(detail::str(
      name,
      " is above 1, but the model has not called at::scaled_dot_product_attention. If it "
      "computes attention by other operators, each process has seen its part of the sequence "
      "only, and what it learns is wrong. Call that function in the model."));
}

double scale_of(const AttentionCall& call) {
  return call.scale.value_or(1.0 / std::sqrt(static_cast<double>(call.query.size(-1))));
}

}  // namespace accelerate::detail::model_parallel
