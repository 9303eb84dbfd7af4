// Models without memory for their weights.
#include <accelerate/big_modeling.h>
#include <accelerate/environment.h>
#include <accelerate/errors.h>
#include <accelerate/modeling.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "support/has.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

struct OddImpl : torch::nn::Module {
  OddImpl() {
    linear = register_module("linear", torch::nn::Linear(3, 4));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    scale = register_parameter("scale", torch::ones({4}));  // not by empty, rand or normal
    mask = register_buffer("mask", torch::full({2, 2}, -1.0).triu_(1));
    positions = register_buffer("positions", torch::arange(5));
  }
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::Tensor scale, mask, positions;
};
TORCH_MODULE(Odd);

TEST(EmptyWeights, ParametersAreOnTheMetaDeviceAndBuffersAreReal) {
  const auto model = init_empty_weights([] { return Odd(); });
  for (const auto& item : model->named_parameters()) {
    EXPECT_TRUE(item.value().is_meta()) << item.key();
    EXPECT_TRUE(item.value().requires_grad()) << item.key();
  }
  for (const auto& item : model->named_buffers()) EXPECT_TRUE(item.value().is_cpu()) << item.key();
  EXPECT_TRUE(model->positions.equal(torch::arange(5)));
  EXPECT_TRUE(model->mask.equal(Odd()->mask));
  for (const auto* name : {"running_mean", "running_var", "num_batches_tracked"}) {
    EXPECT_TRUE(model->norm->named_buffers()[name].equal(Odd()->norm->named_buffers()[name]))
        << name;
  }
  EXPECT_TRUE(model->scale.is_meta()) << "the member is the registered tensor";
  EXPECT_EQ(model->linear->weight.sizes(), (std::vector<std::int64_t>{4, 3}));
}

TEST(EmptyWeights, ABufferWithoutAValueIsNotMadeUp) {
  struct MaskedImpl : torch::nn::Module {
    MaskedImpl() {
      linear = register_module("linear", torch::nn::Linear(2, 2));
      register_buffer("mask", torch::empty({2, 2}).fill_(-1).triu_(1));
    }
    torch::Tensor forward(const torch::Tensor& x) { return linear->forward(x); }
    torch::nn::Linear linear{nullptr};
  };
  const auto model = init_empty_weights([] { return std::make_shared<MaskedImpl>(); });
  EXPECT_TRUE(model->named_buffers()["mask"].is_meta());
  set_module_tensor_to_device(*model, "linear.weight", torch::kCPU, {.value = torch::ones({2, 2})});
  set_module_tensor_to_device(*model, "linear.bias", torch::kCPU, {.value = torch::ones({2})});
  const auto message =
      test::message_of<StateError>([&] { (void)dispatch_model(model, DeviceMap{{"", "cpu"}}); });
  EXPECT_TRUE(test::has(message, "'mask' has no value: it is on the meta device"));
  EXPECT_TRUE(test::has(message, "A buffer that is made by torch::empty, rand or normal"));
}

TEST(EmptyWeights, BuffersTooIfWanted) {
  for (const auto& buffer :
       init_empty_weights([] { return Odd(); }, {.include_buffers = true})->buffers()) {
    EXPECT_TRUE(buffer.is_meta());
  }
  const auto patched = patch_environment({{"ACCELERATE_INIT_INCLUDE_BUFFERS", "true"}});
  EXPECT_TRUE(init_empty_weights([] { return Odd(); })->positions.is_meta());
}

TEST(EmptyWeights, AScopeEndsWithItsGuardAlsoByAnException) {
  {
    const auto scope = init_empty_weights();
    EXPECT_TRUE(torch::empty({2}).is_meta());
    EXPECT_TRUE(torch::randn({2}).is_meta());
    EXPECT_TRUE(torch::zeros({2}).is_cpu());
    EXPECT_TRUE(torch::empty({2}, torch::kCPU).is_cpu()) << "a device that is given is kept";
    EXPECT_TRUE(torch::empty_like(torch::zeros({2})).is_cpu());
    {
      const auto inner = init_on_device(torch::kCPU);
      EXPECT_TRUE(torch::empty({2}).is_cpu());
    }
    EXPECT_TRUE(torch::empty({2}).is_meta()) << "guards nest";
    std::thread([] { EXPECT_TRUE(torch::empty({2}).is_cpu()) << "of one thread"; }).join();
  }
  EXPECT_TRUE(torch::empty({2}).is_cpu());
  EXPECT_THROW((void)init_empty_weights([]() -> Odd { throw std::runtime_error("no"); }),
               std::runtime_error);
  EXPECT_TRUE(torch::empty({2}).is_cpu());
}

TEST(EmptyWeights, HundredBillionParametersTakeNoMemory) {
  const auto model = init_empty_weights([] {
    auto layers = std::make_shared<torch::nn::SequentialImpl>();
    for (int i = 0; i < 1000; ++i) {
      layers->push_back(torch::nn::Linear(torch::nn::LinearOptions(10'000, 10'000).bias(false)));
    }
    return layers;
  });
  std::int64_t count = 0;
  for (const auto& parameter : model->parameters()) count += parameter.numel();
  EXPECT_EQ(count, 100'000'000'000);
}

TEST(EmptyWeights, AnEmptyModelIsRefused) {
  EXPECT_THROW((void)init_empty_weights([] { return std::shared_ptr<OddImpl>(); }), ArgumentError);
}

}  // namespace
}  // namespace accelerate
