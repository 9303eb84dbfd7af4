// src/model_parallel/sequence_parallel.h - what prepared models do with attention under `sp_size`.
#pragma once

#include <cstdint>
#include <optional>

#include "accelerate/kwargs/parallelism_handlers.h"
#include "model_parallel/sequence_messages.h"
#include "state/attention_rule.h"

namespace accelerate::detail::model_parallel {

/// Computes attention as `ulysses_attention` does. Throws `ConfigError` for a fixed length of the
/// handler that the group cannot share.
[[nodiscard]] state::AttentionRulePtr ulysses_rule(const DeepSpeedSequenceParallelConfig& handler,
                                                   const GroupHandle& group);

}  // namespace accelerate::detail::model_parallel
