#include "accelerate/grad_scaler.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "accelerate/errors.h"
#include "support/message_of.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

using test::message_of;
using Json = nlohmann::json;

GradScalerKwargs options_of(const Json& json) {
  GradScalerKwargs options;
  options.init_scale = json.value("init_scale", options.init_scale);
  options.growth_factor = json.value("growth_factor", options.growth_factor);
  options.backoff_factor = json.value("backoff_factor", options.backoff_factor);
  options.growth_interval = json.value("growth_interval", options.growth_interval);
  return options;
}

/// The program of the reference.
class Steps {
 public:
  explicit Steps(const GradScalerKwargs& options) : scaler(options) {}

  bool step(const std::string& kind) {
    optimizer.zero_grad();
    scaler.scale((w * torch::tensor({1.F, 2.F, 3.F})).sum()).backward();
    if (kind == "inf") w.mutable_grad()[1] = std::numeric_limits<float>::infinity();
    if (kind == "nan") w.mutable_grad()[2] = std::numeric_limits<float>::quiet_NaN();
    const bool done = scaler.step(optimizer);
    scaler.update();
    return done;
  }

  GradScaler scaler;
  torch::Tensor w = torch::ones(3, torch::requires_grad());
  torch::optim::SGD optimizer{std::vector{w}, torch::optim::SGDOptions(0.1)};
};

TEST(GradScaler, DoesWhatPythonsDoesStepByStep) {
  std::ifstream file(test::reference_path("grad_scaler/grad_scaler.json"));
  for (const auto& run : Json::parse(file)) {
    Steps steps(options_of(run.at("options")));
    int number = 0;
    for (const auto& expected : run.at("steps")) {
      SCOPED_TRACE(run.at("options").dump() + ", step " + std::to_string(number++));
      const auto kind = expected.at("kind").get<std::string>();
      EXPECT_EQ(steps.step(kind), expected.at("done").get<bool>());
      EXPECT_EQ(steps.scaler.get_scale(), expected.at("scale").get<double>());
      EXPECT_EQ(steps.scaler.get_growth_tracker(), expected.at("tracker").get<std::int64_t>());
      const auto w = torch::tensor(expected.at("w").get<std::vector<float>>());
      // Where a product and a sum are fused, the last bit is another one.
      EXPECT_TRUE(torch::allclose(steps.w.detach(), w, /*rtol=*/1e-7, /*atol=*/1e-7)) << steps.w;
      const auto state = steps.scaler.state_dict();
      ASSERT_EQ(state.as_dict().size(), expected.at("state").size());
      for (const auto& [key, value] : expected.at("state").items()) {
        const auto& ours = state.at(key);
        EXPECT_EQ(ours.is_int() ? static_cast<double>(ours.as_int()) : ours.as_double(),
                  value.get<double>())
            << key;
        EXPECT_EQ(ours.is_int(), value.is_number_integer()) << key;
      }
    }
  }
}

TEST(GradScaler, GoesOnFromAState) {
  Steps first({.init_scale = 1024, .growth_interval = 3});
  for (const char* kind : {"finite", "finite", "inf", "finite"}) first.step(kind);
  for (const bool started : {false, true}) {
    Steps second({});
    if (started) second.step("finite");
    second.scaler.load_state_dict(first.scaler.state_dict());
    EXPECT_EQ(second.scaler.state_dict(), first.scaler.state_dict());
    second.step("finite");
    second.step("finite");
    EXPECT_EQ(second.scaler.get_scale(), 1024);
  }
}

TEST(GradScaler, ADisabledOneIsNotThere) {
  Steps steps({.enabled = false});
  const auto loss = torch::ones(1);
  EXPECT_TRUE(steps.scaler.scale(loss).is_same(loss));
  EXPECT_TRUE(steps.step("inf"));
  EXPECT_EQ(steps.scaler.get_scale(), 1);
  EXPECT_TRUE(steps.scaler.state_dict().as_dict().empty());
  EXPECT_NE(message_of<ArgumentError>([&] {
              GradScaler().load_state_dict(steps.scaler.state_dict());
            }).find("saved by a disabled scaler"),
            std::string::npos);
}

