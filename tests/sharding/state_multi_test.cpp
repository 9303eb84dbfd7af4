// State dictionaries and checkpoints of sharded models.
#include <gtest/gtest.h>

#include <stdexcept>

#include "accelerator/nets.h"
#include "sharding/sharded_run.h"
#include "support/has.h"
#include "support/message_of.h"
#include "support/on_processes.h"
#include "support/shared_folder.h"

namespace accelerate::state_test {
namespace {

using test::anew;
using test::has;
using test::message_of;
using test::sharded;
using test::ShardedRun;
using test::ShardLevel;
using test::TinyGpt;
namespace F = torch::nn::functional;

constexpr ShardLevel kLevels[] = {ShardLevel::kOptimizer, ShardLevel::kGradients,
                                  ShardLevel::kParameters};

TEST(ShardedState, IsThatOfTheWholeModelAndCanBeLoaded) {
  on_processes(3, [] {
    ShardedRun plain({});
    const auto wanted = plain.model.state_dict();
    for (const auto level : kLevels) {
      ShardedRun training({.spec = sharded(level)});
      const auto state = training.model.state_dict();
      const bool is_first = PartialState().is_main_process();
      if (level == ShardLevel::kParameters && !is_first) {
        EXPECT_TRUE(state.is_empty());
      } else {
        ASSERT_EQ(state.keys(), wanted.keys());
        for (const auto& entry : wanted) EXPECT_TRUE(entry.value().equal(state[entry.key()]));
      }

      StateDict other("Tensor");
      for (const auto& entry : wanted) other.insert(entry.key(), entry.value() * 2);
      training.model.load_state_dict(other);
      const auto whole = training.whole_parameters();
      for (std::size_t i = 0; i < whole.size(); ++i) {
        EXPECT_TRUE(whole[i].equal(plain.net->parameters()[i] * 2));
      }
      other.erase("head.weight");
      EXPECT_TRUE(has(message_of<StateDictMismatch>([&] { training.model.load_state_dict(other); }),
                      "Missing key(s) in state_dict: \"head.weight\""));
    }
  });
}

TEST(ShardedState, EveryLevelLoadsWhatAnyOtherSavedInAnyFiles) {
  const test::SharedFolder folder;
  on_processes(2, folder.options(), [&] {
    const auto train = [](ShardedRun& training, int first) {
      std::vector<double> losses;
      for (int step = first; step < first + 2; ++step) {
        losses.push_back(training.train(step, 0, true));
        training.take_step();
      }
      return losses;
    };
    for (const auto type : {StateDictType::kFullStateDict, StateDictType::kShardedStateDict}) {
      for (const auto level : kLevels) {
        auto spec = sharded(level);
        spec.state_dict_type = type;
        ShardedRun saved({.spec = spec});
        (void)train(saved, 0);
        const auto state = folder.path() / (std::to_string(static_cast<int>(type)) + "_" +
                                            std::to_string(static_cast<int>(level)));
        saved.accelerator.save_state(state);
        const auto wanted = train(saved, 2);
        for (const auto other : kLevels) {
          spec.level = other;
          ShardedRun resumed({.spec = spec});
          (void)train(resumed, 10);
          resumed.accelerator.load_state(state);
          EXPECT_EQ(train(resumed, 2), wanted)
              << "level " << static_cast<int>(level) << " to " << static_cast<int>(other);
        }
      }
    }
  });
}

TEST(ShardedState, ParametersThatStayWholeAreSavedWithTheirStates) {
  const test::SharedFolder folder;
  on_processes(2, folder.options(), [&] {
    const auto train = [](ShardedRun& training, int first) {
      std::vector<double> losses;
      for (int step = first; step < first + 2; ++step) {
        losses.push_back(training.train(step, 0, true));
        training.take_step();
      }
      return losses;
    };
    for (const auto type : {StateDictType::kFullStateDict, StateDictType::kShardedStateDict}) {
      for (const auto level : kLevels) {
        auto spec = sharded(level);
        spec.state_dict_type = type;
        spec.ignored = {"norm", "blocks.1.up"};
        const test::RunOptions options{.spec = spec, .change_net = [](test::TinyGpt& net) {
                                         net->register_parameter("empty", torch::zeros({0, 3}));
                                       }};
        ShardedRun saved(options);
        (void)train(saved, 0);
        const auto state = folder.path() / (std::to_string(static_cast<int>(type)) + "_" +
                                            std::to_string(static_cast<int>(level)));
        saved.accelerator.save_state(state);
        const auto wanted = train(saved, 2);
        ShardedRun resumed(options);
        (void)train(resumed, 10);
        resumed.accelerator.load_state(state);
        EXPECT_EQ(train(resumed, 2), wanted) << "level " << static_cast<int>(level);
      }
    }
  });
}

/// What the optimizers of `Several` step.
enum class Steps : std::uint8_t { kAModelEach, kTheSecondModel, kAlsoATensor, kAllInOne };

torch::nn::Sequential two_layers(int seed) {
  torch::manual_seed(seed);
  return torch::nn::Sequential(torch::nn::Linear(64, 64), torch::nn::Tanh(),
                               torch::nn::Linear(64, 64));
}

/// Two models and a tensor that is in none.
struct Several {
  Several(Steps steps, const std::optional<FullyShardedDataParallelPlugin>& plugin)
      : accelerator(anew({.fsdp_plugin = plugin})),
        first_net(two_layers(1)),
        second_net(two_layers(2)) {
    if (steps == Steps::kTheSecondModel) {
      for (auto& one : first_net->parameters()) one.requires_grad_(false);
    }
    first = accelerator.prepare(first_net);
    second = accelerator.prepare(second_net);
    const auto all = parameters(steps);
    for (const auto& group : all) {
      optimizers.push_back(accelerator.prepare(AdamW(group, {.lr = 0.01})));
    }
  }
  [[nodiscard]] std::vector<std::vector<torch::Tensor>> parameters(Steps steps) const {
    const auto of_first = first_net->parameters();
    const auto of_second = second_net->parameters();
    switch (steps) {
      case Steps::kAModelEach:
        return {of_first, of_second};
      case Steps::kTheSecondModel:
        return {of_second};
      case Steps::kAlsoATensor:
        return {{factor}, of_first, of_second};
      case Steps::kAllInOne:
        break;
    }
    auto all = of_first;
    all.push_back(factor);
    all.insert(all.end(), of_second.begin(), of_second.end());
    return {all};
  }
  std::vector<double> train(int begin, int end) {
    std::vector<double> losses;
    for (int step = begin; step < end; ++step) {
      torch::manual_seed(10 * step + accelerator.process_index());
      const auto loss = second(first(torch::randn({8, 64}))).pow(2).mean() + factor.pow(2);
      accelerator.backward(loss);
      for (auto& optimizer : optimizers) {
        optimizer.step();
        optimizer.zero_grad();
      }
      factor.mutable_grad().reset();
      losses.push_back(loss.item<double>());
    }
    return losses;
  }

