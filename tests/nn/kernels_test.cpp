// Which kernels modules ask for where a backend makes them. What kernels compute is tested on a
// GPU.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "accelerate/nn.h"
#include "state/device_kernel.h"
#include "support/fake_gpu.h"

namespace accelerate {
namespace {

using Names = std::vector<std::string>;

struct Launch {
  std::string name;
  const void* first = nullptr;
  const void* second = nullptr;
};

/// A device with the memory of the CPU, whose kernels compute nothing.
class KernelDevice final : public test::FakeGpu, public detail::state::DeviceKernelMaker {
 public:
  KernelDevice() : FakeGpu({9, 0}) { launches().clear(); }

  c10::DeviceType type() const override { return c10::DeviceType::CPU; }

  bool can_compile() noexcept override { return true; }
  int multiprocessors() override { return 1; }
  std::shared_ptr<const detail::state::DeviceKernel> make_kernel(std::string source,
                                                                 const std::string& name) override {
    struct Kernel final : detail::state::DeviceKernel {
      explicit Kernel(std::string one) : name(std::move(one)) {}
      void launch_with(const detail::state::KernelGrid&, void** arguments) const override {
        launches().push_back(
            {name, *static_cast<void**>(arguments[0]), *static_cast<void**>(arguments[1])});
      }
      std::string name;
    };
    EXPECT_NE(source.find("void"), std::string::npos);
    return std::make_shared<Kernel>(name);
  }

