// Types, values on one process only, optimizers with a state, parameters of all kinds.
#include <gtest/gtest.h>

#include "accelerator/nets.h"
#include "core/text.h"
#include "sharding/sharded_run.h"
#include "support/has.h"
#include "support/message_of.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using detail::str;
using test::anew;
using test::distance;
using test::expect_equal;
using test::run;
using test::Sharded;
using test::sharded;
using test::ShardedRun;
using test::ShardLevel;
using test::ShardSpec;
using test::Step;
using test::TinyGpt;
namespace F = torch::nn::functional;

constexpr ShardLevel kLevels[] = {ShardLevel::kOptimizer, ShardLevel::kGradients,
                                  ShardLevel::kParameters};

torch::Tensor input_of(int rank, int step) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(100 * step + rank);
  return torch::randn({8, 64}, generator);
}

torch::nn::Sequential two_layers() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(64, 64), torch::nn::Linear(64, 64));
}

TEST(ShardedEdges, ComputesInBfloat16FromMastersInFloat32) {
  on_processes(2, [] {
    const int rank = PartialState().process_index();
    // The same by hand: a bfloat16 net, gradients averaged and stepped in float32.
    auto net = two_layers();
    std::vector<torch::Tensor> masters;
    for (const auto& one : net->parameters()) masters.push_back(one.detach().clone());
    net->to(torch::kBFloat16);
    for (int step = 0; step < 4; ++step) {
      std::vector<torch::Tensor> sums(masters.size());
      for (int other = 0; other < 2; ++other) {
        net->zero_grad();
        net->forward(input_of(other, step).to(torch::kBFloat16)).pow(2).mean().backward();
        const auto parameters = net->parameters();
        for (std::size_t i = 0; i < sums.size(); ++i) {
          const auto gradient = parameters[i].grad().to(torch::kFloat);
          sums[i] = other == 0 ? gradient : sums[i] + gradient;
        }
      }
      const torch::NoGradGuard no_grad;
      for (std::size_t i = 0; i < masters.size(); ++i) {
        masters[i].sub_(0.5 * (sums[i] / 2));
        net->parameters()[i].copy_(masters[i]);
      }
    }
    for (const auto level : kLevels) {
      ShardSpec spec{.level = level, .units = {"0", "1"}};
      spec.precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
      Sharded<torch::nn::Sequential> training(two_layers(), spec);
      auto optimizer = training.accelerator.prepare(
          torch::optim::SGD(training.net->parameters(), torch::optim::SGDOptions(0.5)));
      EXPECT_EQ(training.net->parameters()[0].scalar_type(), torch::kBFloat16);
      for (int step = 0; step < 4; ++step) {
        const auto x = input_of(rank, step).to(torch::kBFloat16);
        training.accelerator.backward(training.model(x).pow(2).mean());
        optimizer.step();
        optimizer.zero_grad();
      }
      const auto state = training.model.state_dict();
      if (rank != 0) continue;
      ASSERT_EQ(state.size(), masters.size());
      for (std::size_t i = 0; i < masters.size(); ++i) {
        EXPECT_EQ(state[i].value().scalar_type(), torch::kFloat);
        EXPECT_TRUE(state[i].value().equal(masters[i]))
            << "level " << static_cast<int>(level) << ", parameter " << i << ": "
            << distance(state[i].value(), masters[i]);
      }
    }
  });
}

TEST(ShardedEdges, DividesFloat16GradientsBeforeAndAfterTheSum) {
  EXPECT_EQ(detail::sharding::division_before(8), 4);
  EXPECT_EQ(detail::sharding::division_before(3), 2);
  EXPECT_EQ(detail::sharding::division_before(32), 8);
  EXPECT_EQ(detail::sharding::division_before(1), 1);
  on_processes(3, [] {
    ShardSpec spec{.level = ShardLevel::kGradients};
    spec.precision = {.reduce_dtype = torch::kHalf};
    Sharded<torch::nn::Sequential> training(two_layers(), spec);
    auto optimizer = training.accelerator.prepare(
        torch::optim::SGD(training.net->parameters(), torch::optim::SGDOptions(0.5)));
    // The sum of three gradients is beyond float16.
    training.accelerator.backward(training.net->ptr(0)->as<torch::nn::Linear>()->weight.sum() *
                                  40000);
    const auto& gradient = optimizer.param_groups()[0].params()[0].grad();
    EXPECT_TRUE(gradient.isfinite().all().item<bool>());
    if (gradient.numel() > 0) {
      EXPECT_NEAR(gradient.max().item<double>(), 40000, 32);
    }
    const auto inf = training.engine->found_inf_over_processes(
        torch::full({}, PartialState().process_index() == 2 ? 1.0F : 0.0F));
    EXPECT_EQ(inf.item<float>(), 1) << "what one process found all know";
  });
}

