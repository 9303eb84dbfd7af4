// Trackers where there are several processes.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "accelerator/nets.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

namespace fs = std::filesystem;

TEST(Tracking, OnlyTheMainProcessWrites) {
  const auto folder = fs::path(testing::TempDir()) / "only_the_main_process_writes";
  on_processes(2, [&](PartialState& state) {
    if (state.is_main_process()) fs::remove_all(folder);
    state.wait_for_everyone();
    // Each in a folder of its own, so that what the other writes is seen.
    const auto mine = folder / std::to_string(state.process_index());
    auto options = test::anew(
        {.log_with = {LoggerType::kTensorboard, "jsonl", "dvclive"}, .project_dir = mine});
    Accelerator accelerator(options);
    accelerator.init_trackers(
        "project", {{"lr", 0.1}},
        {{"dvclive", Value::Dict{{"dir", (mine / "live").string()}, {"dvcyaml", nullptr}}}});
    for (int step = 0; step < 5; ++step) accelerator.log({{"loss", torch::tensor(0.5)}}, step);
    accelerator.get_tracker("jsonl").log({{"own", 1}}, 5);
    EXPECT_EQ(accelerator.get_tracker<fs::path>("jsonl").empty(), !state.is_main_process());
    accelerator.end_training();
    if (!state.is_main_process()) {
      EXPECT_FALSE(fs::exists(mine));
      return;
    }
    std::ifstream file(mine / "project/metrics.jsonl");
    int lines = 0;
    for (std::string line; std::getline(file, line);) ++lines;
    EXPECT_EQ(lines, 7);
    EXPECT_TRUE(fs::exists(mine / "live/metrics.json"));
  });
  fs::remove_all(folder);
}

}  // namespace
}  // namespace accelerate
