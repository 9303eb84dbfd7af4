// Trackers where there are several processes.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include <nlohmann/json.hpp>

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

/// The lines of a process for `accelerate monitor` that have a key.
std::vector<Value::Dict> recorded(const fs::path& folder, int rank, const std::string& key) {
  std::vector<Value::Dict> found;
  for (const auto& run : fs::directory_iterator(folder / "monitor")) {
    std::ifstream file(run.path() / ("rank_" + std::to_string(rank) + ".jsonl"));
    for (std::string line; std::getline(file, line);) {
      const auto entry = nlohmann::json::parse(line);
      if (!entry.contains(key)) continue;
      found.emplace_back();
      for (const auto& [name, value] : entry.items()) {
        if (value.is_number()) found.back().set(name, value.get<double>());
      }
    }
  }
  return found;
}

TEST(Monitoring, EachProcessRecordsItsStepsAndTheTimeItWaitsForOthers) {
  const auto folder = fs::path(testing::TempDir()) / "each_process_records_its_steps";
  fs::remove_all(folder);
  on_processes(2, {.environment = {{"ACCELERATE_MONITOR", "1"}}}, [&](PartialState& state) {
    auto options = test::anew({.project_dir = folder});
    Accelerator accelerator(options);
    auto net = torch::nn::Linear(4, 1);
    auto [model, optimizer] = accelerator.prepare(
        net, torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.25)));
    for (int step = 0; step < 40; ++step) {
      // Rank 1 is slow: rank 0 waits for it.
      if (state.process_index() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      auto loss = model(torch::ones({2, 4})).mean();
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
      accelerator.log({{"loss", loss}}, step);
    }
    accelerator.end_training();
  });
  const auto mean_wait = [&](int rank) {
    double sum = 0;
    double count = 0;
    for (const auto& entry : recorded(folder, rank, "steps")) {
      sum += entry.at("wait").as_double() * entry.at("count").as_double();
      count += entry.at("count").as_double();
    }
    EXPECT_EQ(count, 39);
    return sum / count;
  };
  EXPECT_GT(mean_wait(0), 10);
  EXPECT_LT(mean_wait(1), mean_wait(0) / 2);
  EXPECT_EQ(recorded(folder, 0, "values").size(), 40U);
  EXPECT_EQ(recorded(folder, 1, "values").size(), 0U);
  EXPECT_EQ(recorded(folder, 0, "steps").front().at("lr"), Value(0.25));
  EXPECT_EQ(recorded(folder, 1, "end").size(), 1U);
  fs::remove_all(folder);
}

}  // namespace
}  // namespace accelerate
