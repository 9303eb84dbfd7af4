// What programs do with sharded models: member functions, several models, experts, checkpoints in
// blocks, copies, changes of the module.
#include <gtest/gtest.h>

#include <optional>

#include "accelerator/nets.h"
#include "core/text.h"
#include "parallel/wrapped_engine.h"
#include "sharding/sharded_run.h"
#include "support/has.h"
#include "support/message_of.h"
#include "support/on_processes.h"

namespace accelerate::programs_test {
namespace {

using detail::str;
using test::anew;
using test::expect_equal;
using test::has;
using test::message_of;
using test::run;
using test::RunOptions;
using test::Sharded;
using test::sharded;
using test::ShardedRun;
using test::ShardLevel;
using test::ShardSpec;
using test::Step;
using test::TinyGpt;

constexpr ShardLevel kLevels[] = {ShardLevel::kOptimizer, ShardLevel::kGradients,
                                  ShardLevel::kParameters};

torch::Tensor input_of(int rank, int step) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(100 * step + rank);
  return torch::randn({8, 64}, generator);
}

torch::nn::Sequential two_layers(int seed) {
  torch::manual_seed(seed);
  return torch::nn::Sequential(torch::nn::Linear(64, 64), torch::nn::Tanh(),
                               torch::nn::Linear(64, 64));
}

/// The parameters of `net` after `steps` calls of `train(rank, step)`, whole.
template <class Net, class Model>
std::vector<torch::Tensor> whole(const Model& model, const Net& net) {
  return gathered_parameters(model, {}, [&] {
    std::vector<torch::Tensor> all;
    for (const auto& one : net->parameters()) all.push_back(one.detach().clone());
    return all;
  });
}

void expect_same(const std::vector<torch::Tensor>& values, const std::vector<torch::Tensor>& wanted,
                 const std::string& what) {
  ASSERT_EQ(values.size(), wanted.size()) << what;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_TRUE(values[i].equal(wanted[i]))
        << what << ", parameter " << i << ": " << test::distance(values[i], wanted[i]);
  }
}

TEST(ShardedPrograms, AMemberThatUsedFewerUnitsDoesNotConfuseTheNextCollective) {
  on_processes(3, [] {
    const int rank = PartialState().process_index();
    const auto words = torch::zeros({1, 8}, torch::kLong);
    for (const bool trains : {false, true}) {
      ShardedRun training({.spec = sharded(ShardLevel::kParameters)});
      const torch::AutoGradMode mode(trains);
      for (int step = 0; step < 3; ++step) {
        // The last blocks: there is no later use that would bring this process up to the others.
        if (rank == 1 && step > 0) training.net->skipped = {1, 2};
        const auto scores = training.model->forward(words);
        if (step == 1) {
          EXPECT_EQ(training.accelerator.gather(scores).size(0), 3);
        } else {
          training.accelerator.wait_for_everyone();
        }
        if (trains) training.accelerator.backward(scores.pow(2).mean());
      }
      const auto& stats = training.engine->stats();
      EXPECT_EQ(stats.full_bytes, 0) << "nothing stays gathered";
      EXPECT_GE(stats.wasted_gathers, rank == 1 ? 4 : 0);
    }
  });
}

TEST(ShardedPrograms, AMemberLeavesNoUnitBehindAfterAnEvaluation) {
  on_processes(2, [] {
    ShardedRun training({.spec = sharded(ShardLevel::kParameters, /*prefetch=*/0)});
    const torch::NoGradGuard no_grad;
    (void)training.model->forward(torch::zeros({1, 8}, torch::kLong));
    EXPECT_EQ(training.engine->stats().full_bytes, 0);
    EXPECT_TRUE(has(message_of<StateError>([&] { (void)(training.net->head->weight + 1); }),
                    "'head.weight' is sharded over 2 processes"));
  });
}

TEST(ShardedPrograms, ZeroGradDropsWhatABatchWithoutSynchronizationLeft) {
  on_processes(2, [] {
    const auto gradient = [](const RunOptions& options, bool drops) {
      ShardedRun training(options);
      if (drops) {
        (void)training.train(7, 0, /*synchronizes=*/false);
        training.optimizer.zero_grad();
        EXPECT_FALSE(training.net->head->weight.grad().defined());
      }
      (void)training.train(0, 0, true);
      return training.optimizer.param_groups()[0].params()[0].grad().clone();
    };
    EXPECT_FALSE(gradient({}, false).equal(torch::zeros({})));
    for (const auto level : kLevels) {
      for (const bool kept : {true, false}) {
        RunOptions options{.spec = sharded(level)};
        options.spec->accumulate_unsharded = kept;
        EXPECT_TRUE(gradient(options, true).equal(gradient(options, false)))
            << "level " << static_cast<int>(level) << ", kept " << kept;
      }
    }
  });
}

