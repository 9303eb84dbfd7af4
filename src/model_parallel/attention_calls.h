// src/model_parallel/attention_calls.h - what attention over several processes accepts, and the
// group that it runs in.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "accelerate/fwd.h"
#include "model_parallel/sequence_messages.h"
#include "state/attention_rule.h"

namespace accelerate::detail::model_parallel {

/// `group`, or that of a dimension of the run's mesh. `what` is the function that needs it. Throws
/// `StateError` if there is neither.
[[nodiscard]] GroupHandle group_or_mesh(const GroupHandle& group, std::string_view dimension,
                                        std::string_view what);

/// The call with a causal mask replaced by `is_causal`, and cast as autocast asks. Throws
/// `ArgumentError` for any other mask, since each process would need another part of it, and for
/// shapes that `at::scaled_dot_product_attention` does not take. `what` stands in messages.
[[nodiscard]] state::AttentionCall checked(state::AttentionCall call, std::string_view what);

/// Throws `UnsupportedError` that names a torch::nn::MultiheadAttention in the module: it computes
/// attention from operators that do not tell that they do, over the part of this process alone.
void refuse_own_attention(const torch::nn::Module& module);

/// Warns once if a forward that recorded gradients within `scope` has computed no attention over
/// processes. `name` is the size that asks for it.
void warn_without_attention(const state::AttentionRuleScope& scope, std::string_view name);

/// 1 / sqrt(width) if the call has no other.
[[nodiscard]] double scale_of(const state::AttentionCall& call);

}  // namespace accelerate::detail::model_parallel