TEST(GradScaler, UnscalesOnceBeforeAStep) {
  Steps steps({.init_scale = 8});
  steps.scaler.scale((steps.w * 2).sum()).backward();
  EXPECT_FALSE(steps.scaler.is_unscaled(steps.optimizer));
  steps.scaler.unscale_(steps.optimizer);
  EXPECT_TRUE(steps.scaler.is_unscaled(steps.optimizer));
  EXPECT_TRUE(torch::equal(steps.w.grad(), torch::full(3, 2.F)));
  EXPECT_NE(message_of<StateError>([&] {
              steps.scaler.unscale_(steps.optimizer);
            }).find("already been called"),
            std::string::npos);
  EXPECT_TRUE(steps.scaler.step(steps.optimizer));
  EXPECT_NE(message_of<StateError>([&] {
              (void)steps.scaler.step(steps.optimizer);
            }).find("already been called"),
            std::string::npos);
  EXPECT_NE(
      message_of<StateError>([&] { steps.scaler.unscale_(steps.optimizer); }).find("after step()"),
      std::string::npos);
  steps.scaler.update();
  EXPECT_FALSE(steps.scaler.is_unscaled(steps.optimizer));
}

TEST(GradScaler, KnowsWhichOptimizerHasSeenInfinity) {
  GradScaler scaler({.init_scale = 4, .growth_interval = 1});
  auto a = torch::ones(2, torch::requires_grad());
  auto b = torch::ones(2, torch::requires_grad());
  torch::optim::SGD of_a({a}, torch::optim::SGDOptions(1));
  torch::optim::SGD of_b({b}, torch::optim::SGDOptions(1));
  scaler.scale((a + b).sum()).backward();
  b.mutable_grad()[0] = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(scaler.step(of_a));
  EXPECT_FALSE(scaler.step(of_b));
  EXPECT_FALSE(scaler.found_inf(of_a));
  EXPECT_TRUE(scaler.found_inf(of_b));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 2) << "one of them is enough";
  EXPECT_TRUE(torch::equal(a.detach(), torch::zeros(2)));
  EXPECT_TRUE(torch::equal(b.detach(), torch::ones(2)));
}

TEST(GradScaler, TakesGradientsOfSeveralDtypesAndSparseOnes) {
  GradScaler scaler({.init_scale = 4});
  auto dense = torch::ones(2, torch::requires_grad().dtype(torch::kDouble));
  auto table = torch::ones({4, 2}, torch::requires_grad());
  torch::optim::SGD optimizer({dense, table}, torch::optim::SGDOptions(1));
  const auto rows = torch::embedding(table, torch::tensor({1, 1}), -1, false, /*sparse=*/true);
  scaler.scale(rows.sum() + dense.sum()).backward();
  scaler.unscale_(optimizer);
  EXPECT_TRUE(torch::equal(dense.grad(), torch::ones(2, torch::kDouble)));
  EXPECT_EQ(table.grad().to_dense()[1][0].item<float>(), 2);
  EXPECT_FALSE(scaler.found_inf(optimizer));
}

TEST(GradScaler, SaysWhatIsMissing) {
  Steps steps({});
  EXPECT_NE(message_of<StateError>([&] {
              (void)steps.scaler.step(steps.optimizer);
            }).find("Scale the loss first"),
            std::string::npos);
  (void)steps.scaler.scale(torch::ones(1));
  EXPECT_NE(message_of<StateError>([&] {
              (void)steps.scaler.step(steps.optimizer);
            }).find("none of its parameters has a gradient"),
            std::string::npos);
  EXPECT_NE(message_of<StateError>([&] {
              GradScaler scaler;
              (void)scaler.scale(torch::ones(1));
              scaler.update();
            }).find("No inf checks"),
            std::string::npos);
  auto half = torch::ones(2, torch::requires_grad().dtype(torch::kHalf));
  torch::optim::SGD optimizer({half}, torch::optim::SGDOptions(1));
  half.mutable_grad() = torch::ones(2, torch::kHalf);
  EXPECT_NE(message_of<ArgumentError>([&] { steps.scaler.unscale_(optimizer); }).find("float16"),
            std::string::npos);
  EXPECT_NE(
      message_of<ArgumentError>([] { GradScaler({.growth_factor = 1}); }).find("growth_factor"),
      std::string::npos);
  EXPECT_NE(
      message_of<ArgumentError>([] { GradScaler({.backoff_factor = 1}); }).find("backoff_factor"),
      std::string::npos);
}

}  // namespace
}  // namespace accelerate
