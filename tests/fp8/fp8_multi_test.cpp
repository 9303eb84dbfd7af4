// Training in 8 bits on several processes: averaged, sharded, resumed.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "accelerator/nets.h"
#include "core/captured_log.h"
#include "core/text.h"
#include "fp8/delayed_scaling.h"
#include "support/has.h"
#include "support/on_processes.h"
#include "support/shared_folder.h"

namespace accelerate {
namespace {

using test::anew;
using test::SharedFolder;
using Plugin = FullyShardedDataParallelPlugin;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(5);
    first = register_module("first", torch::nn::Linear(16, 32));
    middle = register_module("middle", torch::nn::Linear(32, 32));
    ours = register_module("ours", nn::Linear(32, 48));
    last = register_module("last", torch::nn::Linear(48, 16));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return last(torch::relu(ours(torch::relu(middle(torch::relu(first(x)))))));
  }
  torch::nn::Linear first = nullptr, middle = nullptr, last = nullptr;
  nn::Linear ours = nullptr;
};
TORCH_MODULE(Net);

AcceleratorOptions in_8_bits(const KwargsHandler& recipe,
                             const std::optional<Plugin>& plugin = std::nullopt) {
  return anew(
      {.mixed_precision = PrecisionType::kFp8, .fsdp_plugin = plugin, .kwargs_handlers = {recipe}});
}

const std::vector<KwargsHandler>& recipes() {
  static const std::vector<KwargsHandler> all{
      AORecipeKwargs{}, AORecipeKwargs{.config = Float8LinearConfig{.recipe = "rowwise"}},
      TERecipeKwargs{.amax_history_len = 4}};
  return all;
}

struct Training {
  explicit Training(const AcceleratorOptions& options) : accelerator(options) {
    auto prepared = accelerator.prepare(net, SGD(net->parameters(), {.lr = 0.05, .momentum = 0.5}));
    model = std::get<0>(prepared);
    optimizer = std::get<1>(prepared);
  }
  /// The batch of a process is a part of that of all.
  double step(int number) {
    torch::manual_seed(100 + number);
    const auto all = torch::randn({8, 16});
    const auto part = 8 / accelerator.num_processes();
    const auto x =
        all.slice(0, accelerator.process_index() * part, (accelerator.process_index() + 1) * part);
    const auto loss = (model(x) - x.roll(1, 1)).pow(2).mean();
    accelerator.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    return accelerator.reduce(loss.detach(), Reduction::kMean).item<double>();
  }
  [[nodiscard]] std::vector<torch::Tensor> weights() const {
    std::vector<torch::Tensor> all;
    for (const auto& entry : model.state_dict()) all.push_back(entry.value().detach().clone());
    return all;
  }

  Net net;
  Accelerator accelerator;
  PreparedModel<Net> model;
  AcceleratedOptimizer optimizer;
};

bool equal(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!a[i].equal(b[i])) return false;
  }
  return a.size() == b.size();
}

TEST(Fp8OnProcesses, ScalesAndWeightsAreTheSameOnAllOfThem) {
  on_processes(2, [] {
    for (const auto& recipe : recipes()) {
      Training run(in_8_bits(recipe));
      const double first = run.step(0);
      for (int i = 1; i < 12; ++i) run.step(i);
      EXPECT_LT(run.step(0), first);
      EXPECT_TRUE(test::same_everywhere(run.weights()));
      // The batches of the processes have other maxima.
      const auto& scaling = run.model._core()->delayed_scaling;
      EXPECT_EQ(scaling != nullptr, has_transformer_engine_layers(*run.net));
      EXPECT_TRUE(!scaling || test::same_everywhere(scaling->scales()));
    }
  });
}

/// The model of Python's own tests, and a layer at its end that recipes of AO leave out.
torch::nn::Sequential upstream_model() {
  return torch::nn::Sequential(torch::nn::Linear(32, 32), torch::nn::Linear(32, 32),
                               torch::nn::LayerNorm(torch::nn::LayerNormOptions({32})),
                               torch::nn::Linear(32, 16));
}

TEST(Fp8OnProcesses, LayersAreConvertedAtEveryStageOfDeepSpeed) {
  on_processes(2, [] {
    const std::vector<KwargsHandler> two{AORecipeKwargs{}, TERecipeKwargs{}};
    for (const std::int64_t stage : {1, 2, 3}) {
      for (const auto& recipe : two) {
        auto options = in_8_bits(recipe);
        options.deepspeed_plugin = DeepSpeedPlugin{
            .hf_ds_config = Value::Dict{{"train_micro_batch_size_per_gpu", 4},
                                        {"zero_optimization", Value::Dict{{"stage", stage}}}}};
        Accelerator accelerator(options);
        auto net = upstream_model();
        auto [model, optimizer] = accelerator.prepare(net, SGD(net->parameters(), {.lr = 0.05}));
        EXPECT_TRUE(has_fp8_layers(*net));
        EXPECT_EQ(has_ao_layers(*net), std::holds_alternative<AORecipeKwargs>(recipe));
        EXPECT_EQ(accelerator.state().deepspeed_plugin()->zero_stage, stage);
        const auto loss = model(torch::ones({4, 32})).square().mean();
        accelerator.backward(loss);
        optimizer.step();
        EXPECT_TRUE(loss.isfinite().item<bool>());
      }
    }
  });
}

