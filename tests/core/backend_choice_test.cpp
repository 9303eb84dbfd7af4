#include "core/backend_choice.h"

#include <gtest/gtest.h>

#include <string>

#include "accelerate/errors.h"

namespace accelerate::detail::inline core {
namespace {

TEST(ChooseBackend, LeavesAProcessWithoutLauncherAlone) {
  EXPECT_EQ(choose_backend({}), (BackendChoice{.cpu = true}));
  EXPECT_EQ(choose_backend({.accelerator = "cuda", .device_count = 2}), BackendChoice{});
  EXPECT_TRUE(choose_backend({.cpu = true, .accelerator = "cuda", .device_count = 2}).cpu);
}

TEST(ChooseBackend, TakesNcclForOneGpuPerProcess) {
  EXPECT_EQ(
      choose_backend({.launched = true,
                      .num_processes = 4,
                      .local_rank = 1,
                      .local_size = 2,
                      .accelerator = "cuda",
                      .device_count = 2}),
      (BackendChoice{.type = DistributedType::kMultiGpu, .backend = "nccl", .device_index = 1}));
}

TEST(ChooseBackend, FallsBackToGlooWithAWarningWhenProcessesShareAGpu) {
  const auto choice = choose_backend({.launched = true,
                                      .num_processes = 2,
                                      .local_rank = 1,
                                      .local_size = 2,
                                      .accelerator = "cuda",
                                      .device_count = 1});
  EXPECT_EQ(choice.type, DistributedType::kMultiGpu);
  EXPECT_EQ(choice.backend, "gloo");
  EXPECT_EQ(choice.device_index, 0);
  EXPECT_EQ(choice.warning,
            "2 processes on this host share 1 GPU: they communicate by gloo, through the host's "
            "memory, which is slow. Start at most 1 here to use nccl.");
}

TEST(ChooseBackend, RefusesNcclByNameWhenProcessesShareAGpu) {
  try {
    (void)choose_backend({.launched = true,
                          .num_processes = 3,
                          .local_rank = 0,
                          .local_size = 3,
                          .accelerator = "cuda",
                          .device_count = 2,
                          .backend = "nccl"});
    FAIL() << "3 processes were given 2 GPUs";
  } catch (const CommError& error) {
    EXPECT_STREQ(error.what(),
                 "3 processes on this host share 2 GPUs, but nccl needs a GPU of its own for each "
                 "process. Start at most 2 here, or leave the backend out: then gloo is used.");
  }
}

TEST(ChooseBackend, KeepsGlooOnGpusWhenAskedFor) {
  const auto choice = choose_backend({.launched = true,
                                      .num_processes = 2,
                                      .local_size = 2,
                                      .accelerator = "cuda",
                                      .device_count = 2,
                                      .backend = "gloo"});
  EXPECT_EQ(choice.backend, "gloo");
  EXPECT_EQ(choice.type, DistributedType::kMultiGpu);
  EXPECT_EQ(choice.warning, "");
}

TEST(ChooseBackend, PutsGlooBesideNcclWhenParametersAreOnTheCpu) {
  BackendFacts facts{.launched = true,
                     .num_processes = 2,
                     .local_size = 2,
                     .accelerator = "cuda",
                     .device_count = 2,
                     .collectives_on_cpu_too = true};
  EXPECT_EQ(choose_backend(facts).backend, "cuda:nccl,cpu:gloo");
  facts.accelerator = "xpu";
  EXPECT_EQ(choose_backend(facts).backend, "xpu:xccl,cpu:gloo");
  facts.accelerator = "cuda";
  facts.backend = "gloo";
  EXPECT_EQ(choose_backend(facts).backend, "gloo");
}

TEST(ChooseBackend, TakesGlooOnTheCpu) {
  EXPECT_EQ(choose_backend({.launched = true, .num_processes = 2, .cpu = true}),
            (BackendChoice{.type = DistributedType::kMultiCpu, .backend = "gloo", .cpu = true}));
  // One process under a launcher still forms a group.
  EXPECT_EQ(choose_backend({.launched = true, .cpu = true}).type, DistributedType::kMultiCpu);
}

TEST(ChooseBackend, WorksOnTheCpuWithAWarningWhereSeveralProcessesFindNoAccelerator) {
  const auto choice = choose_backend({.launched = true, .num_processes = 2});
  EXPECT_EQ(choice.type, DistributedType::kMultiCpu);
  EXPECT_TRUE(choice.cpu);
  EXPECT_EQ(choice.warning,
            "2 processes were started on a machine without accelerator: they work together on the "
            "CPU. Set cpu (or ACCELERATE_USE_CPU=1) to say that this is meant.");
}

TEST(ChooseBackend, FindsOneProcessWithoutAcceleratorAloneUnderALauncherToo) {
  EXPECT_EQ(choose_backend({.launched = true}), (BackendChoice{.cpu = true}));
}

TEST(ChooseBackend, NamesBothBackendsWhenTheOneAskedForDoesNotFit) {
  try {
    (void)choose_backend({.launched = true, .num_processes = 2, .cpu = true, .backend = "nccl"});
    FAIL() << "nccl was taken for the CPU";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(),
                 "backend is 'nccl', which cannot be used on the CPU here. Use 'gloo', or leave it "
                 "out.");
  }
  EXPECT_THROW((void)choose_backend({.launched = true,
                                     .num_processes = 2,
                                     .accelerator = "npu",
                                     .device_count = 2,
                                     .backend = "nccl"}),
               ConfigError);
}

TEST(ChooseBackend, KnowsTheBackendOfEveryAccelerator) {
  const auto backend_of = [](const std::string& device) {
    return *choose_backend({.launched = true,
                            .num_processes = 2,
                            .local_size = 1,
                            .accelerator = device,
                            .device_count = 1})
                .backend;
  };
  EXPECT_EQ(backend_of("mlu"), "cncl");
  EXPECT_EQ(backend_of("sdaa"), "tccl");
  EXPECT_EQ(backend_of("musa"), "mccl");
  EXPECT_EQ(backend_of("npu"), "hccl");
  EXPECT_EQ(backend_of("hpu"), "hccl");
  EXPECT_EQ(backend_of("xpu"), "xccl");
  EXPECT_EQ(backend_of("neuron"), "neuron");
  EXPECT_THROW((void)backend_of("mps"), UnsupportedError);
}

}  // namespace
}  // namespace accelerate::detail::inline core
