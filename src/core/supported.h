// src/core/supported.h - options that are read and validated, but that this library cannot grant.
//
// Options take every value that Python Accelerate knows, so that its files and variables can be
// read. Call `require_supported` before use. Each throws `UnsupportedError` that names the feature,
// the reason and the nearest alternative.
#pragma once

#include "accelerate/enums.h"
#include "accelerate/kwargs.h"
#include "accelerate/parallelism_config.h"

namespace accelerate::detail::inline core {

void require_supported(DistributedType type);
void require_supported(ComputeEnvironment environment);
void require_supported(FP8BackendType backend);
void require_supported(DynamoBackend backend);
void require_supported(ProfilerActivity activity);

// Of resolved options.
void require_supported(const KwargsHandler& handler);
void require_supported(const TorchDynamoPlugin& plugin);
void require_supported(const DeepSpeedPlugin& plugin);
void require_supported(const MegatronLMPlugin& plugin);
void require_supported(const ParallelismConfig& config);

}  // namespace accelerate::detail::inline core
