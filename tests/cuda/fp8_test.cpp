// Products in 8 bits on a GPU: its kernels against the emulation, which defines the numbers.
#include <accelerate/accelerate.h>
#include <accelerate/fp8.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace accelerate {
namespace {

class CudaFp8 : public testing::Test {
 protected:
  void SetUp() override {
    if (!is_cuda_available() || !check_cuda_fp8_capability()) {
      GTEST_SKIP() << "no GPU that multiplies in 8 bits";
    }
    AcceleratorState::_reset_state(/*reset_partial_state=*/true);
  }
  void TearDown() override { AcceleratorState::_reset_state(/*reset_partial_state=*/true); }
};

struct Fp8LayersImpl : torch::nn::Module {
  Fp8LayersImpl() {
    torch::manual_seed(5);
    first = register_module("first", torch::nn::Linear(64, 96));
    second = register_module("second", nn::Linear(96, 64));
  }
  torch::Tensor forward(const torch::Tensor& x) { return second(torch::relu(first(x))); }
  torch::nn::Linear first = nullptr;
  nn::Linear second = nullptr;
};
TORCH_MODULE(Fp8Layers);

struct Fp8Recipe {
  std::string name;
  KwargsHandler kwargs;
};

std::vector<Fp8Recipe> fp8_recipes() {
  std::vector<Fp8Recipe> all;
  for (const std::string name : {"tensorwise", "rowwise", "rowwise_with_gw_hp"}) {
    all.push_back(
        {name, AORecipeKwargs{.config = Float8LinearConfig{.recipe = name, .pad_inner_dim = true},
                              .module_filter_func = [](auto&&...) { return true; }}});
  }
  all.push_back({"delayed", TERecipeKwargs{}});
  all.push_back({"delayed E4M3", TERecipeKwargs{.fp8_format = FP8Format::kE4m3}});
  return all;
}

AcceleratorOptions in_fp8(const Fp8Recipe& recipe) {
  return {.mixed_precision = PrecisionType::kFp8, .kwargs_handlers = {recipe.kwargs}};
}

torch::Tensor fp8_input(std::int64_t rows, int step) {
  torch::manual_seed(100 + step);
  return torch::randn({rows, 64}).cuda();
}

/// The result, the gradient of the input, and those of the weights, of a second step: delayed
/// scales are those of the first one then.
std::vector<torch::Tensor> fp8_numbers(const Fp8Recipe& recipe, std::int64_t rows, bool emulate) {
  AcceleratorState::_reset_state(/*reset_partial_state=*/true);
  const auto patched = patch_environment({{"ACCELERATE_FP8_EMULATE", emulate ? "1" : "0"}});
  Accelerator accelerator(in_fp8(recipe));
  Fp8Layers net;
  auto [model, optimizer] = accelerator.prepare(net, SGD(net->parameters(), {.lr = 0.1}));
  EXPECT_EQ(fp8_layers(*net).size(), 2U) << recipe.name;
  std::vector<torch::Tensor> numbers;
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    const auto x = fp8_input(rows, step).requires_grad_();
    const auto y = model(x);
    accelerator.backward((y * fp8_input(rows, step + 10)).sum());
    numbers = {y.detach(), x.grad(), net->first->weight.grad().clone(),
               net->second->weight.grad().clone()};
  }
  return numbers;
}

TEST_F(CudaFp8, KernelsMultiplyAsTheEmulationInForwardAndBackward) {
  constexpr std::array kNames{"result", "gradient of x", "gradient of the first weight",
                              "gradient of the second weight"};
  for (const auto& recipe : fp8_recipes()) {
    for (const std::int64_t rows : {64, 37, 1}) {  // kernels take multiples of 16
      const auto expected = fp8_numbers(recipe, rows, /*emulate=*/true);
      const auto found = fp8_numbers(recipe, rows, /*emulate=*/false);
      for (std::size_t i = 0; i < found.size(); ++i) {
        const auto exact = expected[i].to(torch::kDouble);
        const auto error = (found[i].to(torch::kDouble) - exact).norm() / exact.norm();
        // Both round to bfloat16; where that changes a code of the next product, by 1/16.
        EXPECT_LT(error.item<double>(), 2e-2) << recipe.name << ", " << rows << ": " << kNames[i];
      }
    }
  }
}

std::vector<double> fp8_losses(const Fp8Recipe& recipe, bool captured) {
  AcceleratorState::_reset_state(/*reset_partial_state=*/true);
  Accelerator accelerator(in_fp8(recipe));
  Fp8Layers net;
  // A recorded step has the learning rate as a float32 tensor: let the eager one have it too.
  auto [model, optimizer] =
      accelerator.prepare(net, SGD(net->parameters(), {.lr = 0.5, .capturable = !captured}));
  const auto body = [&, &model = model, &optimizer = optimizer](torch::Tensor& x) {
    const auto loss = (model(x) - x.roll(1, 1)).pow(2).mean();
    accelerator.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    return loss;
  };
  auto step = accelerator.capture(body);
  std::vector<double> losses;
  for (int i = 0; i < 8; ++i) {
    auto x = fp8_input(32, i % 4);
    losses.push_back((captured ? step(x) : body(x)).template item<double>());
  }
  EXPECT_EQ(step.num_graphs(), captured ? 1 : 0) << recipe.name;
  return losses;
}

TEST_F(CudaFp8, CapturedStepsHaveTheLossesOfTheLoop) {
  for (const auto& recipe : fp8_recipes()) {
    const auto expected = fp8_losses(recipe, /*captured=*/false);
    const auto found = fp8_losses(recipe, /*captured=*/true);
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_NEAR(found[i], expected[i], 1e-4 * (1 + expected[i])) << recipe.name << ", " << i;
    }
    // The same batches again.
    EXPECT_LT(std::reduce(found.begin() + 4, found.end()),
              std::reduce(found.begin(), found.begin() + 4) - 0.1)
        << recipe.name;
  }
}

TEST_F(CudaFp8, ScalesThatDoNotFitAreCountedWithoutDebugMode) {
  const torch::NoGradGuard no_grad;
  for (const auto& recipe : fp8_recipes()) {
    AcceleratorState::_reset_state(/*reset_partial_state=*/true);
    Accelerator accelerator(in_fp8(recipe));
    Fp8Layers net;
    auto [model, optimizer] = accelerator.prepare(net, SGD(net->parameters(), {.lr = 0.1}));
    const auto count = [&] { return clamped_fp8_values(*net).front().second; };
    auto x = fp8_input(32, 0);
    model(x);
    EXPECT_EQ(count(), 0) << recipe.name;
    x[3][5] = std::nan("");
    model(x);
    EXPECT_EQ(count(), 1) << recipe.name;
    if (!std::holds_alternative<TERecipeKwargs>(recipe.kwargs)) continue;
    model(fp8_input(32, 0) * 1000);  // the first scales are 1
    EXPECT_EQ(count(), 2) << recipe.name;
  }
}

}  // namespace
}  // namespace accelerate
