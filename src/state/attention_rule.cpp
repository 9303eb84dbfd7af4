#include "state/attention_rule.h"

#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <mutex>
#include <utility>

namespace accelerate::detail::state {
namespace {

// A mode of threads, above autograd and autocast, that LibTorch itself does not use: operators
// without a kernel for it pass it at no cost.
constexpr auto kAttentionKey = c10::DispatchKey::DeferredInit;

thread_local AttentionRulePtr rule_here = nullptr;
thread_local std::int64_t calls_here = 0;

at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const std::optional<at::Tensor>& mask, double dropout_p, bool is_causal,
                  std::optional<double> scale, bool enable_gqa) {
  const c10::impl::ExcludeDispatchKeyGuard as_usual(kAttentionKey);
  // Threads of autograd have the key of the thread that called backward, but not its rule.
  if (const auto rule = rule_here) {
    return (*rule)({query, key, value, mask, dropout_p, is_causal, scale, enable_gqa});
  }
  return at::scaled_dot_product_attention(query, key, value, mask, dropout_p, is_causal, scale,
                                          enable_gqa);
}

/// Never taken back: threads may have the key when the program ends.
void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    using torch::Library;
    auto* others = new Library(Library::IMPL, "_", kAttentionKey, __FILE__, __LINE__);
    others->fallback(torch::CppFunction::makeFallthrough());
    auto* attention = new Library(Library::IMPL, "aten", kAttentionKey, __FILE__, __LINE__);
    attention->impl("scaled_dot_product_attention", &attend);
  });
}

AttentionRulePtr exchange(AttentionRulePtr rule) {
  c10::impl::tls_set_dispatch_key_included(kAttentionKey, rule != nullptr);
  return std::exchange(rule_here, std::move(rule));
}

}  // namespace

AttentionRulePtr attention_rule() { return rule_here; }

void note_attention() { ++calls_here; }

AttentionRuleScope::AttentionRuleScope(AttentionRulePtr rule) : calls_before_(calls_here) {
  if (rule) install();
  before_ = exchange(std::move(rule));
}

std::int64_t AttentionRuleScope::calls() const { return calls_here - calls_before_; }

AttentionRuleScope::~AttentionRuleScope() { exchange(std::move(before_)); }

}  // namespace accelerate::detail::state
