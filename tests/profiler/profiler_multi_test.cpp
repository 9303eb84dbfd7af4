// Collectives in profiles.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "support/on_processes.h"
#include "support/shared_folder.h"

namespace accelerate {
namespace {

/// Gathers 4000 bytes and waits for the other process, which is two seconds late.
void expect_collectives(PartialState& state) {
  AcceleratorOptions options;
  options.cpu = true;
  Accelerator accelerator(options);
  const auto tensor = torch::ones(1000);
  (void)accelerator.gather(tensor);  // not recorded
  const auto profile = accelerator.profile([&] {
    (void)accelerator.gather(tensor);
    if (state.process_index() == 1) std::this_thread::sleep_for(std::chrono::seconds(2));
    (void)accelerator.gather(tensor);
  });
  (void)accelerator.gather(tensor);  // not recorded
  const auto averages = profile.key_averages();
  ASSERT_EQ(averages.collectives().size(), 1u);
  const auto& gather = averages.collectives()[0];
  EXPECT_EQ(gather.key, "gather");
  EXPECT_EQ(gather.count, 2);
  EXPECT_EQ(gather.bytes, 8000);
  const auto* row = averages.find("accelerate::gather");
  ASSERT_NE(row, nullptr);
  EXPECT_EQ(row->count, 2);
  if (state.process_index() == 0) {
    EXPECT_GT(gather.time_total, 1'000'000);
  } else {
    EXPECT_LT(gather.time_total, 1'000'000);
  }
  const auto table = averages.table();
  EXPECT_NE(table.find("7.81 KB"), std::string::npos) << table;
}

TEST(ProfilerOnProcesses, ShowsCollectivesWithTheirBytesAndWaitingTime) {
  on_processes(2, expect_collectives);
}

TEST(ProfilerOnProcesses, ShowsThemWithGlooToo) {
  on_processes(2, {.environment = {{"ACCELERATE_HOST_BACKEND", "gloo"}}}, expect_collectives);
}

TEST(ProfilerOnProcesses, EachProcessHasItsTraceBeforeAnyGoesOn) {
  const test::SharedFolder shared;
  on_processes(2, shared.options(), [&](PartialState& state) {
    const auto folder = shared.path() / "traces";
    AcceleratorOptions options;
    options.cpu = true;
    Accelerator accelerator(options);
    accelerator.wait_for_everyone();
    accelerator.profile({.output_trace_dir = folder}, [&] {
      if (state.process_index() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      (void)accelerator.reduce(torch::ones(10));
    });
    for (int rank = 0; rank < 2; ++rank) {
      std::ifstream file(folder / ("profile_" + std::to_string(rank) + ".json"));
      const auto trace = nlohmann::json::parse(file);
      EXPECT_EQ(trace["distributedInfo"]["rank"], rank);
      EXPECT_EQ(trace["distributedInfo"]["world_size"], 2);
    }
  });
}

}  // namespace
}  // namespace accelerate
