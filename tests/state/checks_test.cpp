#include "accelerate/checks.h"

#include <c10/core/DeviceType.h>
#include <gtest/gtest.h>
#include <torch/version.h>

#include <cstdlib>
#include <string>
#include <thread>

#include "accelerate/errors.h"
#include "accelerate/version.h"
#include "support/fake_gpu.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using test::message_of;

const std::string kTorch =
    std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR);

TEST(IsTorchVersion, ComparesTheLoadedLibrary) {
  EXPECT_TRUE(is_torch_version(">=", "2.11"));
  EXPECT_TRUE(is_torch_version(">=", kTorch + ".0"));
  EXPECT_FALSE(is_torch_version("<", kTorch));
  EXPECT_TRUE(is_torch_version("!=", "1.0"));
}

TEST(CompareVersions, TakesAVersionOrALibrary) {
  EXPECT_TRUE(compare_versions("2.10.0", ">", "2.9.5"));
  EXPECT_FALSE(compare_versions("2.9.1+cu130", "==", "2.9.1"));
  EXPECT_TRUE(compare_versions("1.16.0.dev0", "<", "1.16.0"));
  EXPECT_TRUE(compare_versions("torch", ">=", "2.11.0"));
  EXPECT_TRUE(compare_versions("accelerate", "==", kVersion));
}

TEST(CompareVersions, RefusesAnUnknownOperatorAndListsTheKnownOnes) {
  const auto message = message_of<ArgumentError>([] { (void)is_torch_version("~=", "2.0"); });
  for (const auto* known : {"~=", ">", ">=", "==", "!=", "<=", "<"}) {
    EXPECT_NE(message.find(known), std::string::npos) << message;
  }
}

TEST(CompareVersions, RefusesALibraryItDoesNotKnow) {
  EXPECT_EQ(message_of<UnsupportedError>([] { (void)compare_versions("numpy", ">", "1.0"); }),
            "compare_versions knows no library 'numpy'. Give a version, or one of: torch, "
            "accelerate, cuda, cudnn, nccl.");
}

TEST(CompareVersions, SaysThatACudaLibraryIsNotLoaded) {
  if (is_cuda_available()) GTEST_SKIP() << "it is loaded here";
  EXPECT_EQ(message_of<UnsupportedError>([] { (void)compare_versions("nccl", ">", "2.0"); }),
            "compare_versions: nccl is not loaded in this process.");
}

TEST(Availability, OfPythonsPackagesIsFalse) {
  for (const auto* name : {"transformers", "numpy", "torch_xla", "4bit_bnb", "clearml",
                           "transformer_engine_mxfp8", "msamp"}) {
    EXPECT_FALSE(is_available(name)) << name;
  }
  EXPECT_FALSE(is_tpu_available());
  EXPECT_FALSE(is_ipex_available());
}

TEST(Availability, OfWhatThisBuildContainsIsTrue) {
  for (const auto* name : {"torch_distributed", "tqdm", "weights_only", "bf16", "fp16",
                           "tensorboard", "mlflow", "wandb", "dvclive", "trackio", "fp8", "torchao",
                           "transformer_engine", "deepspeed", "megatron_lm", "pippy"}) {
    EXPECT_TRUE(is_available(name)) << name;
  }
  EXPECT_TRUE(is_bf16_available());
}

TEST(Availability, OfBfloat16TakesAGpuThatComputesIt) {
  {
    const test::FakeGpu turing({.major = 7, .minor = 5});
    EXPECT_FALSE(is_bf16_available());
    EXPECT_FALSE(is_available("bf16"));
  }
  const test::FakeGpu ampere({.major = 8, .minor = 0});
  EXPECT_TRUE(is_bf16_available());
}

TEST(Availability, OfVendorDevicesIsFalseWithoutTheirLibrary) {
  for (const auto* name : {"mlu", "sdaa", "musa", "neuron", "hpu", "npu", "xpu", "mps", "rocm"}) {
    EXPECT_FALSE(is_available(name)) << name;
  }
  EXPECT_FALSE(is_npu_available());
  EXPECT_FALSE(is_xpu_available());
  EXPECT_FALSE(is_mps_available());
}

TEST(Availability, OfAnUnknownNameIsAnErrorThatListsTheKnownOnes) {
  const auto message = message_of<ArgumentError>([] { (void)is_available("wanb"); });
  EXPECT_TRUE(message.starts_with(
      "is_available does not know 'wanb'. Did you mean 'wandb'? Choose one of: 4bit_bnb, "))
      << message;
}

TEST(Availability, OfAVendorDeviceFollowsTheNameItsLibraryRegisters) {
  // In a process of its own: a name stays registered.
  EXPECT_EXIT(
      {
        c10::register_privateuse1_backend("npu");
        const bool right = is_npu_available() && !is_npu_available(/*check_device=*/true) &&
                           !is_available("mlu") && get_current_device_type().first == "npu";
        std::_Exit(right ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

TEST(CudaChecks, AgreeWithOneAnother) {
  const auto [device, type] = get_current_device_type();
  EXPECT_EQ(device, "cuda");
  EXPECT_EQ(type, DistributedType::kMultiGpu);
  if (is_cuda_available()) {
    EXPECT_GE(get_gpu_info().count, 1);
    EXPECT_TRUE(is_available("pynvml"));
  } else {
    EXPECT_FALSE(check_cuda_fp8_capability());
  }
}

TEST(InstallXla, IsRefusedWithAReason) {
  EXPECT_EQ(message_of<UnsupportedError>([] { install_xla(); }),
            "install_xla: torch_xla is a Python package and cannot be used from C++. Run on CPU or "
            "CUDA devices instead.");
}

TEST(AreLibrariesInitialized, IsAlwaysNone) {
  EXPECT_TRUE(are_libraries_initialized({"torch", "deepspeed"}).empty());
}

TEST(NumaAffinity, LeavesAProcessOnAtLeastOneCpu) {
  // In a thread of its own, whose mask goes with it.
  std::thread([] {
    override_numa_affinity(0, /*verbose=*/false);
    EXPECT_GE(physical_core_count(), 1);
    set_numa_affinity(1);
    set_numa_affinity(1);
  }).join();
}

TEST(NumaAffinity, RefusesANegativeIndex) {
  EXPECT_EQ(message_of<ArgumentError>([] { override_numa_affinity(-1); }),
            "The local index of a process is 0 or more, not -1.");
}

TEST(CheckOsKernel, IsHarmlessOnThisMachine) { EXPECT_NO_THROW(check_os_kernel()); }

}  // namespace
}  // namespace accelerate