TEST(ShardedEdges, TakesTheValuesOfTheFirstProcessAlone) {
  on_processes(3, [] {
    const auto wanted = two_layers();
    for (const auto level : kLevels) {
      auto net = two_layers();
      if (PartialState().process_index() != 0) {
        net = torch::nn::Sequential(nullptr);
        const auto empty = init_empty_weights();
        net = two_layers();
      }
      Sharded<torch::nn::Sequential> training(net, {.level = level, .units = {"0", "1"}});
      const auto whole = gathered_parameters(training.model, {}, [&] {
        std::vector<torch::Tensor> all;
        for (const auto& one : training.net->parameters()) all.push_back(one.detach().clone());
        return all;
      });
      for (std::size_t i = 0; i < whole.size(); ++i) {
        EXPECT_TRUE(whole[i].equal(wanted->parameters()[i])) << "level " << static_cast<int>(level);
      }
    }
  });
}

TEST(ShardedEdges, MovesTheStateOfAnOptimizerThatHasStepped) {
  on_processes(2, [] {
    const int rank = PartialState().process_index();
    const auto train = [&](bool shards, bool fused) {
      auto net = two_layers();
      std::shared_ptr<torch::optim::Optimizer> adamw;
      if (fused) {
        adamw = std::make_shared<AdamW>(net->parameters(), AdamWOptions{.lr = 0.01});
      } else {
        adamw = std::make_shared<torch::optim::AdamW>(net->parameters(),
                                                      torch::optim::AdamWOptions(0.01));
      }
      const auto before = torch::ones({4, 64});
      net->forward(before).pow(2).mean().backward();
      adamw->step();
      net->zero_grad();
      std::optional<Sharded<torch::nn::Sequential>> engine;
      std::optional<Accelerator> plain;
      if (shards) {
        engine.emplace(net, ShardSpec{.level = ShardLevel::kParameters, .units = {"0", "1"}});
      } else {
        plain.emplace(anew());
      }
      auto& accelerator = shards ? engine->accelerator : *plain;
      auto model = shards ? engine->model : accelerator.prepare(net);
      auto optimizer = accelerator.prepare(adamw);
      for (int step = 0; step < 3; ++step) {
        accelerator.backward(model(input_of(rank, step)).pow(2).mean());
        optimizer.step();
        optimizer.zero_grad();
      }
      return gathered_parameters(model, {}, [&] { return net->parameters()[0].detach().clone(); });
    };
    for (const bool fused : {true, false}) {
      EXPECT_TRUE(train(true, fused).equal(train(false, fused))) << "fused " << fused;
    }
  });
}

/// A number, parts that may be unused, and two ways through it.
struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    scale = register_parameter("scale", torch::full({}, 2.0F));
    nothing = register_parameter("nothing", torch::empty({0}));
    register_module("encoder", encoder);
    register_module("decoder", decoder);
    register_module("unused", unused);
  }
  torch::Tensor encode(const torch::Tensor& x) { return torch::tanh(encoder(x)) * scale; }
  torch::Tensor decode(const torch::Tensor& x) { return decoder(x); }
  torch::Tensor forward(const torch::Tensor& x) { return decode(encode(x)); }
  torch::Tensor scale, nothing;
  torch::nn::Linear encoder{64, 64}, decoder{64, 64}, unused{64, 64};
};
TORCH_MODULE(Mixed);