TEST(ShardedPrograms, TwoModelsTakeTurns) {
  on_processes(2, [] {
    const int rank = PartialState().process_index();
    const auto train = [&](std::optional<ShardLevel> level) {
      Accelerator accelerator(anew());
      const auto prepare = [&](torch::nn::Sequential net) {
        if (!level) return accelerator.prepare(net);
        auto model = accelerator.prepare_model(net, {.evaluation_mode = true});
        const auto group = accelerator.state().process_group();
        model._core()->use(std::make_shared<test::ShardedEngine>(
            *net, ShardSpec{.level = *level, .units = {"0", "2"}},
            detail::sharding::ShardProcesses{.shard = group, .all = group}, accelerator.device()));
        return model;
      };
      auto maker = two_layers(1);
      auto judge = two_layers(2);
      auto makes = prepare(maker);
      auto judges = prepare(judge);
      auto maker_step = accelerator.prepare(SGD(maker->parameters(), {.lr = 0.125}));
      auto judge_step = accelerator.prepare(SGD(judge->parameters(), {.lr = 0.125}));
      const auto set_trained = [](torch::nn::Sequential& net, bool on) {
        for (auto& one : net->parameters()) one.requires_grad_(on);
      };
      for (int step = 0; step < 4; ++step) {
        const auto made = makes(input_of(rank, step));
        accelerator.backward((judges(made.detach()) - judges(input_of(rank, 50 + step))).mean());
        judge_step.step();
        judge_step.zero_grad();
        set_trained(judge, false);  // the loss goes through it, and does not train it
        accelerator.backward(-judges(made).pow(2).mean());
        set_trained(judge, true);
        maker_step.step();
        maker_step.zero_grad();
      }
      auto all = whole(makes, maker);
      for (const auto& one : whole(judges, judge)) all.push_back(one);
      return all;
    };
    const auto wanted = train(std::nullopt);
    for (const auto level : kLevels) {
      expect_same(train(level), wanted, str("level ", static_cast<int>(level)));
    }
  });
}

TEST(ShardedPrograms, AnEvaluationInInferenceModeMayComeFirst) {
  on_processes(2, [] {
    const auto words = torch::zeros({1, 8}, torch::kLong);
    const auto wanted = run(RunOptions{});
    for (const auto level : kLevels) {
      const RunOptions options{.spec = sharded(level)};
      ShardedRun training(options);
      torch::Tensor scores;
      for (int i = 0; i < 2; ++i) {
        const c10::InferenceMode inference;
        scores = training.model(words);
      }
      std::vector<double> losses;
      for (int step = 0; step < options.steps; ++step) {
        losses.push_back(training.train(step, 0, true));
        training.take_step();
        const c10::InferenceMode inference;
        EXPECT_FALSE(training.model(words).equal(scores)) << "it was stepped";
      }
      EXPECT_EQ(losses, wanted.losses) << "level " << static_cast<int>(level);
    }
  });
}

/// Each process uses another expert.
struct ExpertsImpl : torch::nn::Module {
  ExpertsImpl() {
    register_module("first", first);
    register_module("experts", experts);
    for (int i = 0; i < 2; ++i) experts->push_back(torch::nn::Linear(64, 64));
  }
  torch::Tensor forward(const torch::Tensor& x, std::size_t expert) {
    return experts->ptr<torch::nn::LinearImpl>(expert)->forward(torch::tanh(first(x)));
  }
  torch::nn::Linear first{64, 64};
  torch::nn::ModuleList experts;
};
TORCH_MODULE(Experts);

TEST(ShardedPrograms, ExpertsThatDataChoosesAreOneUnit) {
  on_processes(2, [] {
    const int rank = PartialState().process_index();
    const auto train = [&](std::optional<ShardLevel> level) {
      torch::manual_seed(1);
      Experts net;
      std::optional<Sharded<Experts>> engine;
      std::optional<Accelerator> plain;
      if (level) {
        engine.emplace(net, ShardSpec{.level = *level, .units = {"first", "experts"}});
      } else {
        plain.emplace(test::averaging({.find_unused_parameters = true}));
      }
      auto& accelerator = level ? engine->accelerator : *plain;
      auto model = level ? engine->model : accelerator.prepare(net);
      auto optimizer =
          accelerator.prepare(torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.5)));
      for (int step = 0; step < 4; ++step) {
        const auto expert = static_cast<std::size_t>((rank + step) % 2);
        accelerator.backward(model(input_of(rank, step), expert).pow(2).mean());
        optimizer.step();
        optimizer.zero_grad();
      }
      return whole(model, net);
    };
    const auto wanted = train(std::nullopt);
    for (const auto level : kLevels) {
      expect_same(train(level), wanted, str("level ", static_cast<int>(level)));
    }
  });
}

