#include "core/supported.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "accelerate/errors.h"
#include "core/deepspeed_settings.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

[[noreturn]] void refuse(std::string_view feature, std::string_view reason,
                         std::string_view alternative) {
  throw UnsupportedError(str(feature, " is not supported: ", reason, " ", alternative));
}

constexpr std::string_view kNoBackEnd = "LibTorch for C++ has no back end for this device.";

using enum DistributedType;
constexpr std::array kRefusedTypes{kXla,       kMultiNpu, kMultiMlu,   kMultiSdaa,
                                   kMultiMusa, kMultiHpu, kMultiNeuron};
constexpr std::array kDynamoBackends{DynamoBackend::kNo, DynamoBackend::kEager,
                                     DynamoBackend::kCudagraphs, DynamoBackend::kInductor};

}  // namespace

void require_supported(DistributedType type) {
  if (std::ranges::find(kRefusedTypes, type) == kRefusedTypes.end()) return;
  refuse(str("distributed_type ", type), kNoBackEnd, "Use MULTI_GPU or MULTI_CPU.");
}

void require_supported(ComputeEnvironment environment) {
  if (environment != ComputeEnvironment::kAmazonSagemaker) return;
  refuse("compute_environment AMAZON_SAGEMAKER",
         "jobs are submitted by SageMaker's Python package.",
         "Start `accelerate launch` with LOCAL_MACHINE inside of the job.");
}

void require_supported(FP8BackendType backend) {
  if (backend == FP8BackendType::kMsamp) {
    refuse("The FP8 backend MSAMP", "MS-AMP is a Python package that is no longer maintained.",
           "Use AO (AORecipeKwargs).");
  }
}

void require_supported(DynamoBackend backend) {
  if (std::ranges::find(kDynamoBackends, backend) != kDynamoBackends.end()) return;
  refuse(str("The dynamo backend ", backend), "it compiles Python code.",
         "Use one of: NO, EAGER, CUDAGRAPHS, INDUCTOR.");
}

void require_supported(ProfilerActivity activity) {
  if (activity == ProfilerActivity::kMtia || activity == ProfilerActivity::kHpu) {
    refuse(str("The profiler activity '", activity, "'"), kNoBackEnd,
           "Use one of: cpu, cuda, xpu.");
  }
}

void require_supported(const KwargsHandler& handler) {
  if (std::holds_alternative<MSAMPRecipeKwargs>(handler)) require_supported(FP8BackendType::kMsamp);
  if (const auto* recipe = std::get_if<FP8RecipeKwargs>(&handler)) {
    require_supported(*resolved(*recipe).backend);
  }
  if (const auto* profile = std::get_if<ProfileKwargs>(&handler); profile && profile->activities) {
    for (const auto activity : *profile->activities) require_supported(activity);
  }
}

void require_supported(const TorchDynamoPlugin& plugin) {
  if (!plugin.disable) require_supported(plugin.backend.value_or(DynamoBackend::kNo));
}

void require_supported(const DeepSpeedPlugin& plugin) {
  if (plugin.enable_msamp.value_or(false)) require_supported(FP8BackendType::kMsamp);
  check_deepspeed_keys(plugin.deepspeed_config());
}

void require_supported(const MegatronLMPlugin& plugin) {
  const auto experts = [](std::string_view name, std::optional<std::int64_t> size) {
    if (size.value_or(1) > 1) {
      refuse(str(name, " = ", *size), "there is no expert parallelism.", "Set it to 1.");
    }
  };
  experts("expert_model_parallel_size", plugin.expert_model_parallel_size);
  experts("expert_tensor_parallel_size", plugin.expert_tensor_parallel_size);
  if (plugin.pipeline_model_parallel_split_rank) {
    refuse("pipeline_model_parallel_split_rank",
           "a pipeline is not divided into encoder and decoder.", "Leave it unset.");
  }
  if (plugin.megatron_dataset_flag || plugin.custom_megatron_datasets_provider_function) {
    refuse("megatron_dataset_flag", "Megatron's indexed datasets are read by Python code.",
           "Give a data loader to prepare.");
  }
  if (plugin.other_megatron_args && !plugin.other_megatron_args->empty()) {
    std::vector<std::string> keys;
    for (const auto& key : plugin.other_megatron_args->keys()) keys.push_back(key.to_string());
    refuse(str("other_megatron_args with ", join(keys)), "Megatron-LM itself is not used here.",
           "Use the fields of MegatronLMPlugin.");
  }
}

void require_supported(const ParallelismConfig& config) {
  if (!config.sp_enabled() || !config.sp_handler) return;
  const auto name = config.sp_handler->sp_attn_implementation.value_or("sdpa");
  if (name == "sdpa" || name == "flash_attention_2") return;
  refuse(str("sp_attn_implementation '", name, "'"), "LibTorch does not bring this kernel.",
         "Use sdpa or flash_attention_2.");
}

}  // namespace accelerate::detail::inline core
