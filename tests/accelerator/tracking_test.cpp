#include <accelerate/accelerate.h>
#include <accelerate/tracking/summary_writer.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "accelerator/nets.h"
#include "core/captured_log.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using test::message_of;

class TrackingTest : public test::Stateless {
 protected:
  TrackingTest() { fs::remove_all(folder_); }
  ~TrackingTest() override { fs::remove_all(folder_); }

  [[nodiscard]] AcceleratorOptions options(std::vector<TrackerChoice> log_with) const {
    return {.cpu = true, .log_with = std::move(log_with), .project_dir = folder_};
  }
  [[nodiscard]] std::vector<nlohmann::json> lines() const {
    std::ifstream file(folder_ / "project/metrics.jsonl");
    std::vector<nlohmann::json> result;
    for (std::string line; std::getline(file, line);) result.push_back(nlohmann::json::parse(line));
    return result;
  }

  fs::path folder_ =
      fs::path(testing::TempDir()) / testing::UnitTest::GetInstance()->current_test_info()->name();
};

/// Throws at every call of `log`.
class Thrower : public GeneralTracker {
 public:
  [[nodiscard]] std::string_view name() const override { return "thrower"; }
  [[nodiscard]] bool requires_logging_directory() const override { return false; }
  [[nodiscard]] std::any tracker() override { return 7; }
  void log(const Value::Dict&, std::optional<std::int64_t>, const Value::Dict&) override {
    throw std::runtime_error("no.");
  }
};

TEST_F(TrackingTest, LogsTensorsOfDimensionZeroAsNumbers) {
  Accelerator accelerator(options({"jsonl"}));
  EXPECT_FALSE(fs::exists(folder_));
  accelerator.init_trackers("project", {{"lr", 0.5}});
  accelerator.log({{"loss", torch::tensor(0.25)},
                   {"count", torch::tensor(3)},
                   {"ok", torch::tensor(true)},
                   {"all", Value::Dict{{"a", torch::tensor(1.5)}}}},
                  2);
  accelerator.end_training();
  const auto written = lines();
  ASSERT_EQ(written.size(), 2U);
  EXPECT_EQ(written[0]["config"], nlohmann::json({{"lr", 0.5}}));
  EXPECT_EQ(written[1]["step"], 2);
  EXPECT_EQ(written[1]["values"].dump(), R"({"all":{"a":1.5},"count":3,"loss":0.25,"ok":true})");
}

TEST_F(TrackingTest, LeavesTensorsWithoutANumberAsTheyAre) {
  Accelerator accelerator(options({"jsonl"}));
  accelerator.init_trackers("project");
  accelerator.log({{"undefined", torch::Tensor()},
                   {"meta", torch::empty({}, torch::kMeta)},
                   {"complex", torch::full({}, c10::complex<float>(0, 1))},
                   {"loss", torch::tensor(0.25)}},
                  1);
  accelerator.end_training();
  const auto values = lines().at(0)["values"];
  EXPECT_EQ(values["undefined"], "tensor(undefined)");
  EXPECT_TRUE(values["meta"].is_string());
  EXPECT_TRUE(values["complex"].is_string());
  EXPECT_EQ(values["loss"], 0.25);
}

TEST_F(TrackingTest, GoesOnWhenATrackerThrows) {
  const test::CapturedLog log;
  Accelerator accelerator(options({std::make_shared<Thrower>(), "jsonl"}));
  accelerator.init_trackers("project");
  for (int i = 0; i < 3; ++i) accelerator.log({{"loss", i}}, i);
  EXPECT_EQ(lines().size(), 3U);
  ASSERT_EQ(log.messages().size(), 1U);
  EXPECT_EQ(log.messages()[0],
            "[RANK 0] The tracker thrower did not log: no. More of its errors are not shown.");
}

