// src/comm/sharded.h - how other areas learn that a parameter is spread over processes.
#pragma once

#include "accelerate/api.h"
#include "accelerate/fwd.h"

namespace accelerate::detail::comm {

/// Says whether this process holds only a part of the tensor.
using ShardTest = bool (*)(const at::Tensor& parameter);

/// What shards parameters installs its test when it starts; nullptr means nothing is sharded.
/// Returns the one before.
ACCELERATE_API ShardTest set_shard_test(ShardTest test) noexcept;

[[nodiscard]] bool is_sharded(const at::Tensor& parameter);

}  // namespace accelerate::detail::comm
