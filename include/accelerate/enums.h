// accelerate/enums.h - the words of configuration files, flags and variables, as enumerations.
//
// Each enumeration has one table of spellings, which are Python Accelerate's:
//
//     to_string(PrecisionType::kBf16)            // "bf16"
//     from_string<PrecisionType>("bf16")         // PrecisionType::kBf16
//     from_string<PrecisionType>("bfloat16")     // ConfigError: lists the choices, suggests one
//     list<PrecisionType>()                      // {"no", "fp8", "fp16", "bf16"}
//     contains<PrecisionType>("fp32")            // false
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/api.h"

namespace accelerate {

// Enumerators are Python's members in CamelCase: MULTI_GPU is kMultiGpu.
// clang-format off

/// How the processes of a run share the work. The old spelling TPU reads as XLA.
enum class DistributedType : std::uint8_t {
  kNo, kMultiCpu, kMultiGpu, kMultiNpu, kMultiMlu, kMultiSdaa, kMultiMusa, kMultiXpu, kDeepspeed,
  kFsdp, kXla, kMegatronLm, kMultiHpu, kMultiNeuron
};
enum class SageMakerDistributedType : std::uint8_t { kNo, kDataParallel, kModelParallel };
enum class ComputeEnvironment : std::uint8_t { kLocalMachine, kAmazonSagemaker };
/// Who computes in 8 bits. Read in any case.
enum class FP8BackendType : std::uint8_t { kNo, kTe, kMsamp, kAo };
/// What compiles a model. Read in any case.
enum class DynamoBackend : std::uint8_t {
  kNo, kEager, kAotEager, kInductor, kAotTsNvfuser, kNvprimsNvfuser, kCudagraphs, kOfi, kFx2trt,
  kOnnxrt, kTensorrt, kAotTorchxlaTraceOnce, kTorchxlaTraceOnce, kTvm, kHpuBackend, kNeuron
};
enum class LoggerType : std::uint8_t {
  kAll, kAim, kTensorboard, kWandb, kTrackio, kCometml, kMlflow, kClearml, kDvclive, kSwanlab
};
enum class PrecisionType : std::uint8_t { kNo, kFp8, kFp16, kBf16 };
enum class RNGType : std::uint8_t {
  kTorch, kCuda, kMlu, kSdaa, kMusa, kNpu, kXla, kXpu, kHpu, kNeuron, kGenerator
};
/// Types for device maps that Torch does not have: 1, 1/2 and 1/4 byte.
enum class CustomDtype : std::uint8_t { kFp8, kInt4, kInt2 };
enum class DDPCommunicationHookType : std::uint8_t { kNo, kFp16, kBf16, kPowerSgd, kBatchedPowerSgd };
/// What `reduce` makes of the values of all processes.
enum class Reduction : std::uint8_t { kMean, kSum, kMax, kNone };
/// The 8-bit formats of a recipe; HYBRID is E4M3 forward and E5M2 for gradients. Read in any case.
enum class FP8Format : std::uint8_t { kHybrid, kE4m3, kE5m2 };
/// Read in any case.
enum class AmaxComputeAlgorithm : std::uint8_t { kMax, kMostRecent };
/// The optimisation levels of MS-AMP.
enum class OptLevel : std::uint8_t { kO1, kO2 };
enum class ProfilerActivity : std::uint8_t { kCpu, kXpu, kMtia, kCuda, kHpu };
/// The floating point types that plugins choose from.
enum class FloatType : std::uint8_t { kFp32, kFp16, kBf16 };

// Fully sharded data parallelism. Read in any case; all but the wrap policy also as a number from 1.
enum class ShardingStrategy : std::uint8_t {
  kFullShard, kShardGradOp, kNoShard, kHybridShard, kHybridShardZero2
};
enum class AutoWrapPolicy : std::uint8_t { kTransformerBasedWrap, kSizeBasedWrap, kNoWrap };
enum class BackwardPrefetch : std::uint8_t { kBackwardPre, kBackwardPost, kNoPrefetch };
enum class StateDictType : std::uint8_t { kFullStateDict, kLocalStateDict, kShardedStateDict };
// clang-format on

namespace detail::inline core {

/// Which texts `from_string` takes.
enum class Spelling : std::uint8_t { kExact, kAnyCase, kAnyCaseOrNumber };

/// The spellings of one enumeration, in the order of its enumerators.
struct ACCELERATE_API EnumTable {
  std::string_view type;
  std::array<std::string_view, 16> texts{};
  std::size_t size = 0;
  Spelling spelling = Spelling::kExact;

  constexpr EnumTable() = default;
  constexpr EnumTable(std::string_view name, std::initializer_list<std::string_view> words,
                      Spelling rule = Spelling::kExact)
      : type(name), size(words.size()), spelling(rule) {
    std::size_t i = 0;
    for (const auto word : words) texts[i++] = word;
  }