TEST(ShardedEdges, TrainsScalarsAndModelsOfSeveralFunctions) {
  on_processes(2, [] {
    const int rank = PartialState().process_index();
    for (const auto level : kLevels) {
      torch::manual_seed(1);
      Mixed net, reference;
      test::copy_parameters(reference, net);
      ShardSpec spec{
          .level = level, .skip_globally_unused = true, .units = {"encoder", "decoder", "unused"}};
      Sharded<Mixed> training(net, spec);
      auto optimizer = training.accelerator.prepare(
          torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.5)));
      torch::optim::SGD alone(reference->parameters(), torch::optim::SGDOptions(0.5));
      for (int step = 0; step < 4; ++step) {
        const auto x = input_of(rank, step);
        const auto hidden = training.model->encode(x);
        training.accelerator.backward(training.model->decode(hidden).pow(2).mean());
        optimizer.step();
        optimizer.zero_grad();
        reference->zero_grad();
        for (int other = 0; other < 2; ++other) {
          (reference->forward(input_of(other, step)).pow(2).mean() / 2).backward();
        }
        alone.step();
        const torch::NoGradGuard no_grad;
        EXPECT_LT(distance(training.model(x), reference->forward(x)), 1e-5)
            << "evaluation at level " << static_cast<int>(level);
      }
      gathered_parameters(training.model, {}, [&] {
        EXPECT_LT(distance(net->scale, reference->scale), 1e-5);
        EXPECT_LT(distance(net->encoder, reference->encoder), 1e-5);
        EXPECT_LT(distance(net->unused, reference->unused), 1e-9) << "without a gradient";
      });
      if (level == ShardLevel::kParameters) {
        EXPECT_EQ(training.engine->stats().full_bytes, 0);
      }
    }
  });
}

TEST(ShardedEdges, ParametersNobodyUsedKeepNoGradientIfThatIsWanted) {
  on_processes(2, [] {
    for (const bool skips : {false, true}) {
      Mixed net;
      Sharded<Mixed> training(net,
                              {.level = ShardLevel::kGradients, .skip_globally_unused = skips});
      auto optimizer = training.accelerator.prepare(
          torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.5)));
      training.accelerator.backward(training.model(torch::ones({1, 64})).sum());
      const auto& last = optimizer.param_groups()[0].params().back();  // unused.bias
      EXPECT_EQ(last.grad().defined(), !skips);
    }
  });
}

TEST(ShardedEdges, ChangesInsideOfGatheredParametersReachAllProcesses) {
  on_processes(3, [] {
    const int rank = PartialState().process_index();
    for (const auto level : kLevels) {
      Sharded<torch::nn::Sequential> training(two_layers(), {.level = level, .units = {"0", "1"}});
      auto& net = training.net;
      gathered_parameters(training.model, {.modifier_rank = 1}, [&] {
        const torch::NoGradGuard no_grad;
        if (rank == 1) net->parameters()[2].fill_(7);
      });
      gathered_parameters(training.model, {}, [&] {
        EXPECT_TRUE(net->parameters()[2].eq(7).all().item<bool>())
            << "level " << static_cast<int>(level);
        EXPECT_TRUE(net->parameters()[0].equal(two_layers()->parameters()[0]));
      });
    }
  });
}

/// A second tensor with the elements of a weight.
struct TwinsImpl : torch::nn::Module {
  TwinsImpl() {
    register_module("first", first);
    twin = register_parameter("twin", first->weight.detach());
  }
  torch::Tensor forward(const torch::Tensor& x) { return first(x).matmul(twin); }
  torch::nn::Linear first{64, 64};
  torch::Tensor twin;
};
TORCH_MODULE(Twins);

TEST(ShardedEdges, TensorsWithTheSameElementsStayTied) {
  on_processes(2, [] {
    for (const auto level : kLevels) {
      torch::manual_seed(1);
      Sharded<Twins> training(Twins(), {.level = level, .units = {"first"}});
      auto optimizer = training.accelerator.prepare(
          torch::optim::SGD(training.net->parameters(), torch::optim::SGDOptions(0.5)));
      torch::manual_seed(1);
      const auto weight = Twins()->first->weight.detach().clone().requires_grad_();
      const auto x = torch::ones({2, 64});
      for (int step = 0; step < 2; ++step) {
        training.accelerator.backward(training.model(x).mean());
        optimizer.step();
        optimizer.zero_grad();
      }
      gathered_parameters(training.model, {}, [&] {
        EXPECT_TRUE(training.net->twin.equal(training.net->first->weight));
        EXPECT_FALSE(training.net->twin.equal(weight)) << "it was stepped";
      });
    }
  });
}

