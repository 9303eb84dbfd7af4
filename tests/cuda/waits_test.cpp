// How often a step of a training loop waits for the GPU, as the profiler sees it.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace accelerate {
namespace {

constexpr std::int64_t kSteps = 20;

/// Calls by which the host waits for a GPU.
struct Waits {
  std::int64_t synchronizations = 0;  // cudaStreamSynchronize and the like
  std::int64_t copies = 0;            // of the device to the host
  std::int64_t reads = 0;             // item()
  bool operator==(const Waits&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Waits& waits) {
  return out << waits.synchronizations << " synchronizations, " << waits.copies << " copies, "
             << waits.reads << " reads";
}

template <class F>
Waits waits_of(Accelerator& accelerator, const F& f) {
  const auto profile = accelerator.profile([&](Profiler&) { f(); });
  Waits waits;
  for (const auto& row : profile.key_averages()) {
    const std::string_view key = row.key;
    if (key.starts_with("cuda") && key.ends_with("Synchronize"))
      waits.synchronizations += row.count;
    if (key.find("DtoH") != key.npos) waits.copies += row.count;
    if (key == "aten::_local_scalar_dense") waits.reads += row.count;
  }
  return waits;
}

/// Of steps in the middle of a run.
Waits waits_of_steps(PrecisionType precision, bool captured) {
  AcceleratorState::_reset_state(/*reset_partial_state=*/true);
  GradientState::_reset_state();
  AcceleratorOptions options;
  options.mixed_precision = precision;
  options.kwargs_handlers = {GradScalerKwargs{.init_scale = 1024}};
  Accelerator accelerator(options);
  torch::nn::Sequential net(torch::nn::Linear(16, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  auto adamw = AdamW(net->parameters(), {.lr = 1e-3});
  auto warm = LinearLR(adamw, {.start_factor = 0.1, .total_iters = 30});
  auto [model, optimizer, scheduler] = accelerator.prepare(net, std::move(adamw), std::move(warm));
  auto x = torch::randn({8, 16}, accelerator.device());
  const auto body = [&, &model = model, &optimizer = optimizer,
                     &scheduler = scheduler](torch::Tensor& batch) {
    const auto accumulating = accelerator.accumulate(model);
    const auto loss = model(batch).square().mean();
    accelerator.backward(loss);
    if (accelerator.sync_gradients()) accelerator.clip_grad_norm_(model.parameters(), 1.0);
    optimizer.step();
    scheduler.step();
    optimizer.zero_grad();
    return loss;
  };
  auto step = accelerator.capture(body);
  const auto steps = [&] {
    for (std::int64_t i = 0; i < kSteps; ++i) (void)(captured ? step(x) : body(x));
  };
  steps();
  (void)waits_of(accelerator, [] {});  // the first profile prepares itself
  const auto none = waits_of(accelerator, [] {});
  auto waits = waits_of(accelerator, steps);
  // The profiler waits too, at its ends.
  waits.synchronizations -= none.synchronizations;
  return waits;
}

class Waiting : public testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  }
};

constexpr Waits kOnePerStep{.synchronizations = kSteps, .copies = kSteps, .reads = kSteps};

TEST_F(Waiting, StepsInFloat32AndBf16DoNot) {
  EXPECT_EQ(waits_of_steps(PrecisionType::kNo, /*captured=*/false), Waits{});
  EXPECT_EQ(waits_of_steps(PrecisionType::kBf16, /*captured=*/false), Waits{});
}

TEST_F(Waiting, StepsInFloat16DoOnce) {
  EXPECT_EQ(waits_of_steps(PrecisionType::kFp16, /*captured=*/false), kOnePerStep);
}

TEST_F(Waiting, CapturedStepsDoNot) {
  EXPECT_EQ(waits_of_steps(PrecisionType::kNo, /*captured=*/true), Waits{});
  EXPECT_EQ(waits_of_steps(PrecisionType::kBf16, /*captured=*/true), Waits{});
}

TEST_F(Waiting, CapturedStepsInFloat16DoOnce) {
  // For schedulers, which must know of a step that was left out.
  EXPECT_EQ(waits_of_steps(PrecisionType::kFp16, /*captured=*/true), kOnePerStep);
}

}  // namespace
}  // namespace accelerate
