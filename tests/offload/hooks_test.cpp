// Hooks around the forward of a model.
#include <accelerate/big_modeling/hooks.h>
#include <accelerate/errors.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>

namespace accelerate {
namespace {

struct DoubleImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x, double by) { return x * by; }
};
TORCH_MODULE(Double);

/// Adds to the argument before, and to the result after; notes what happens.
class Adding final : public ModelHook {
 public:
  Adding(std::string name, std::string& log, bool no_grad = false)
      : name_(std::move(name)), log_(log), no_grad_(no_grad) {}
  void init_hook(torch::nn::Module&) override { log_ += name_ + ".init "; }
  ModelArgs pre_forward(torch::nn::Module&, ModelArgs args) override {
    log_ += name_ + ".pre ";
    args[0] = args[0].toTensor() + 1;
    return args;
  }
  c10::IValue post_forward(torch::nn::Module&, c10::IValue output) override {
    log_ += name_ + ".post ";
    return output.toTensor() + 10;
  }
  void detach_hook(torch::nn::Module&) override { log_ += name_ + ".detach "; }
  bool no_grad() const override { return no_grad_; }

 private:
  std::string name_;
  std::string& log_;
  bool no_grad_;
};

TEST(Hooked, RunsAHookBeforeAndAfterTheForward) {
  std::string log;
  Hooked model((Double()));
  EXPECT_EQ(model(torch::ones({}), 2.0).item<float>(), 2);
  model.add_hook(std::make_shared<Adding>("a", log));
  EXPECT_EQ(model(torch::ones({}), 2.0).item<float>(), 14);
  EXPECT_EQ(log, "a.init a.pre a.post ");
  model.remove_hook();
  EXPECT_EQ(model(torch::ones({}), 2.0).item<float>(), 2);
  EXPECT_EQ(log, "a.init a.pre a.post a.detach ");
}

TEST(Hooked, AnotherHookReplacesTheFirstOrFollowsIt) {
  std::string log;
  Hooked model((Double()));
  model.add_hook(std::make_shared<Adding>("a", log));
  model.add_hook(std::make_shared<Adding>("b", log));
  EXPECT_EQ(log, "a.init a.detach b.init ");
  log.clear();
  model.add_hook(std::make_shared<Adding>("c", log), {.append = true});
  EXPECT_EQ(model(torch::ones({}), 2.0).item<float>(), 26);
  EXPECT_EQ(log, "c.init b.pre c.pre b.post c.post ") << "the same order before and after";
}

TEST(Hooked, AHookMayTurnGradientsOff) {
  std::string log;
  Hooked model((Double()));
  const auto x = torch::ones({1}, torch::requires_grad());
  EXPECT_TRUE(model(x, 2.0).requires_grad());
  model.add_hook(std::make_shared<Adding>("a", log, /*no_grad=*/true));
  EXPECT_FALSE(model(x, 2.0).requires_grad());
}

TEST(Hooked, MovesToADeviceAndBack) {
  Hooked model((Double()));
  // The meta device has no way back: moving is seen by the device alone.
  model.add_hook(
      std::make_shared<AlignDevicesHook>(AlignDevicesOptions{.execution_device = torch::kMeta}));
  EXPECT_TRUE(model(torch::ones({2}), 2.0).is_meta());
  model.add_hook(std::make_shared<AlignDevicesHook>(
      AlignDevicesOptions{.execution_device = torch::kCPU, .io_same_device = true}));
  EXPECT_TRUE(model(torch::ones({2}), 2.0).is_cpu());
}

TEST(Hooked, NothingToHookIsRefused) {
  EXPECT_THROW(Hooked(Double(nullptr)), ArgumentError);
  Hooked model((Double()));
  EXPECT_THROW(model.add_hook(nullptr), ArgumentError);
}

}  // namespace
}  // namespace accelerate
