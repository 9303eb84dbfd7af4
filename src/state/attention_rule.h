// src/state/attention_rule.h - attention of models that a part of the library computes in its own
// way: over the processes of a group, which each hold a part of the sequence.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "accelerate/api.h"

namespace accelerate::detail::state {

/// The arguments of `at::scaled_dot_product_attention`.
struct AttentionCall {
  at::Tensor query;  // [batch, heads, length, width]
  at::Tensor key;
  at::Tensor value;
  std::optional<at::Tensor> mask = std::nullopt;
  double dropout_p = 0.0;
  bool is_causal = false;
  std::optional<double> scale = std::nullopt;
  bool enable_gqa = false;
};

/// Calls of `at::scaled_dot_product_attention` within it are computed as usual.
using AttentionRule = std::function<at::Tensor(const AttentionCall&)>;
using AttentionRulePtr = std::shared_ptr<const AttentionRule>;

/// That of this thread; null if attention is computed as usual.
[[nodiscard]] ACCELERATE_API AttentionRulePtr attention_rule();

/// Says that this thread has computed attention over the processes of a group.
ACCELERATE_API void note_attention();

/// While it lives, `at::scaled_dot_product_attention` of this thread, also in code of the user,
/// asks `rule`; null: it is computed as usual. Scopes nest.
class ACCELERATE_API AttentionRuleScope {
 public:
  explicit AttentionRuleScope(AttentionRulePtr rule);
  ~AttentionRuleScope();
  /// How often attention was computed over processes since then.
  [[nodiscard]] std::int64_t calls() const;
  AttentionRuleScope(const AttentionRuleScope&) = delete;
  AttentionRuleScope& operator=(const AttentionRuleScope&) = delete;

 private:
  AttentionRulePtr before_;
  std::int64_t calls_before_ = 0;
};

}  // namespace accelerate::detail::state
