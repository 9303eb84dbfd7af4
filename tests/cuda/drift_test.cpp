// Parameters on a GPU that are compared across ranks: the sums are computed on the device and read
// at a later backward.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "support/on_processes.h"

namespace accelerate {
namespace {

/// Parameters of several kinds.
struct KindsImpl : torch::nn::Module {
  KindsImpl() {
    scalar = register_parameter("scalar", torch::tensor(0.5));
    wide = register_parameter("wide", torch::randn({300, 50}));
    twofold = register_parameter("twofold", torch::randn({3, 2}, torch::kDouble));
    half = register_parameter("half", torch::randn({4, 4}).to(torch::kHalf));
    brain = register_parameter("brain", torch::randn({5}).to(torch::kBFloat16));
    imaginary = register_parameter("imaginary", torch::randn({2, 2}, torch::kComplexFloat));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto real = torch::real(imaginary).mean();
    return x.mean() * (scalar + wide.mean() + twofold.mean().to(torch::kFloat) +
                       half.to(torch::kFloat).mean() + brain.to(torch::kFloat).mean() + real);
  }
  torch::Tensor scalar, wide, twofold, half, brain, imaginary;
};
TORCH_MODULE(Kinds);

/// Trains; calls `f(net, rank)` before backward 7.
void train(PrecisionType precision, int steps,
           const std::function<void(Kinds&, int rank, int step)>& f) {
  AcceleratorState::_reset_state();
  GradientState::_reset_state();
  Accelerator accelerator({.mixed_precision = precision});
  const int rank = accelerator.process_index();
  Kinds net;
  if (precision ==
      PrecisionType::kFp16) {  // LibTorch's scaler takes no 16-bit or complex gradients
    net->half.set_requires_grad(false);
    net->brain.set_requires_grad(false);
    net->imaginary.set_requires_grad(false);
  }
  auto [model, optimizer] = accelerator.prepare(
      net, torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.01)));
  for (int step = 1; step <= steps; ++step) {
    const torch::NoGradGuard no_grad;
    f(net, rank, step);
    const torch::AutoGradMode with_gradients(true);
    auto loss = model(torch::full({4}, 1.0 + rank + step, accelerator.device()));
    // A step that all ranks skip in float16.
    if (step % 20 == 0) loss = loss * std::numeric_limits<float>::infinity();
    if (precision == PrecisionType::kFp16 || step % 20 != 0) accelerator.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    torch::cuda::synchronize();  // both ranks read the sums in the same backward
  }
}

class CudaDriftWatch : public testing::Test {
 protected:
  using Run = std::function<std::vector<RankOutcome>(const std::function<void()>&)>;

  void SetUp() override {
    if (!is_cuda_available()) GTEST_SKIP() << "no GPU can be used here";
  }

  /// Two ranks of NCCL on one GPU; see nccl_test.cpp.
  static std::vector<RankOutcome> with_nccl(const std::function<void()>& f) {
    return run_processes(
        2,
        {.environment = {{"ACCELERATE_USE_CPU", std::nullopt}, {"NCCL_SOCKET_IFNAME", "lo"}},
         .processes_per_host = 1},
        [=] {
          ::setenv("NCCL_HOSTID", std::getenv("RANK"), 1);
          const PartialState state({.backend = "nccl"});
          f();
          state.wait_for_everyone();
        });
  }
  static std::vector<RankOutcome> with_gloo(const std::function<void()>& f) {
    return run_processes(2, {.environment = {{"ACCELERATE_USE_CPU", std::nullopt}}}, f);
  }

  /// Both ranks end with the error, also the one that has not read the sums when the other has.
  static void expect_drift_is_found(const Run& run) {
    for (const char* name : {"scalar", "wide", "twofold", "half", "brain", "imaginary"}) {
      const auto outcomes = run([name] {
        // Two backward passes are left out, so that the drift is found within 52.
        train(PrecisionType::kBf16, 7 + 52, [&](Kinds& net, int rank, int step) {
          if (step == 7 && rank == 1) net->named_parameters()[name].mul_(2);
        });
      });
      for (const auto& outcome : outcomes) {
        EXPECT_FALSE(outcome.ok());
        EXPECT_FALSE(outcome.timed_out);
        EXPECT_TRUE(outcome.output_contains(std::string("the parameter '") + name + "'"))
            << outcome.output;
        EXPECT_TRUE(outcome.output_contains("rank 1 has other values than rank 0"))
            << outcome.output;
      }
    }
  }

  static void expect_silence(const Run& run) {
    const auto outcomes = run([] {
      for (const auto precision :
           {PrecisionType::kNo, PrecisionType::kBf16, PrecisionType::kFp16}) {
        train(precision, 120, [](Kinds&, int, int) {});
      }
    });
    for (const auto& outcome : outcomes) EXPECT_TRUE(outcome.ok()) << outcome.output;
  }
};

TEST_F(CudaDriftWatch, FindsADriftOfRanksOfNccl) { expect_drift_is_found(with_nccl); }
TEST_F(CudaDriftWatch, FindsADriftOfRanksOfGloo) { expect_drift_is_found(with_gloo); }
TEST_F(CudaDriftWatch, IsSilentInEveryPrecisionWithNccl) { expect_silence(with_nccl); }
TEST_F(CudaDriftWatch, IsSilentInEveryPrecisionWithGloo) { expect_silence(with_gloo); }

}  // namespace
}  // namespace accelerate
