// accelerate/constants.h - file names, lists of choices and version gates shared with Python.
#pragma once

#include <array>
#include <string_view>

namespace accelerate {

// Names of the files of a checkpoint. `{suffix}` is replaced by what tells shards apart.
inline constexpr std::string_view kScalerName = "scaler.pt";
inline constexpr std::string_view kModelName = "pytorch_model";
inline constexpr std::string_view kSafeModelName = "model";
inline constexpr std::string_view kRngStateName = "random_states";
inline constexpr std::string_view kOptimizerName = "optimizer";
inline constexpr std::string_view kSchedulerName = "scheduler";
inline constexpr std::string_view kSamplerName = "sampler";
inline constexpr std::string_view kProfilePatternName = "profile_{suffix}.json";
inline constexpr std::string_view kWeightsName = "pytorch_model.bin";
inline constexpr std::string_view kWeightsPatternName = "pytorch_model{suffix}.bin";
inline constexpr std::string_view kWeightsIndexName = "pytorch_model.bin.index.json";
inline constexpr std::string_view kSafeWeightsName = "model.safetensors";
inline constexpr std::string_view kSafeWeightsPatternName = "model{suffix}.safetensors";
inline constexpr std::string_view kSafeWeightsIndexName = "model.safetensors.index.json";
inline constexpr std::string_view kFsdpModelName = "pytorch_model_fsdp";

// What Amazon SageMaker configurations default to.
inline constexpr std::string_view kSagemakerPytorchVersion = "1.10.2";
inline constexpr std::string_view kSagemakerPythonVersion = "py38";
inline constexpr std::string_view kSagemakerTransformersVersion = "4.17.0";
inline constexpr auto kSagemakerParallelEc2Instances =
    std::to_array<std::string_view>({"ml.p3.16xlarge", "ml.p3dn.24xlarge", "ml.p4dn.24xlarge"});

// Choices of fully sharded data parallelism; as a number, a choice is its place counted from 1.
inline constexpr auto kFsdpShardingStrategy = std::to_array<std::string_view>(
    {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"});
inline constexpr auto kFsdpAutoWrapPolicy =
    std::to_array<std::string_view>({"TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"});
inline constexpr auto kFsdpBackwardPrefetch =
    std::to_array<std::string_view>({"BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"});
inline constexpr auto kFsdpStateDictType =
    std::to_array<std::string_view>({"FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"});
inline constexpr auto kFsdp2StateDictType =
    std::to_array<std::string_view>({"SHARDED_STATE_DICT", "FULL_STATE_DICT"});

inline constexpr auto kDeepspeedMultinodeLaunchers = std::to_array<std::string_view>(
    {"pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm"});
inline constexpr auto kTorchDynamoModes =
    std::to_array<std::string_view>({"default", "reduce-overhead", "max-autotune"});
/// The settings of `accelerate launch` that go to the process launcher.
inline constexpr auto kTorchLaunchParams = std::to_array<std::string_view>({"nnodes",
                                                                            "nproc_per_node",
                                                                            "rdzv_backend",
                                                                            "rdzv_endpoint",
                                                                            "rdzv_id",
                                                                            "rdzv_conf",
                                                                            "standalone",
                                                                            "max_restarts",
                                                                            "monitor_interval",
                                                                            "start_method",
                                                                            "role",
                                                                            "module",
                                                                            "m",
                                                                            "no_python",
                                                                            "run_path",
                                                                            "log_dir",
                                                                            "r",
                                                                            "redirects",
                                                                            "t",
                                                                            "tee",
                                                                            "node_rank",
                                                                            "master_addr",
                                                                            "master_port"});

// The versions from which Python Accelerate offers a feature.
inline constexpr std::string_view kFsdpPytorchVersion = "2.1.0.a0+32f93b1";
inline constexpr std::string_view kFsdp2PytorchVersion = "2.6.0";
inline constexpr std::string_view kDtensorPytorchVersion = "2.5.0";
inline constexpr std::string_view kElasticLogLinePrefixTemplatePytorchVersion = "2.2.0";
inline constexpr std::string_view kXpuProfilingAvailablePytorchVersion = "2.4.0";
inline constexpr std::string_view kMitaProfilingAvailablePytorchVersion = "2.1.0";
inline constexpr std::string_view kBetaTpAvailablePytorchVersion = "2.3.0";
inline constexpr std::string_view kBetaTpAvailableTransformersVersion = "4.52.0";
inline constexpr std::string_view kBetaCpAvailablePytorchVersion = "2.6.0";
inline constexpr std::string_view kBetaSpAvailableDeepspeedVersion = "0.18.2";

/// The comparison signs that `compare_versions` takes.
inline constexpr auto kStrOperationToFunc =
    std::to_array<std::string_view>({">", ">=", "==", "!=", "<=", "<"});

/// `DistributedType` texts of runs on CUDA devices; TP is a word of its own, not a member.
inline constexpr auto kCudaDistributedTypes =
    std::to_array<std::string_view>({"DEEPSPEED", "MULTI_GPU", "FSDP", "MEGATRON_LM", "TP"});
/// `DistributedType` texts of runs whose collectives go through c10d.
inline constexpr auto kTorchDistributedOperationTypes = std::to_array<std::string_view>(
    {"DEEPSPEED", "MULTI_GPU", "FSDP", "MEGATRON_LM", "TP", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA",
     "MULTI_MUSA", "MULTI_XPU", "MULTI_CPU", "MULTI_HPU", "MULTI_NEURON"});
/// Layers whose parameters sharding in mixed precision holds in float32.
inline constexpr auto kSupportedPytorchLayersForUpcasting =
    std::to_array<std::string_view>({"Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d",
                                     "ConvTranspose2d", "ConvTranspose3d", "Linear"});

}  // namespace accelerate
