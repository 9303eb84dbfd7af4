// Adapters on packed weights, trained by several processes.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "accelerator/nets.h"
#include "support/has.h"
#include "support/message_of.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using test::anew;
using test::has;
using test::message_of;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(6);
    first = register_module("first", nn::LoraLinear(64, 128, nn::LoraOptions{.r = 4}));
    head = register_module("head", torch::nn::Linear(128, 4));
  }
  torch::Tensor forward(const torch::Tensor& x) { return head(torch::relu(first(x))); }
  nn::LoraLinear first{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

BnbQuantizationConfig four_bits() {
  return {.load_in_4bit = true,
          .bnb_4bit_quant_type = "nf4",
          .bnb_4bit_compute_dtype = FloatType::kFp32};
}

/// The adapters after 3 steps of `rows` rows from `begin` on.
StateDict trained(std::int64_t begin, std::int64_t rows, bool alone) {
  Net net;
  const auto parameters = nn::mark_only_lora_as_trainable(*net);
  Accelerator accelerator(anew());
  const auto quantized = load_and_quantize_model(net, four_bits());
  SGD sgd(parameters, {.lr = 0.1});
  const auto step = [&](const auto& model, const auto& backward) {
    for (int i = 0; i < 3; ++i) {
      torch::manual_seed(static_cast<std::uint64_t>(100 + i));
      backward(model(torch::randn({8, 64}).narrow(0, begin, rows)).square().mean());
      sgd.step();
      sgd.zero_grad();
    }
  };
  if (alone) {
    step(quantized, [](const torch::Tensor& loss) { loss.backward(); });
  } else {
    const auto model = accelerator.prepare(quantized);
    step(model, [&](const torch::Tensor& loss) { accelerator.backward(loss); });
  }
  return nn::lora_state_dict(*net);
}

TEST(AdaptersOnProcesses, TrainAsOneProcessWithTheWholeBatch) {
  on_processes(2, [] {
    const auto rank = PartialState().process_index();
    const auto together = trained(4 * rank, 4, /*alone=*/false);
    const auto expected = trained(0, 8, /*alone=*/true);
    for (const auto& part : expected) {
      EXPECT_TRUE(torch::allclose(together[part.key()], part.value(), 1e-4, 1e-5)) << part.key();
    }
  });
}

TEST(AdaptersOnProcesses, BeginWithTheQuantizedWeightsOfTheFirst) {
  on_processes(2, [](PartialState& state) {
    auto nested = four_bits();
    nested.bnb_4bit_use_double_quant = true;
    for (const auto& config : {four_bits(), nested, BnbQuantizationConfig{.load_in_8bit = true}}) {
      Net net;
      {
        const torch::NoGradGuard no_grad;  // other scales, and descriptions of another length
        net->first->weight.mul_(state.is_main_process() ? 1.0 : 0.31 + 1.7 * state.process_index());
      }
      const auto parameters = nn::mark_only_lora_as_trainable(*net);
      const auto quantized = load_and_quantize_model(net, config);
      const auto before = state_dict(*net)["first.weight"];
      Accelerator accelerator(anew());
      const auto model = accelerator.prepare(quantized);
      std::vector<torch::Tensor> tensors{net->first->weight.clone()};
      for (const auto& part : state_dict(*net)) {
        if (part.key().find("quant_state") == std::string::npos) tensors.push_back(part.value());
      }
      EXPECT_TRUE(test::same_everywhere(tensors));
      // What data parallelism watches is what the layer has, also after loading.
      EXPECT_TRUE(state_dict(*net)["first.weight"].is_same(before));
      load_state_dict(*net, state_dict(*net));
      EXPECT_TRUE(state_dict(*net)["first.weight"].is_same(before));
    }
  });
}

TEST(AdaptersOnProcesses, CannotBeSharded) {
  on_processes(2, [] {
    Net net;
    nn::mark_only_lora_as_trainable(*net);
    Accelerator accelerator(anew({.fsdp_plugin = FullyShardedDataParallelPlugin{}}));
    const auto quantized = load_and_quantize_model(net, four_bits());
    EXPECT_TRUE(has(
        message_of<UnsupportedError>([&] { static_cast<void>(accelerator.prepare(quantized)); }),
        "a model in 8 or 4 bits cannot be sharded"));
  });
}

}  // namespace
}  // namespace accelerate