  static std::vector<Launch>& launches() {
    static std::vector<Launch> all;
    return all;
  }
  /// Names of the kernels since the last call.
  static Names take() {
    Names names;
    for (const auto& launch : launches()) names.push_back(launch.name);
    launches().clear();
    return names;
  }
};

TEST(Kernels, TakeThePlaceOfSeveralOperators) {
  const KernelDevice device;
  nn::Linear linear(8, 8, nn::Activation::kGelu);
  nn::LayerNorm norm(torch::nn::LayerNormOptions({8}));
  nn::SwiGLU mlp(8, 8);
  const auto x = torch::randn({2, 3, 8}).requires_grad_();
  linear(x).sum().backward();
  EXPECT_EQ(device.take(), (Names{"activation", "activation_backward", "column_sums"}));
  const auto [y, sum] = norm->forward_add(x, x);
  (y + sum).sum().backward();
  EXPECT_EQ(device.take(), (Names{"norm_forward", "norm_backward", "column_sums"}));
  mlp(x).sum().backward();
  EXPECT_EQ(device.take(), (Names{"silu_product", "silu_product_backward"}));
  nn::CausalSelfAttention attend(
      nn::CausalSelfAttentionOptions{.embed_dim = 8, .num_heads = 2, .rotary_base = 10000});
  attend(x).sum().backward();
  EXPECT_EQ(device.take(), (Names{"rotate", "rotate", "rotate", "rotate"}));
  const auto loss = nn::cross_entropy(torch::randn({4, 5}, torch::requires_grad()),
                                      torch::zeros({4}, torch::kLong));
  loss.backward();
  EXPECT_EQ(device.take(), (Names{"cross_entropy", "mean_of_rows", "cross_entropy_backward"}));
}

TEST(Kernels, AreNotAskedForOtherDtypesLayoutsAndEmptyTensors) {
  const KernelDevice device;
  nn::RMSNorm norm(8, 1e-6);
  std::ignore = norm(torch::randn({8, 2}).t());
  std::ignore = norm(torch::randn({0, 8}));
  norm->to(torch::kDouble);
  std::ignore = norm(torch::randn({2, 8}, torch::kDouble));
  std::ignore = nn::cross_entropy(torch::randn({2, 5, 3}), torch::zeros({2, 3}, torch::kLong));
  std::ignore = nn::cross_entropy(torch::randn({2, 5}), torch::softmax(torch::randn({2, 5}), 1));
  EXPECT_EQ(device.take(), Names{});
  norm->to(torch::kFloat);
  std::ignore = norm(torch::randn({2, 8}));
  EXPECT_EQ(device.take(), Names{"norm_forward"});
}

TEST(Kernels, LeaveGradientsThatAreDifferentiatedAgainToOperators) {
  const KernelDevice device;
  const auto x = torch::randn({2, 8}).requires_grad_();
  nn::LayerNorm norm(torch::nn::LayerNormOptions({8}));
  const auto gradient = torch::autograd::grad({norm(x).pow(3).sum()}, {x}, {},
                                              /*retain_graph=*/true, /*create_graph=*/true)[0];
  EXPECT_TRUE(gradient.requires_grad());
  EXPECT_EQ(device.take(), Names{"norm_forward"});
}

TEST(Kernels, LeaveTheCurvatureOfTheBiasToOperators) {
  const KernelDevice device;
  for (const auto activation : {nn::Activation::kGelu, nn::Activation::kSilu}) {
    nn::Linear layer(8, 8, activation);
    const auto x = torch::randn({2, 8}).requires_grad_();
    const auto second = [&](const torch::Tensor& y) {
      const auto first = torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true,
                                               /*create_graph=*/true)[0];
      return torch::autograd::grad({first.pow(2).sum()}, {layer->weight, layer->bias});
    };
    const auto sums = torch::linear(x, layer->weight, layer->bias);
    const auto expected =
        second(activation == nn::Activation::kGelu ? torch::gelu(sums) : torch::silu(sums));
    const auto found = second(layer(x));
    EXPECT_EQ(device.take(), Names{"activation"});
    EXPECT_TRUE(torch::allclose(found[0], expected[0])) << found[0] << expected[0];
    EXPECT_TRUE(torch::allclose(found[1], expected[1])) << found[1] << expected[1];
  }
}

/// True if backward wrote the gradient over the logits.
bool in_place(const KernelDevice& device) {
  const auto last = device.launches().back();
  EXPECT_EQ(last.name, "cross_entropy_backward");
  return last.first == last.second;
}

TEST(CrossEntropyGradient, ReplacesLogitsThatAreNotUsedElsewhere) {
  const KernelDevice device;
  torch::nn::Linear head(6, 5);
  const auto target = torch::zeros({4}, torch::kLong);
  const auto x = torch::randn({2, 2, 6});
  auto loss = nn::cross_entropy(head(x.flatten(0, 1)), target);
  loss.backward();
  EXPECT_TRUE(in_place(device));
  loss = nn::cross_entropy(head(x).flatten(0, 1), target);
  loss.backward();
  EXPECT_TRUE(in_place(device)) << "a view";
}

TEST(CrossEntropyGradient, KeepsLogitsThatSomethingCanRead) {
  const KernelDevice device;
  torch::nn::Linear head(6, 5);
  const auto target = torch::zeros({4}, torch::kLong);
  const auto x = torch::randn({4, 6});
  const auto logits = head(x);
  nn::cross_entropy(logits, target).backward();
  EXPECT_FALSE(in_place(device)) << "a variable";
  const auto whole = head(x.view({2, 2, 6}));
  nn::cross_entropy(whole.flatten(0, 1), target).backward();
  EXPECT_FALSE(in_place(device)) << "the base of a view";
  const auto capped = nn::cross_entropy(torch::tanh(head(x)), target);
  capped.backward();
  EXPECT_FALSE(in_place(device)) << "tanh saves its result";
  const auto detached = [&] {
    const auto scores = head(x);
    return std::pair{scores.detach(), nn::cross_entropy(scores, target)};
  }();
  detached.second.backward();
  EXPECT_FALSE(in_place(device)) << "a detached tensor";
  const auto loss = nn::cross_entropy(head(x), target);
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_FALSE(in_place(device)) << "a second backward";
}

}  // namespace
}  // namespace accelerate