  /// The index of `text`, or -1.
  [[nodiscard]] int find(std::string_view text) const;
  /// `find` that throws the error of `from_string` instead of returning -1.
  [[nodiscard]] int parse(std::string_view text, std::string_view source) const;
};

// clang-format off
template <class E> inline constexpr EnumTable kEnumTable{};
template <> inline constexpr EnumTable kEnumTable<DistributedType>{"DistributedType",
    {"NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU",
     "DEEPSPEED", "FSDP", "XLA", "MEGATRON_LM", "MULTI_HPU", "MULTI_NEURON"}};
template <> inline constexpr EnumTable kEnumTable<SageMakerDistributedType>{"SageMakerDistributedType",
    {"NO", "DATA_PARALLEL", "MODEL_PARALLEL"}};
template <> inline constexpr EnumTable kEnumTable<ComputeEnvironment>{"ComputeEnvironment",
    {"LOCAL_MACHINE", "AMAZON_SAGEMAKER"}};
template <> inline constexpr EnumTable kEnumTable<FP8BackendType>{"FP8BackendType",
    {"NO", "TE", "MSAMP", "AO"}, Spelling::kAnyCase};
template <> inline constexpr EnumTable kEnumTable<DynamoBackend>{"DynamoBackend",
    {"NO", "EAGER", "AOT_EAGER", "INDUCTOR", "AOT_TS_NVFUSER", "NVPRIMS_NVFUSER", "CUDAGRAPHS", "OFI",
     "FX2TRT", "ONNXRT", "TENSORRT", "AOT_TORCHXLA_TRACE_ONCE", "TORCHXLA_TRACE_ONCE", "TVM",
     "HPU_BACKEND", "NEURON"}, Spelling::kAnyCase};
template <> inline constexpr EnumTable kEnumTable<LoggerType>{"LoggerType",
    {"all", "aim", "tensorboard", "wandb", "trackio", "comet_ml", "mlflow", "clearml", "dvclive", "swanlab"}};
template <> inline constexpr EnumTable kEnumTable<PrecisionType>{"PrecisionType",
    {"no", "fp8", "fp16", "bf16"}};
template <> inline constexpr EnumTable kEnumTable<RNGType>{"RNGType",
    {"torch", "cuda", "mlu", "sdaa", "musa", "npu", "xla", "xpu", "hpu", "neuron", "generator"}};
template <> inline constexpr EnumTable kEnumTable<CustomDtype>{"CustomDtype", {"fp8", "int4", "int2"}};
template <> inline constexpr EnumTable kEnumTable<DDPCommunicationHookType>{"DDPCommunicationHookType",
    {"no", "fp16", "bf16", "power_sgd", "batched_power_sgd"}};
template <> inline constexpr EnumTable kEnumTable<Reduction>{"Reduction", {"mean", "sum", "max", "none"}};
template <> inline constexpr EnumTable kEnumTable<FP8Format>{"FP8Format",
    {"HYBRID", "E4M3", "E5M2"}, Spelling::kAnyCase};
template <> inline constexpr EnumTable kEnumTable<AmaxComputeAlgorithm>{"AmaxComputeAlgorithm",
    {"max", "most_recent"}, Spelling::kAnyCase};
template <> inline constexpr EnumTable kEnumTable<OptLevel>{"OptLevel", {"O1", "O2"}};
template <> inline constexpr EnumTable kEnumTable<ProfilerActivity>{"ProfilerActivity",
    {"cpu", "xpu", "mtia", "cuda", "hpu"}};
template <> inline constexpr EnumTable kEnumTable<FloatType>{"FloatType", {"fp32", "fp16", "bf16"}};
template <> inline constexpr EnumTable kEnumTable<ShardingStrategy>{"ShardingStrategy",
    {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"},
    Spelling::kAnyCaseOrNumber};
template <> inline constexpr EnumTable kEnumTable<AutoWrapPolicy>{"AutoWrapPolicy",
    {"TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"}, Spelling::kAnyCase};
template <> inline constexpr EnumTable kEnumTable<BackwardPrefetch>{"BackwardPrefetch",
    {"BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"}, Spelling::kAnyCaseOrNumber};
template <> inline constexpr EnumTable kEnumTable<StateDictType>{"StateDictType",
    {"FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"}, Spelling::kAnyCaseOrNumber};
// clang-format on

template <class E>
concept Spelled = kEnumTable<E>.size > 0;

}  // namespace detail::inline core

/// Python's spelling of an enumerator.
template <detail::Spelled E>
[[nodiscard]] std::string to_string(E value) {
  return std::string(detail::kEnumTable<E>.texts[static_cast<std::size_t>(value)]);
}

/// The enumerator that `text` names. `source` says in the message where the text came from, such as
/// a variable or a key. Throws `ConfigError` that lists the choices and suggests the nearest.
template <detail::Spelled E>
[[nodiscard]] E from_string(std::string_view text, std::string_view source = {}) {
  return static_cast<E>(detail::kEnumTable<E>.parse(text, source));
}

/// Whether `from_string` takes this text.
template <detail::Spelled E>
[[nodiscard]] bool contains(std::string_view text) {
  return detail::kEnumTable<E>.find(text) >= 0;
}

/// All spellings, in the order of declaration.
template <detail::Spelled E>
[[nodiscard]] std::vector<std::string> list() {
  const auto& table = detail::kEnumTable<E>;
  return {table.texts.begin(), table.texts.begin() + static_cast<std::ptrdiff_t>(table.size)};
}

template <detail::Spelled E>
std::ostream& operator<<(std::ostream& out, E value) {
  return out << detail::kEnumTable<E>.texts[static_cast<std::size_t>(value)];
}

}  // namespace accelerate
