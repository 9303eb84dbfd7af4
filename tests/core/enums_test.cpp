#include "accelerate/enums.h"

#include <gtest/gtest.h>

#include <sstream>

#include "accelerate/constants.h"
#include "records_support.h"

namespace accelerate {
namespace {

using testing::Json;
using testing::message_of;
using testing::reference;

/// MULTI_GPU becomes kMultiGpu in the source; here only the texts can be compared.
std::vector<std::string> python_texts(const std::string& type) {
  std::vector<std::string> texts;
  for (const auto& [member, text] : reference().at("enumerations").at(type).items()) {
    texts.push_back(text.get<std::string>());
  }
  return texts;
}

TEST(Enums, HavePythonsTextsInPythonsOrder) {
  EXPECT_EQ(list<DistributedType>(), python_texts("DistributedType"));
  EXPECT_EQ(list<SageMakerDistributedType>(), python_texts("SageMakerDistributedType"));
  EXPECT_EQ(list<ComputeEnvironment>(), python_texts("ComputeEnvironment"));
  EXPECT_EQ(list<FP8BackendType>(), python_texts("FP8BackendType"));
  EXPECT_EQ(list<LoggerType>(), python_texts("LoggerType"));
  EXPECT_EQ(list<PrecisionType>(), python_texts("PrecisionType"));
  EXPECT_EQ(list<RNGType>(), python_texts("RNGType"));
  EXPECT_EQ(list<CustomDtype>(), python_texts("CustomDtype"));
  EXPECT_EQ(list<DDPCommunicationHookType>(), python_texts("DDPCommunicationHookType"));
  EXPECT_EQ(list<FP8Format>(), python_texts("FP8Format"));
  EXPECT_EQ(list<AmaxComputeAlgorithm>(), python_texts("AmaxComputeAlgorithm"));
  EXPECT_EQ(list<OptLevel>(), python_texts("OptLevel"));
  EXPECT_EQ(list<ProfilerActivity>(), python_texts("ProfilerActivity"));
}

TEST(Enums, DynamoBackendHasTheNewerNeuronBehindPythonsTexts) {
  auto expected = python_texts("DynamoBackend");
  expected.emplace_back("NEURON");
  EXPECT_EQ(list<DynamoBackend>(), expected);
}

template <class E>
void expect_round_trip(std::size_t count) {
  const auto texts = list<E>();
  ASSERT_EQ(texts.size(), count);
  for (std::size_t i = 0; i < count; ++i) {
    EXPECT_EQ(from_string<E>(texts[i]), static_cast<E>(i));
    EXPECT_EQ(to_string(static_cast<E>(i)), texts[i]);
    EXPECT_TRUE(contains<E>(texts[i]));
  }
}

TEST(Enums, EveryTextNamesTheEnumeratorItCameFrom) {
  expect_round_trip<DistributedType>(static_cast<std::size_t>(DistributedType::kMultiNeuron) + 1);
  expect_round_trip<DynamoBackend>(static_cast<std::size_t>(DynamoBackend::kNeuron) + 1);
  expect_round_trip<LoggerType>(static_cast<std::size_t>(LoggerType::kSwanlab) + 1);
  expect_round_trip<PrecisionType>(static_cast<std::size_t>(PrecisionType::kBf16) + 1);
  expect_round_trip<RNGType>(static_cast<std::size_t>(RNGType::kGenerator) + 1);
  expect_round_trip<Reduction>(static_cast<std::size_t>(Reduction::kNone) + 1);
  expect_round_trip<FloatType>(static_cast<std::size_t>(FloatType::kBf16) + 1);
  expect_round_trip<ShardingStrategy>(
      static_cast<std::size_t>(ShardingStrategy::kHybridShardZero2) + 1);
  expect_round_trip<AutoWrapPolicy>(static_cast<std::size_t>(AutoWrapPolicy::kNoWrap) + 1);
  expect_round_trip<BackwardPrefetch>(static_cast<std::size_t>(BackwardPrefetch::kNoPrefetch) + 1);
  expect_round_trip<StateDictType>(static_cast<std::size_t>(StateDictType::kShardedStateDict) + 1);
}

TEST(Enums, AWrongTextListsTheChoicesAndSuggestsTheNearest) {
  EXPECT_EQ(message_of([] { static_cast<void>(from_string<PrecisionType>("fp166")); }),
            "'fp166' is not a valid PrecisionType. Choose one of: no, fp8, fp16, bf16. "
            "Did you mean 'fp16'?");
  EXPECT_EQ(message_of([] { static_cast<void>(from_string<Reduction>("average")); }),
            "'average' is not a valid Reduction. Choose one of: mean, sum, max, none.");
}

TEST(Enums, AWrongTextNamesTheVariableItCameFrom) {
  const auto parse = [] {
    static_cast<void>(from_string<PrecisionType>("BF16", "ACCELERATE_MIXED_PRECISION"));
  };
  EXPECT_EQ(message_of(parse),
            "ACCELERATE_MIXED_PRECISION is 'BF16', which is not a valid PrecisionType. Choose one "
            "of: no, fp8, fp16, bf16. Did you mean 'bf16'?");
}

TEST(Enums, MostTextsAreExactButBackendsAreReadInAnyCase) {
  EXPECT_FALSE(contains<PrecisionType>("BF16"));
  EXPECT_FALSE(contains<PrecisionType>(""));
  EXPECT_EQ(from_string<FP8BackendType>("te"), FP8BackendType::kTe);
  EXPECT_EQ(from_string<DynamoBackend>("aot_Eager"), DynamoBackend::kAotEager);
  EXPECT_EQ(from_string<FP8Format>("hybrid"), FP8Format::kHybrid);
}

TEST(Enums, TheOldTpuReadsAsXla) {
  EXPECT_EQ(from_string<DistributedType>("TPU"), DistributedType::kXla);
  EXPECT_FALSE(contains<RNGType>("TPU"));
}

TEST(Enums, ShardingChoicesAreReadAsNumbersFromOne) {
  EXPECT_EQ(from_string<ShardingStrategy>("1"), ShardingStrategy::kFullShard);
  EXPECT_EQ(from_string<ShardingStrategy>("5"), ShardingStrategy::kHybridShardZero2);
  EXPECT_EQ(from_string<StateDictType>("3"), StateDictType::kShardedStateDict);
  EXPECT_FALSE(contains<ShardingStrategy>("0"));
  EXPECT_FALSE(contains<ShardingStrategy>("6"));
  EXPECT_FALSE(contains<ShardingStrategy>("1x"));
  EXPECT_FALSE(contains<AutoWrapPolicy>("1"));
}

TEST(Enums, AreWrittenToStreamsAsTheirTexts) {
  std::ostringstream out;
  out << DistributedType::kMultiGpu << " " << RNGType::kGenerator;
  EXPECT_EQ(out.str(), "MULTI_GPU generator");
}

Json list_of(const auto& texts) {
  return Json(std::vector<std::string>(texts.begin(), texts.end()));
}

TEST(Constants, AreThoseOfPython) {
  Json ours;
  ours["SCALER_NAME"] = kScalerName;
  ours["MODEL_NAME"] = kModelName;
  ours["SAFE_MODEL_NAME"] = kSafeModelName;
  ours["RNG_STATE_NAME"] = kRngStateName;
  ours["OPTIMIZER_NAME"] = kOptimizerName;
  ours["SCHEDULER_NAME"] = kSchedulerName;
  ours["SAMPLER_NAME"] = kSamplerName;
  ours["PROFILE_PATTERN_NAME"] = kProfilePatternName;
  ours["WEIGHTS_NAME"] = kWeightsName;
  ours["WEIGHTS_PATTERN_NAME"] = kWeightsPatternName;
  ours["WEIGHTS_INDEX_NAME"] = kWeightsIndexName;
  ours["SAFE_WEIGHTS_NAME"] = kSafeWeightsName;
  ours["SAFE_WEIGHTS_PATTERN_NAME"] = kSafeWeightsPatternName;
  ours["SAFE_WEIGHTS_INDEX_NAME"] = kSafeWeightsIndexName;
  ours["SAGEMAKER_PYTORCH_VERSION"] = kSagemakerPytorchVersion;
  ours["SAGEMAKER_PYTHON_VERSION"] = kSagemakerPythonVersion;
  ours["SAGEMAKER_TRANSFORMERS_VERSION"] = kSagemakerTransformersVersion;
  ours["SAGEMAKER_PARALLEL_EC2_INSTANCES"] = list_of(kSagemakerParallelEc2Instances);
  ours["FSDP_SHARDING_STRATEGY"] = list_of(kFsdpShardingStrategy);
  ours["FSDP_AUTO_WRAP_POLICY"] = list_of(kFsdpAutoWrapPolicy);
  ours["FSDP_BACKWARD_PREFETCH"] = list_of(kFsdpBackwardPrefetch);
  ours["FSDP_STATE_DICT_TYPE"] = list_of(kFsdpStateDictType);
  ours["FSDP2_STATE_DICT_TYPE"] = list_of(kFsdp2StateDictType);
  ours["FSDP_PYTORCH_VERSION"] = kFsdpPytorchVersion;
  ours["FSDP2_PYTORCH_VERSION"] = kFsdp2PytorchVersion;
  ours["DTENSOR_PYTORCH_VERSION"] = kDtensorPytorchVersion;
  ours["FSDP_MODEL_NAME"] = kFsdpModelName;
  ours["DEEPSPEED_MULTINODE_LAUNCHERS"] = list_of(kDeepspeedMultinodeLaunchers);
  ours["TORCH_DYNAMO_MODES"] = list_of(kTorchDynamoModes);
  ours["ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION"] =
      kElasticLogLinePrefixTemplatePytorchVersion;
  ours["XPU_PROFILING_AVAILABLE_PYTORCH_VERSION"] = kXpuProfilingAvailablePytorchVersion;
  ours["MITA_PROFILING_AVAILABLE_PYTORCH_VERSION"] = kMitaProfilingAvailablePytorchVersion;
  ours["BETA_TP_AVAILABLE_PYTORCH_VERSION"] = kBetaTpAvailablePytorchVersion;
  ours["BETA_TP_AVAILABLE_TRANSFORMERS_VERSION"] = kBetaTpAvailableTransformersVersion;
  ours["BETA_CP_AVAILABLE_PYTORCH_VERSION"] = kBetaCpAvailablePytorchVersion;
  ours["BETA_SP_AVAILABLE_DEEPSPEED_VERSION"] = kBetaSpAvailableDeepspeedVersion;
  ours["STR_OPERATION_TO_FUNC"] = list_of(kStrOperationToFunc);
  ours["TORCH_LAUNCH_PARAMS"] = list_of(kTorchLaunchParams);
  ours["CUDA_DISTRIBUTED_TYPES"] = list_of(kCudaDistributedTypes);
  ours["TORCH_DISTRIBUTED_OPERATION_TYPES"] = list_of(kTorchDistributedOperationTypes);
  ours["SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING"] = list_of(kSupportedPytorchLayersForUpcasting);
  EXPECT_EQ(ours, reference().at("constants"));
}

TEST(Constants, OfShardingAreTheTextsOfTheirEnumerations) {
  EXPECT_EQ(list_of(kFsdpShardingStrategy), Json(list<ShardingStrategy>()));
  EXPECT_EQ(list_of(kFsdpAutoWrapPolicy), Json(list<AutoWrapPolicy>()));
  EXPECT_EQ(list_of(kFsdpBackwardPrefetch), Json(list<BackwardPrefetch>()));
  EXPECT_EQ(list_of(kFsdpStateDictType), Json(list<StateDictType>()));
}

}  // namespace
}  // namespace accelerate