  Accelerator accelerator;
  torch::nn::Sequential first_net, second_net;
  torch::Tensor factor = torch::ones({}, torch::requires_grad());
  PreparedModel<torch::nn::Sequential> first, second;
  std::vector<AcceleratedOptimizer> optimizers;
};

TEST(ShardedState, EachOptimizerIsSavedByTheParametersThatItSteps) {
  const test::SharedFolder folder;
  const auto kinds = {Steps::kAModelEach, Steps::kTheSecondModel, Steps::kAlsoATensor,
                      Steps::kAllInOne};
  const auto path_of = [&](Steps steps, StateDictType type) {
    return folder.path() /
           (std::to_string(static_cast<int>(steps)) + "_" + std::to_string(static_cast<int>(type)));
  };
  on_processes(2, folder.options(), [&] {
    for (const auto type : {StateDictType::kFullStateDict, StateDictType::kShardedStateDict}) {
      const FullyShardedDataParallelPlugin plugin{.fsdp_version = 2, .state_dict_type = type};
      for (const auto steps : kinds) {
        Several saved(steps, plugin);
        (void)saved.train(0, 2);
        saved.accelerator.save_state(path_of(steps, type));
        const auto factor = saved.factor.detach().clone();  // the program's to save
        for (const auto& optimizer : saved.optimizers) {
          std::size_t count = 0;
          for (const auto& group : optimizer.param_groups()) count += group.params().size();
          const auto state = optimizer.state_dict();
          if (!PartialState().is_main_process()) continue;
          EXPECT_EQ(state.at("state").as_dict().size(), count);
        }
        const auto wanted = saved.train(2, 5);
        Several resumed(steps, plugin);
        (void)resumed.train(10, 12);
        resumed.accelerator.load_state(path_of(steps, type));
        resumed.factor.data().copy_(factor);
        EXPECT_EQ(resumed.train(2, 5), wanted) << "kind " << static_cast<int>(steps);
        const auto alone = path_of(steps, type).string() + "_alone";
        save_fsdp_optimizer(plugin, resumed.optimizers.back(), alone);
        EXPECT_NO_THROW(load_fsdp_optimizer(plugin, resumed.optimizers.back(), alone));
      }
    }
  });
  on_processes(1, folder.options(), [&] {
    for (const auto steps : kinds) {
      Several whole(steps, std::nullopt);
      whole.accelerator.load_state(path_of(steps, StateDictType::kFullStateDict));
      for (const auto& optimizer : whole.optimizers) {
        for (const auto& group : optimizer.param_groups()) {
          for (const auto& parameter : group.params()) {
            EXPECT_EQ(optimizer.state().count(parameter.unsafeGetTensorImpl()), 1U);
          }
        }
      }
    }
  });
}

TEST(ShardedState, AfterAnErrorInBackwardANewModelGoesOnWithTheWeights) {
  const test::SharedFolder folder;
  on_processes(2, folder.options(), [&] {
    const auto wanted = test::run(test::RunOptions{});
    for (const auto level : {ShardLevel::kGradients, ShardLevel::kParameters}) {
      const auto state = folder.path() / std::to_string(static_cast<int>(level));
      std::vector<double> losses;
      const auto train = [&](ShardedRun& training, int step) {
        losses.push_back(training.train(step, 0, true));
        training.take_step();
      };
      {
        ShardedRun training({.spec = sharded(level)});
        train(training, 0);
        train(training, 1);
        training.net->at_block = [](int block, bool backward) {
          if (backward && block == 1) throw std::runtime_error("no memory");
        };
        EXPECT_ANY_THROW((void)training.train(2, 0, true));
        training.net->at_block = {};
        EXPECT_TRUE(has(message_of<StateError>([&] { (void)training.train(2, 0, true); }),
                        "build a new one, prepare it and load them"));
        training.accelerator.save_state(state);
      }
      ShardedRun resumed({.spec = sharded(level)});
      resumed.accelerator.load_state(state);
      train(resumed, 2);
      train(resumed, 3);
      EXPECT_EQ(losses, wanted.losses) << "level " << static_cast<int>(level);
    }
  });
}

torch::Tensor words_of(int seed, std::int64_t rows) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return torch::randint(64, {rows, 9}, generator, torch::TensorOptions(torch::kLong));
}

torch::Tensor loss_of(const torch::Tensor& scores, const torch::Tensor& words) {
  return F::cross_entropy(scores.reshape({-1, 64}), words.slice(1, 1).reshape(-1));
}

/// The losses of batches that are trained by one process, without an accelerator.
std::vector<double> trained_alone(int batches) {
  torch::manual_seed(3);
  TinyGpt net;
  AdamW optimizer(net->parameters(), {.lr = 0.01});
  std::vector<double> losses;
  for (int batch = 0; batch < batches; ++batch) {
    const auto words = words_of(batch, 12);
    const auto loss = loss_of(net(words.slice(1, 0, 8)), words);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

/// A run that can be saved after any number of batches.
struct Saved {
  Saved(int shards, int steps_per_update, int copies = 1)
      : accelerator(anew({.gradient_accumulation_steps = steps_per_update,
                          .parallelism_config = shards > 1 ? std::optional(ParallelismConfig{
                                                                 .dp_replicate_size = copies,
                                                                 .dp_shard_size = shards})
                                                           : std::nullopt})) {
    torch::manual_seed(3);
    net = TinyGpt();
    auto prepared = accelerator.prepare(net, AdamW(net->parameters(), {.lr = 0.01}));
    model = std::get<0>(prepared);
    optimizer = std::get<1>(prepared);
  }
  double train(int batch) { return train(words_of(10 * batch + accelerator.process_index(), 4)); }
  double train(const torch::Tensor& words) {
    const auto accumulating = accelerator.accumulate(model);
    const auto loss = loss_of(model(words.slice(1, 0, 8)), words);
    accelerator.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    return loss.item<double>();
  }

  Accelerator accelerator;
  TinyGpt net{nullptr};
  PreparedModel<TinyGpt> model;
  AcceleratedOptimizer optimizer;
};

void expect_that_saved_runs_go_on(int processes, int copies) {
  const test::SharedFolder folder;
  on_processes(processes, folder.options(), [&] {
    for (const int accumulated : {1, 3}) {
      Saved run(2, accumulated, copies);
      for (int batch = 0; batch < 4; ++batch) (void)run.train(batch);
      const auto state = folder.path() / std::to_string(accumulated);
      run.accelerator.save_state(state);
      std::vector<double> wanted, losses;
      for (int batch = 4; batch < 9; ++batch) wanted.push_back(run.train(batch));

      Saved resumed(2, accumulated, copies);
      (void)resumed.train(100);
      resumed.accelerator.load_state(state);
      for (int batch = 4; batch < 9; ++batch) losses.push_back(resumed.train(batch));
      EXPECT_EQ(losses, wanted) << accumulated << " batches per step";
    }
  });
}

TEST(ShardedState, ASavedRunGoesOnAsIfItHadNotStopped) { expect_that_saved_runs_go_on(2, 1); }

TEST(ShardedState, ASavedHybridRunGoesOnAsIfItHadNotStopped) { expect_that_saved_runs_go_on(4, 2); }

TEST(ShardedState, AnotherNumberOfProcessesGoesOnInTheMiddleOfAnAccumulation) {
  const test::SharedFolder folder;
  const auto train = [](Saved& run, int first, int end) {
    const auto& state = run.accelerator.state();
    for (int batch = first; batch < end; ++batch) {
      const auto parts = words_of(batch, 12).chunk(state.num_processes());
      (void)run.train(parts[static_cast<std::size_t>(state.process_index())]);
    }
  };
  const auto head_of = [](Saved& run) {
    return gathered_parameters(run.model, {},
                               [&] { return run.net->head->weight.detach().clone(); });
  };
  on_processes(2, folder.options(), [&] {
    Saved run(2, 3);
    train(run, 0, 4);
    run.accelerator.save_state(folder.path() / "state");
    train(run, 4, 6);
    const auto head = head_of(run);
    if (run.accelerator.is_main_process()) torch_save(Value(head), folder.path() / "head");
  });
  for (const int processes : {1, 3}) {
    on_processes(processes, folder.options(), [&] {
      Saved run(PartialState().num_processes(), 3);
      run.accelerator.load_state(folder.path() / "state");
      train(run, 4, 6);
      const auto wanted = torch_load(folder.path() / "head").as_tensor();
      EXPECT_LT(test::distance(head_of(run), wanted), 1e-4) << processes << " processes";
    });
  }
}

TEST(ShardedState, ACheckpointCanBeLoadedByAnotherNumberOfProcesses) {
  const test::SharedFolder folder;
  const auto state = folder.path() / "state";
  on_processes(2, folder.options(), [&] {
    Saved run(2, 1);
    for (int batch = 0; batch < 3; ++batch) (void)run.train(batch);
    run.accelerator.save_state(state);
    gathered_parameters(run.model, {}, [&] {
      if (run.accelerator.is_main_process()) {
        torch_save(Value(run.net->head->weight.detach()), folder.path() / "head");
      }
    });
    run.accelerator.save_model(run.model, folder.path() / "model");
  });
  for (const int processes : {1, 3}) {
    on_processes(processes, folder.options(), [&] {
      const int shards = PartialState().num_processes();
      Saved run(shards, 1);
      run.accelerator.load_state(state);
      const auto wanted = torch_load(folder.path() / "head").as_tensor();
      gathered_parameters(run.model, {}, [&] {
        EXPECT_TRUE(run.net->head->weight.equal(wanted)) << shards << " processes";
      });
      (void)run.train(3);
      const auto weights = load_state_dict(folder.path() / "model" / "model.safetensors");
      EXPECT_TRUE(weights["head.weight"].equal(wanted));
    });
  }
}

TEST(ShardedState, GoesOnWithTheSameLossesOnAnyNumberOfProcesses) {
  const test::SharedFolder folder;
  // Each goes on with what the one before has saved.
  const std::vector<int> processes{1, 3, 2, 4, 1};
  for (int i = 0; i < std::ssize(processes); ++i) {
    on_processes(processes[static_cast<std::size_t>(i)], folder.options(), [&] {
      const int count = PartialState().num_processes();
      Saved run(count, 1);
      if (i > 0) run.accelerator.load_state(folder.path() / std::to_string(i - 1));
      const auto wanted = trained_alone(5 * (i + 1));
      for (int batch = 5 * i; batch < 5 * (i + 1); ++batch) {
        // A part of one batch of all.
        const auto words = words_of(batch, 12).chunk(count)[run.accelerator.process_index()];
        const auto loss = torch::tensor(run.train(words), torch::kDouble);
        EXPECT_NEAR(run.accelerator.reduce(loss, Reduction::kMean).item<double>(),
                    wanted[static_cast<std::size_t>(batch)], 1e-4)
            << "batch " << batch << " on " << count << " processes";
      }
      run.accelerator.save_state(folder.path() / std::to_string(i));
    });
  }
}

}  // namespace
}  // namespace accelerate::state_test