/// Blocks that are computed again in backward, with dropout.
struct AgainImpl : torch::nn::Module {
  explicit AgainImpl(bool again) : again(again) {
    register_module("blocks", blocks);
    for (int i = 0; i < 3; ++i) {
      blocks->push_back(torch::nn::Sequential(torch::nn::Linear(64, 128), torch::nn::GELU(),
                                              torch::nn::Dropout(0.5), torch::nn::Linear(128, 64)));
    }
    register_module("head", head);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (std::size_t i = 0; i < blocks->size(); ++i) {
      torch::nn::Sequential block(blocks->ptr<torch::nn::SequentialImpl>(i));
      x = x + (again ? activation_checkpoint(block, x) : block->forward(x));
    }
    return head(x);
  }
  bool again;
  torch::nn::ModuleList blocks;
  torch::nn::Linear head{64, 64};
};
TORCH_MODULE(Again);

TEST(ShardedPrograms, BlocksMayBeComputedAgainInBackward) {
  on_processes(2, [] {
    const int rank = PartialState().process_index();
    const auto train = [&](const std::optional<ShardSpec>& spec) {
      torch::manual_seed(1);
      Again net(spec.has_value());
      std::optional<Sharded<Again>> engine;
      std::optional<Accelerator> plain;
      if (spec) {
        engine.emplace(net, *spec);
      } else {
        plain.emplace(anew());
      }
      auto& accelerator = spec ? engine->accelerator : *plain;
      auto model = spec ? engine->model : accelerator.prepare(net);
      auto optimizer = accelerator.prepare(SGD(net->parameters(), {.lr = 0.125, .momentum = 0.5}));
      torch::manual_seed(10 + rank);
      for (int step = 0; step < 4; ++step) {
        accelerator.backward(model(input_of(rank, step)).pow(2).mean());
        optimizer.step();
        optimizer.zero_grad();
      }
      if (spec && spec->level == ShardLevel::kParameters) {
        EXPECT_EQ(engine->engine->stats().wasted_gathers, 0);
      }
      return whole(model, net);
    };
    const auto wanted = train(std::nullopt);
    for (const auto level : kLevels) {
      for (const int prefetch : {0, 1}) {
        ShardSpec spec{.level = level,
                       .forward_prefetch = prefetch,
                       .backward_prefetch = prefetch,
                       .units = {"blocks.0", "blocks.1", "blocks.2"}};
        expect_same(train(spec), wanted,
                    str("level ", static_cast<int>(level), ", prefetch ", prefetch));
      }
    }
  });
}

TEST(ShardedPrograms, APreparedModelMayBeComputedAgainInBackward) {
  on_processes(2, [] {
    const int rank = PartialState().process_index();
    const auto train = [&](const std::optional<ShardSpec>& spec, bool early_stop) {
      torch::manual_seed(1);
      Again net(false);
      std::optional<Sharded<Again>> engine;
      std::optional<Accelerator> plain;
      if (spec) {
        engine.emplace(net, *spec);
      } else {
        plain.emplace(anew());
      }
      auto& accelerator = spec ? engine->accelerator : *plain;
      auto model = spec ? engine->model : accelerator.prepare(net);
      auto optimizer = accelerator.prepare(SGD(net->parameters(), {.lr = 0.125, .momentum = 0.5}));
      torch::manual_seed(10 + rank);
      for (int step = 0; step < 4; ++step) {
        const auto x = input_of(rank, step);
        const auto y =
            spec ? activation_checkpoint({.early_stop = early_stop}, model, x) : model(x);
        accelerator.backward(y.pow(2).mean());
        optimizer.step();
        optimizer.zero_grad();
      }
      return whole(model, net);
    };
    const auto wanted = train(std::nullopt, true);
    for (const auto level : kLevels) {
      for (const bool early_stop : {true, false}) {
        const ShardSpec spec{.level = level, .units = {"blocks.0", "blocks.1", "blocks.2"}};
        expect_same(train(spec, early_stop), wanted,
                    str("level ", static_cast<int>(level), ", early_stop ", early_stop));
      }
    }
  });
}

