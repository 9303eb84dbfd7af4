// src/core/megatron_run.h - what a run makes of a MegatronLMPlugin.
#pragma once

#include "accelerate/kwargs/megatron_plugin.h"
#include "accelerate/parallelism_config.h"

namespace accelerate::detail::inline core {

/// The resolved plugin. What Python turns on though nothing asked for it stays off: context
/// parallelism of size 2 and recomputation. Throws `UnsupportedError` that names the first field
/// which has no equivalent, its value and what to use.
[[nodiscard]] MegatronLMPlugin megatron_for_run(const MegatronLMPlugin& given,
                                                const Environment& environment);

/// The mesh of a run: data parallel copies of a pipeline. Throws `ConfigError` if the processes
/// cannot be divided by pp_degree.
[[nodiscard]] ParallelismConfig megatron_parallelism(const MegatronLMPlugin& plugin,
                                                     std::int64_t num_processes);

}  // namespace accelerate::detail::inline core
