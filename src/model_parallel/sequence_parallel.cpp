#include "model_parallel/sequence_parallel.h"

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>
#include <string>
#include <utility>

#include "accelerate/errors.h"
#include "accelerate/operations/collectives.h"
#include "accelerate/parallel/sequence_parallel.h"
#include "core/call_site.h"
#include "core/log.h"
#include "core/text.h"
#include "model_parallel/attention_calls.h"

namespace accelerate {
namespace detail::model_parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kUlyssesForward = "ulysses attention";
constexpr const char* kUlyssesBackward = "gradients of ulysses attention";
constexpr const char* kWithin = "scaled_dot_product_attention with sp_size";

struct Group final : torch::CustomClassHolder {
  explicit Group(GroupHandle of) : handle(std::move(of)) {}
  GroupHandle handle;
};

/// Row r of the argument goes to rank r. Gradients go the same way back.
struct ExchangeRows : torch::autograd::Function<ExchangeRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows,
                            const GroupHandle& group) {
    context->saved_data["group"] = c10::IValue::make_capsule(c10::make_intrusive<Group>(group));
    return exchange_rows(group, rows.contiguous(), kUlyssesForward);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto group =
        c10::static_intrusive_pointer_cast<Group>(context->saved_data["group"].toCapsule());
    return {exchange_rows(group->handle, gradients[0].contiguous(), kUlyssesBackward),
            at::Tensor()};
  }
};

/// [batch, heads, length, width] as [ranks, ...]: row r has the heads of rank r.
at::Tensor by_heads(const at::Tensor& tensor, std::int64_t ranks) {
  return tensor.unflatten(1, {ranks, -1}).movedim(1, 0).flatten(1);
}

/// The heads of this rank over the whole sequence: [batch, heads / ranks, ranks * length, width].
at::Tensor whole_sequence(const at::Tensor& rows, const at::Tensor& like, std::int64_t ranks) {
  const auto shape =
      rows.view({ranks, like.size(0), like.size(1) / ranks, like.size(2), like.size(3)});
  return shape.movedim(0, 2).flatten(2, 3);
}

/// As many heads as a message can carry one or more of to each rank.
at::Tensor for_ranks(const at::Tensor& tensor, std::int64_t ranks) {
  const auto heads = tensor.size(1);
  return heads % ranks == 0 ? tensor : tensor.repeat_interleave(ranks / heads, 1);
}

void check_heads(const state::AttentionCall& call, std::int64_t ranks, std::string_view what) {
  const auto heads = call.query.size(1);
  const auto key_heads = call.key.size(1);
  if (heads % ranks != 0) {
    throw ArgumentError(detail::str(what, ": there are ", heads, " heads of queries, which ", ranks,
                                    " processes cannot share equally. Choose an sp_size that "
                                    "divides them."));
  }
  if (key_heads % ranks != 0 && ranks % key_heads != 0) {
    throw ArgumentError(detail::str(what, ": there are ", key_heads, " heads of keys for ", ranks,
                                    " processes: one number must divide the other. Choose another "
                                    "sp_size."));
  }
}