TEST_F(TrackingTest, GivesTheTrackerAndItsHandle) {
  const test::CapturedLog log;
  Accelerator accelerator(options({LoggerType::kTensorboard, std::make_shared<Thrower>()}));
  EXPECT_EQ(accelerator.get_tracker<SummaryWriter*>("tensorboard"), nullptr);
  ASSERT_EQ(log.messages().size(), 1U);
  EXPECT_NE(log.messages()[0].find("Call init_trackers first"), std::string::npos);
  accelerator.init_trackers("project");
  auto* writer = accelerator.get_tracker<SummaryWriter*>("tensorboard");
  ASSERT_NE(writer, nullptr);
  EXPECT_EQ(writer->log_dir(), folder_ / "project");
  EXPECT_EQ(accelerator.get_tracker<int>("thrower"), 7);
  EXPECT_EQ(accelerator.get_tracker("thrower").name(), "thrower");
  EXPECT_NE(message_of<ArgumentError>([&] {
              (void)accelerator.get_tracker<std::string>("thrower");
            }).find("another type"),
            std::string::npos);
  EXPECT_NE(message_of<ArgumentError>([&] {
              (void)accelerator.get_tracker("wandb");
            }).find("wandb is not an available tracker stored inside the `Accelerator`"),
            std::string::npos);
}

TEST_F(TrackingTest, MakesImagesOfTensors) {
  const auto gray = torch::tensor({0.0, 0.5, 1.0, 2.0}).reshape({1, 1, 2, 2});
  const auto images = tracker_images(gray);
  ASSERT_EQ(images.size(), 1U);
  EXPECT_EQ(images[0].channels, 1);
  EXPECT_EQ(images[0].pixels, std::string("\0\x7f\xff\xff", 4));
  const auto bytes =
      tracker_images(torch::arange(256).to(torch::kFloat).div(255).reshape({1, 16, 16}));
  for (std::size_t i = 0; i < 256; ++i) EXPECT_EQ(bytes[0].pixels[i], static_cast<char>(i)) << i;
  const auto color = torch::arange(12, torch::kByte).reshape({3, 2, 2});
  EXPECT_EQ(tracker_images(color)[0].pixels, std::string("\0\4\10\1\5\11\2\6\12\3\7\13", 12));
  EXPECT_NE(message_of<ArgumentError>([] { (void)tracker_images(torch::ones({2})); }).find("[2]"),
            std::string::npos);
  Accelerator accelerator(options({"tensorboard"}));
  accelerator.init_trackers("project");
  accelerator.get_tracker("tensorboard").log_images({{"batch", tracker_images(gray)}}, 1);
}

TEST_F(TrackingTest, RefusesWhatCannotStartBeforeThereIsAState) {
  const auto message = [](const AcceleratorOptions& options) {
    return message_of<Error>([&] { const Accelerator accelerator(options); });
  };
  EXPECT_NE(message({.cpu = true, .log_with = {LoggerType::kTensorboard}})
                .find("Logging with `tensorboard` requires a `logging_dir`"),
            std::string::npos);
  EXPECT_NE(message(options({LoggerType::kAim})).find("aim convert tensorboard"),
            std::string::npos);
  EXPECT_NE(message(options({"tensorbord"})).find("Unsupported logging capability: tensorbord"),
            std::string::npos);
  EXPECT_FALSE(AcceleratorState::initialized());
}

TEST_F(TrackingTest, FinishesWithTheAccelerator) {
  {
    Accelerator accelerator(options({LoggerType::kTrackio}));
    const auto patched = patch_environment({{"TRACKIO_DIR", folder_.string()}});
    accelerator.init_trackers("project");
    accelerator.log({{"loss", 1}});  // Trackio gathers values for half a second
  }
  std::size_t fragments = 0;
  for (const auto& entry : fs::recursive_directory_iterator(folder_)) {
    fragments += entry.path().extension() == ".jsonl" ? 1 : 0;
  }
  EXPECT_EQ(fragments, 1U);
}

}  // namespace
}  // namespace accelerate