TEST(Fp8OnProcesses, ShardedModelsTrainAsWholeOnes) {
  on_processes(2, [] {
    for (const auto& recipe : recipes()) {
      Training whole(in_8_bits(recipe));
      std::vector<double> losses;
      for (int i = 0; i < 6; ++i) losses.push_back(whole.step(i));
      for (const auto strategy : {ShardingStrategy::kShardGradOp, ShardingStrategy::kFullShard}) {
        Training sharded(in_8_bits(recipe, Plugin{.sharding_strategy = strategy}));
        EXPECT_EQ(fp8_layers(*sharded.net).size(), fp8_layers(*whole.net).size());
        // Weights are cast from bfloat16 here.
        for (int i = 0; i < 6; ++i) EXPECT_NEAR(sharded.step(i), losses[i], 0.03 * losses[i]);
      }
    }
  });
}

TEST(Fp8OnProcesses, LayersThatAreCutStayInHighPrecisionAndAreNamed) {
  on_processes(2, [](PartialState& state) {
    for (const bool is_te : {false, true}) {
      test::CapturedLog log;
      auto options =
          in_8_bits(is_te ? KwargsHandler(TERecipeKwargs{}) : KwargsHandler(AORecipeKwargs{}));
      options.parallelism_config = ParallelismConfig{.tp_size = 2};
      Accelerator accelerator(options);
      Net net;
      apply_tp_plan(*net, make_tp_plan({{"first", "colwise"}, {"middle", "rowwise"}}),
                    accelerator.torch_device_mesh());
      auto [model, optimizer] = accelerator.prepare(net, SGD(net->parameters(), {.lr = 0.05}));
      const auto expected =
          is_te ? std::vector<std::string>{"ours", "last"} : std::vector<std::string>{"ours"};
      for (int step = 0; step < 2; ++step) {
        EXPECT_EQ(fp8_layers(*net), expected);
        accelerator.backward(model(torch::ones({4, 16})).square().mean());
        optimizer.step();
        optimizer.zero_grad();
      }
      const auto text = detail::join(log.messages(), "\n");
      const auto said = is_te ? "fp8: 2 linear layers stay in high precision, since their products "
                                "are computed by tensor parallelism: first, middle."
                              : "fp8: 1 linear layers stay in high precision, since their products "
                                "are computed by tensor parallelism: middle.";
      EXPECT_EQ(static_cast<bool>(test::has(text, said)), state.is_main_process()) << text;
    }
  });
}

TEST(Fp8OnProcesses, SayThatWeightsAreNotGatheredIn8Bits) {
  on_processes(2, [](PartialState& state) {
    test::CapturedLog log;
    Training run(in_8_bits(AORecipeKwargs{}, Plugin{}));
    const auto said = test::has(detail::join(log.messages()), "enable_fsdp_float8_all_gather");
    EXPECT_EQ(static_cast<bool>(said), state.is_main_process());
  });
}

TEST(Fp8OnProcesses, ResumeWithTheBitsOfARunThatWasNotInterrupted) {
  const SharedFolder folder;
  on_processes(2, folder.options(), [&] {
    int number = 0;
    for (const auto& recipe : recipes()) {
      const auto checkpoint = folder.path() / std::to_string(number++);
      Training whole(in_8_bits(recipe));
      for (int i = 0; i < 3; ++i) whole.step(i);
      (void)whole.accelerator.save_state(checkpoint);
      for (int i = 3; i < 6; ++i) whole.step(i);
      Training resumed(in_8_bits(recipe));
      resumed.accelerator.load_state(checkpoint);
      for (int i = 3; i < 6; ++i) resumed.step(i);
      EXPECT_TRUE(equal(whole.weights(), resumed.weights()));
    }
  });
}

TEST(Fp8OnProcesses, AccumulatedBatchesAndUnevenInputsTrain) {
  on_processes(2, [](PartialState& state) {
    for (const auto& recipe : recipes()) {
      Training run(in_8_bits(recipe));
      for (int i = 0; i < 4; ++i) {
        const auto x = torch::full({2, 16}, 0.1 * (i + 1));
        if (i % 2 == 0) {
          const auto local = run.accelerator.no_sync(run.model);
          run.accelerator.backward(run.model(x).pow(2).mean());
        } else {
          run.accelerator.backward(run.model(x).pow(2).mean());
          run.optimizer.step();
          run.optimizer.zero_grad();
        }
      }
      EXPECT_TRUE(test::same_everywhere(run.weights()));
      run.accelerator.join_uneven_inputs(std::tie(run.model), {.even_batches = false}, [&] {
        for (int i = 0; i < 2 + state.process_index(); ++i) {
          run.accelerator.backward(run.model(torch::ones({2, 16})).pow(2).mean());
          run.optimizer.step();
          run.optimizer.zero_grad();
        }
      });
      EXPECT_TRUE(test::same_everywhere(run.weights()));
    }
  });
}

}  // namespace
}  // namespace accelerate