TEST(ShardedEdges, ALossMayUseSeveralForwardsAndABackwardMayKeepItsGraph) {
  on_processes(2, [] {
    const int rank = PartialState().process_index();
    const auto train = [&](std::optional<ShardLevel> level) {
      auto net = two_layers();
      std::optional<Sharded<torch::nn::Sequential>> engine;
      std::optional<Accelerator> plain;
      if (level) {
        engine.emplace(net, ShardSpec{.level = *level, .units = {"0", "1"}});
      } else {
        plain.emplace(anew());
      }
      auto& accelerator = level ? engine->accelerator : *plain;
      auto model = level ? engine->model : accelerator.prepare(net);
      auto optimizer =
          accelerator.prepare(torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.5)));
      for (int step = 0; step < 3; ++step) {
        const auto one = model(input_of(rank, step));
        const auto two = model(input_of(rank, step + 50));
        const auto loss = (one - two).pow(2).mean();
        accelerator.backward(loss, {.retain_graph = true});
        accelerator.backward(loss);
        optimizer.step();
        optimizer.zero_grad();
      }
      return gathered_parameters(model, {}, [&] { return net->parameters()[0].detach().clone(); });
    };
    const auto wanted = train(std::nullopt);
    for (const auto level : kLevels) {
      EXPECT_TRUE(torch::allclose(train(level), wanted, 1e-6, 1e-7))
          << "level " << static_cast<int>(level);
    }
  });
}

TEST(ShardedEdges, SparseGradientsAreRefusedByName) {
  on_processes(2, [] {
    torch::nn::Sequential net(torch::nn::Embedding(torch::nn::EmbeddingOptions(8, 8).sparse(true)));
    const auto shard = [&] {
      Sharded<torch::nn::Sequential> training(net, {.level = ShardLevel::kGradients});
    };
    EXPECT_TRUE(test::has(test::message_of<UnsupportedError>(shard),
                          "the gradient of '0.weight' is sparse"));
  });
}

TEST(ShardedEdges, AGroupThatAPreparedOptimizerGetsIsSharded) {
  on_processes(2, [] {
    const auto train = [](std::optional<ShardLevel> level) {
      Sharded<torch::nn::Sequential> training(
          two_layers(), {.level = level.value_or(ShardLevel::kGradients), .units = {"0", "1"}},
          level.has_value());
      const auto all = training.net->parameters();
      auto optimizer = training.accelerator.prepare(
          AdamW(std::vector{all[0], all[1]}, AdamWOptions{.lr = 0.01}));
      const auto step = [&](int number) {
        training.accelerator.backward(
            training.model(input_of(PartialState().process_index(), number)).pow(2).mean());
        optimizer.step();
        training.net->zero_grad();
      };
      step(0);
      optimizer.add_param_group(torch::optim::OptimizerParamGroup(std::vector{all[2], all[3]}));
      for (const int number : {1, 2, 3}) step(number);
      return gathered_parameters(training.model, {}, [&] {
        std::vector<torch::Tensor> values;
        for (const auto& one : all) values.push_back(one.detach().clone());
        return values;
      });
    };
    const auto wanted = train(std::nullopt);
    for (const auto level : kLevels) {
      const auto values = train(level);
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        EXPECT_TRUE(values[i].equal(wanted[i])) << "level " << static_cast<int>(level) << ", " << i;
      }
    }
  });
}

/// Blocks that `ParallelismConfig` finds by itself.
TEST(ShardedEdges, AParallelismConfigShardsAndReplicates) {
  on_processes(4, [] {
    const auto train = [](const ParallelismConfig& config) {
      Accelerator accelerator(anew({.parallelism_config = config}));
      torch::manual_seed(3);
      TinyGpt net;
      auto [model, optimizer] =
          accelerator.prepare(net, SGD(net->parameters(), {.lr = 0.125, .momentum = 0.5}));
      std::vector<double> losses;
      for (int step = 0; step < 4; ++step) {
        auto generator =
            at::make_generator<at::CPUGeneratorImpl>(10 * step + accelerator.process_index());
        const auto words =
            torch::randint(64, {4, 9}, generator, torch::TensorOptions(torch::kLong));
        const auto loss = F::cross_entropy(model(words.slice(1, 0, 8)).reshape({-1, 64}),
                                           words.slice(1, 1).reshape(-1));
        accelerator.backward(loss);
        accelerator.clip_grad_norm_(model.parameters(), 1.0);
        optimizer.step();
        optimizer.zero_grad();
        losses.push_back(accelerator.reduce(loss.detach(), Reduction::kMean).item<double>());
      }
      return losses;
    };
    const auto wanted = train({.dp_replicate_size = 4});
    for (const auto& config : {ParallelismConfig{.dp_shard_size = 4},
                               ParallelismConfig{.dp_replicate_size = 2, .dp_shard_size = 2}}) {
      const auto losses = train(config);
      for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(losses[i], wanted[i], 1e-5);
    }
  });
}

}  // namespace
}  // namespace accelerate