TEST(ShardedPrograms, GradientsThatAreNotCompleteAreNotClipped) {
  on_processes(2, [] {
    for (const auto level : kLevels) {
      ShardedRun training({.spec = sharded(level)});
      const auto clip = [&] {
        (void)training.accelerator.clip_grad_norm_(training.model.parameters(), 1.0);
      };
      (void)training.train(0, 0, /*synchronizes=*/false);
      EXPECT_TRUE(
          has(message_of<StateError>(clip), "Guard the call: if (accelerator.sync_gradients())"));
      (void)training.train(0, 1, /*synchronizes=*/true);
      EXPECT_NO_THROW(clip());
      training.take_step();
      (void)training.train(1, 0, /*synchronizes=*/false);
      training.optimizer.zero_grad();
      EXPECT_NO_THROW(clip());
    }
  });
}

class CountsSteps final : public detail::parallel::WrappedEngine {
 public:
  using WrappedEngine::WrappedEngine;
  void before_step() override {
    ++steps;
    WrappedEngine::before_step();
  }
  int steps = 0;
};

TEST(ShardedPrograms, EnginesAreToldOfStepsThatAreNotChecked) {
  on_processes(2, [] {
    for (const int drift_check : {0, 10}) {
      Accelerator accelerator(anew({.drift_check = drift_check}));
      auto net = two_layers(1);
      auto model = accelerator.prepare_model(net, {.evaluation_mode = true});
      const auto group = accelerator.state().process_group();
      const auto engine = std::make_shared<CountsSteps>(std::make_shared<test::ShardedEngine>(
          *net, ShardSpec{.level = ShardLevel::kParameters},
          detail::sharding::ShardProcesses{.shard = group, .all = group}, accelerator.device()));
      model._core()->use(engine);
      auto optimizer = accelerator.prepare(SGD(net->parameters(), {.lr = 0.125}));
      accelerator.backward(model(input_of(0, 0)).pow(2).mean());
      optimizer.step();
      EXPECT_EQ(engine->steps, 1) << "drift_check " << drift_check;
    }
  });
}

TEST(ShardedPrograms, UnitsMayHaveParametersOfSeveralTypes) {
  on_processes(2, [] {
    const auto mixed = [](TinyGpt& net) {
      net->blocks->ptr(1)->as<test::Block>()->norm->weight.requires_grad_(false);
      net->register_parameter("count", torch::zeros({3}, torch::kLong), /*requires_grad=*/false);
      net->register_parameter("scale", torch::ones({2, 5}, torch::kDouble));
    };
    const RunOptions plain{.find_unused = true, .change_net = mixed};
    const auto wanted = run(plain);
    for (const auto level : kLevels) {
      auto options = plain;
      options.spec = sharded(level);
      options.spec->skip_globally_unused = true;
      expect_equal(run(options), wanted, str("level ", static_cast<int>(level)));
    }
  });
}

TEST(ShardedPrograms, CopiesAreMadeInsideOfGatheredParameters) {
  on_processes(2, [] {
    Sharded<torch::nn::Sequential> training(
        two_layers(1), {.level = ShardLevel::kParameters, .units = {"0", "2"}});
    EXPECT_TRUE(has(message_of<StateError>([&] { (void)training.net->clone(); }),
                    "'0.weight' is sharded over 2 processes"));
    const auto copy =
        gathered_parameters(training.model, {}, [&] { return training.net->clone(); });
    auto same = two_layers(1);
    for (std::size_t i = 0; i < same->parameters().size(); ++i) {
      EXPECT_TRUE(copy->parameters()[i].equal(same->parameters()[i]));
    }
    const auto x = torch::ones({1, 64});
    EXPECT_TRUE(copy->as<torch::nn::Sequential>()->forward(x).equal(same->forward(x)));
  });
}

TEST(ShardedPrograms, ChangesOfTheModuleAfterPrepareAreRefused) {
  on_processes(2, [] {
    for (const auto level : kLevels) {
      const auto refused = [&](const std::function<void(torch::nn::Sequential&)>& change) {
        Sharded<torch::nn::Sequential> training(two_layers(1),
                                                {.level = level, .units = {"0", "2"}});
        const auto loss = training.model(torch::ones({1, 64})).sum();
        change(training.net);
        return message_of<StateError>([&] { training.accelerator.backward(loss); });
      };
      EXPECT_TRUE(has(refused([](auto& net) { net->parameters()[0].requires_grad_(false); }),
                      "The parameter '0.weight' was frozen"));
      EXPECT_TRUE(has(refused([](auto& net) { net->push_back(torch::nn::Linear(64, 64)); }),
                      "The module has other parameters than when it was sharded"));
    }
  });
}

}  // namespace
}  // namespace accelerate::programs_test