at::Tensor attend(state::AttentionCall call, const GroupHandle& group, std::string_view what) {
  state::note_attention();
  static std::atomic_flag said;  // the text need not be made for each call
  if (call.dropout_p > 0 && !said.test_and_set()) {
    warn_once(detail::str(what, ": dropout_p is ", call.dropout_p,
                          ". Each process draws for its own heads, so that the result is not that "
                          "of one process, and processes of one seed drop the same places. Seed "
                          "them differently (set_seed with device_specific) after the model is "
                          "made."));
  }
  call = checked(std::move(call), what);
  const std::int64_t ranks = group->getSize();
  check_heads(call, ranks, what);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto key = for_ranks(call.key, ranks);
  const auto value = for_ranks(call.value, ranks);
  // In one message.
  const auto query_rows = by_heads(call.query, ranks);
  const auto key_rows = by_heads(key, ranks);
  const auto value_rows = by_heads(value, ranks);
  const auto rows =
      ExchangeRows::apply(at::cat({query_rows, key_rows, value_rows}, 1), group)
          .split_with_sizes({query_rows.size(1), key_rows.size(1), value_rows.size(1)}, 1);
  const auto heads_differ = call.query.size(1) != key.size(1);
  const auto out = at::scaled_dot_product_attention(
      whole_sequence(rows[0].contiguous(), call.query, ranks),
      whole_sequence(rows[1].contiguous(), key, ranks),
      whole_sequence(rows[2].contiguous(), value, ranks), /*attn_mask=*/{}, call.dropout_p,
      call.is_causal, call.scale, heads_differ);
  // Back: row r has the part of the sequence of rank r.
  const auto parts =
      out.unflatten(2, {ranks, -1}).movedim(2, 0);  // [ranks, batch, heads, length, ..]
  const auto back = ExchangeRows::apply(parts.flatten(1), group).view(parts.sizes());
  return back.movedim(0, 1).flatten(1, 2);
}

}  // namespace

state::AttentionRulePtr ulysses_rule(const DeepSpeedSequenceParallelConfig& handler,
                                     const GroupHandle& group) {
  std::optional<std::int64_t> part;
  if (!handler.sp_seq_length_is_variable.value_or(true) && handler.sp_seq_length) {
    if (*handler.sp_seq_length % group->getSize() != 0) {
      throw ConfigError(detail::str("sp_seq_length is ", *handler.sp_seq_length, ", which sp_size ",
                                    group->getSize(), " does not divide. Choose a multiple."));
    }
    part = *handler.sp_seq_length / group->getSize();
  }
  return std::make_shared<const state::AttentionRule>([group,
                                                       part](const state::AttentionCall& call) {
    if (part && call.query.size(-2) != *part) {
      throw ArgumentError(detail::str(kWithin, ": this process has ", call.query.size(-2),
                                      " positions, but sp_seq_length ", *part * group->getSize(),
                                      " gives each of ", group->getSize(), " processes ", *part,
                                      ". Pad sequences, or set sp_seq_length_is_variable."));
    }
    return attend(call, group, kWithin);
  });
}

}  // namespace detail::model_parallel

using detail::model_parallel::group_or_mesh;

at::Tensor ulysses_attention(const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value, const UlyssesAttentionOptions& options,
                             std::source_location where) {
  constexpr const char* kName = "ulysses_attention";
  const detail::AtCallSite here(where);
  return detail::model_parallel::attend({.query = query,
                                         .key = key,
                                         .value = value,
                                         .dropout_p = options.dropout_p,
                                         .is_causal = options.is_causal,
                                         .scale = options.scale,
                                         .enable_gqa = options.enable_gqa},
                                        group_or_mesh(options.group, "sp", kName), kName);
}

at::Tensor sp_weighted_loss(const at::Tensor& loss, const at::Tensor& shift_labels,
                            const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                            std::source_location where) {
  constexpr const char* kName = "sp_weighted_loss";
  if (!loss.defined() || loss.numel() != 1) {
    throw ArgumentError(detail::str(kName,
                                    ": the loss must be one number, the mean over the tokens "
                                    "of this process."));
  }
  const auto ranks = group_or_mesh(group, "sp", kName);
  const auto tokens = shift_labels.ne(-100).sum().to(at::kDouble);
  // The mean over no tokens is NaN.
  const auto mean = at::where(tokens > 0, loss.reshape({}), at::zeros({}, loss.options()));
  const auto sums = accelerate::reduce(at::stack({mean.detach().to(at::kDouble) * tokens, tokens}),
                                       ranks, Reduction::kSum, where);
  const auto all_tokens = sums[1].clamp_min(1);
  const auto total = (sums[0] / all_tokens).to(loss.scalar_type());
  const auto weight = (tokens * ranks->getSize() / all_tokens).to(loss.scalar_type());
  return total + (mean - mean.detach()) * weight;
}

}  // namespace accelerate
