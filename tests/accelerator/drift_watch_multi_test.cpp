// Parameters that are compared across processes while they train, and steps of what is not
// averaged.
#include <accelerate/accelerate.h>
#include <accelerate/local_sgd.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "accelerator/nets.h"
#include "core/captured_log.h"
#include "parallel/drift_watch.h"
#include "support/message_of.h"
#include "support/on_processes.h"

namespace accelerate::drift_watch_test {
namespace {

using detail::parallel::ranks_that_differ;
using test::anew;
using test::CapturedLog;
using test::input_of;
using test::message_of;
using test::Mlp;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
using Ranks = std::vector<int>;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::size_t count_of(const CapturedLog& log, const std::string& text) {
  return static_cast<std::size_t>(std::ranges::count_if(
      log.messages(), [&](const std::string& message) { return contains(message, text); }));
}

torch::optim::SGD sgd(const std::vector<torch::Tensor>& parameters) {
  return torch::optim::SGD(parameters, torch::optim::SGDOptions(0.01));
}

// ---- sums ---------------------------------------------------------------------------------------

TEST(RanksThatDiffer, AreThoseOutsideOfTheMajority) {
  const auto differ = [](std::vector<double> sums) { return ranks_that_differ(sums, 1e-4); };
  EXPECT_EQ(differ({1, 1, 1, 1}), Ranks());
  EXPECT_EQ(differ({1, 2}), Ranks{1}) << "no majority: rank 0 is the reference";
  EXPECT_EQ(differ({2, 1, 1}), Ranks{0});
  EXPECT_EQ(differ({1, 2, 1, 3}), (Ranks{1, 3}));
  EXPECT_EQ(differ({1e6, 1e6 + 50}), Ranks()) << "within the tolerance";
  EXPECT_EQ(differ({1e6, 1e6 + 200}), Ranks{1});
  EXPECT_EQ(differ({0, 0}), Ranks());
  EXPECT_EQ(differ({0, 1e-30}), Ranks{1});
}

TEST(RanksThatDiffer, MayHaveSumsThatWereLargerBefore) {
  EXPECT_EQ(ranks_that_differ(std::vector{1e-9, 1e-5}, 1e-4, 1), Ranks());
  EXPECT_EQ(ranks_that_differ(std::vector{1e-9, 1e-3}, 1e-4, 1), Ranks{1});
}

TEST(RanksThatDiffer, CompareWhatIsNotFinite) {
  const auto differ = [](std::vector<double> sums) { return ranks_that_differ(sums, 1e-4); };
  EXPECT_EQ(differ({kNan, kNan}), Ranks());
  EXPECT_EQ(differ({kInfinity, kInfinity}), Ranks());
  EXPECT_EQ(differ({1, kNan, 1}), Ranks{1});
  EXPECT_EQ(differ({kNan, 1, 1}), Ranks{0});
  EXPECT_EQ(differ({1, kInfinity}), Ranks{1});
  EXPECT_EQ(differ({kNan, kInfinity}), Ranks{1});
}

// ---- drift --------------------------------------------------------------------------------------

/// Parameters of many kinds, all of which its output depends on.
struct ZooImpl : torch::nn::Module {
  explicit ZooImpl(int more = 0) {
    scalar = register_parameter("scalar", torch::tensor(0.5));
    nothing = register_parameter("nothing", torch::empty({0, 3}));
    wide = register_parameter("wide", torch::randn({600, 50}));
    twofold = register_parameter("twofold", torch::randn({3, 2}, torch::kDouble));
    half = register_parameter("half", torch::randn({4, 4}).to(torch::kHalf));
    brain = register_parameter("brain", torch::randn({5}).to(torch::kBFloat16));
    imaginary = register_parameter("imaginary", torch::randn({2, 2}, torch::kComplexFloat));
    turned = register_parameter("turned", torch::randn({30, 40}).t());
    frozen = register_parameter("frozen", torch::randn({3}), /*requires_grad=*/false);
    for (int i = 0; i < more; ++i) {
      small.push_back(register_parameter("small_" + std::to_string(i), torch::randn({2})));
    }
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto sum =
        (nothing.sum() + scalar + wide.mean() + twofold.mean() + half.to(torch::kFloat).mean() +
         brain.to(torch::kFloat).mean() + torch::real(imaginary).mean() + turned.mean())
            .to(torch::kFloat);
    if (!small.empty()) sum = sum + torch::stack(small).mean();
    return sum * x.mean() + frozen.sum();
  }
  torch::Tensor scalar, nothing, wide, twofold, half, brain, imaginary, turned, frozen;
  std::vector<torch::Tensor> small;
};
TORCH_MODULE(Zoo);

/// Trains, changes an element of a parameter on one rank before backward 7, and returns what is
/// thrown and after how many backward passes.
struct Seen {
  std::string message = "nothing was thrown";
  int backward = 0;
};

Seen train_with_drift(const std::string& name, int bad_rank, double change, int most,
                      int small = 0) {
  const int rank = PartialState().process_index();
  Accelerator accelerator(anew());
  Zoo net(small);
  auto [model, optimizer] = accelerator.prepare(net, sgd(net->parameters()));
  for (int step = 1; step <= most; ++step) {
    if (step == 7 && rank == bad_rank) {
      const torch::NoGradGuard no_grad;
      auto parameter = net->named_parameters()[name].detach();
      while (parameter.dim() > 0) parameter = parameter.select(0, parameter.size(0) - 1);
      parameter += change;
    }
    try {
      accelerator.backward(model(input_of(rank, step)));
    } catch (const CommError& error) {
      EXPECT_EQ(error.rank(), bad_rank);
      return {error.what(), step};
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  return {};
}

TEST(DriftWatch, NamesTheParameterTheRankAndTheBackward) {
  for (const char* backend : {"shm", "gloo"}) {
    on_processes(
        4, {.environment = {{"ACCELERATE_HOST_BACKEND", backend}}}, [](PartialState& state) {
          for (const char* name :
               {"scalar", "wide", "twofold", "half", "brain", "imaginary", "turned", "frozen"}) {
            const auto [message, backward] = train_with_drift(name, 2, 10.0, 57);
            EXPECT_GE(backward, 7) << name;
            EXPECT_LE(backward - 7, 50) << name;
            EXPECT_TRUE(contains(message, std::string("the parameter '") + name + "'")) << message;
            EXPECT_TRUE(contains(message, "rank 2 has other values than rank 0")) << message;
            EXPECT_TRUE(contains(message, "drift_check = 0")) << message;
            // All ranks learn of it in the same backward, in the same words.
            const auto all = gather_object(std::vector<std::string>{message});
            EXPECT_EQ(std::ranges::count(all, message), state.num_processes());
          }
        });
  }
}

TEST(DriftWatch, FindsADriftOfTwoProcesses) {
  on_processes(2, [](PartialState&) {
    EXPECT_TRUE(contains(train_with_drift("wide", 1, 0.5, 57).message,
                         "rank 1 has other values than rank 0"));
    EXPECT_TRUE(contains(train_with_drift("twofold", 1, 1e-6, 57).message, "'twofold'"));
    EXPECT_TRUE(contains(train_with_drift("scalar", 1, kNan, 57).message, "nan"));
    EXPECT_TRUE(contains(train_with_drift("scalar", 1, -1.0, 57).message, "'scalar'"))
        << "0.5 has become about -0.5";
    // No drift: rounding of another processor.
    EXPECT_EQ(train_with_drift("scalar", 1, 1e-6, 57).backward, 0);
    EXPECT_EQ(train_with_drift("scalar", 1, 2e-5, 57).backward, 0) << "1024 bits of one element";
    EXPECT_EQ(train_with_drift("brain", 1, 1e-3, 57).backward, 0);
  });
}

TEST(DriftWatch, TakesOnePassOverVeryManyParameters) {
  on_processes(2, [](PartialState&) {
    // 16 at a time.
    const auto seen = train_with_drift("small_999", 1, 1.0, 120, 1000);
    EXPECT_TRUE(contains(seen.message, "'small_999'")) << seen.message;
    EXPECT_GT(seen.backward - 7, 50);
    EXPECT_LE(seen.backward - 7, 40 + 1009 / 16);
  });
}

TEST(DriftWatch, IsSilentForAParameterThatBecomesSmall) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    Accelerator accelerator(anew());
    Zoo net;
    auto [model, optimizer] = accelerator.prepare(net, sgd(net->parameters()));
    for (int step = 1; step <= 120; ++step) {
      if (step == 60) {  // the rounding of 0.5 is all that is left
        const torch::NoGradGuard no_grad;
        net->scalar.fill_(1e-9 * (1 + rank));
      }
      accelerator.backward(model(input_of(rank, step)) * 0);
    }
  });
}

TEST(DriftWatch, SeesAParameterInAnotherOrderOfMemory) {
  on_processes(2, [](PartialState& state) {
    Accelerator accelerator(anew());
    auto conv = torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3));
    auto [model, optimizer] = accelerator.prepare(conv, sgd(conv->parameters()));
    const torch::NoGradGuard no_grad;
    if (state.process_index() == 1) {
      conv->weight.set_data(conv->weight.contiguous(torch::MemoryFormat::ChannelsLast));
    }
    const auto train = [&, &model = model, &optimizer = optimizer](int steps) {
      const torch::AutoGradMode with_gradients(true);
      for (int step = 0; step < steps; ++step) {
        accelerator.backward(model(torch::ones({1, 3, 4, 4})).pow(2).mean());
        optimizer.step();
        optimizer.zero_grad();
      }
    };
    train(50);
    if (state.process_index() == 1) conv->weight[3][2][1][0] += 0.5;
    EXPECT_TRUE(contains(message_of<CommError>([&] { train(50); }), "'weight'"));
  });
}

TEST(DriftWatch, IsSilentWhereNanIsEverywhere) {
  on_processes(2, [](PartialState& state) {
    Accelerator accelerator(anew());
    Mlp net;
    auto [model, optimizer] = accelerator.prepare(net, sgd(net->parameters()));
    {
      const torch::NoGradGuard no_grad;
      net->first->weight.fill_(kNan);
    }
    for (int step = 0; step < 50; ++step) {
      accelerator.backward(model(input_of(state.process_index())).pow(2).mean());
      optimizer.step();
    }
  });
}

TEST(DriftWatch, IsSwitchedByTheOptionAndTheVariable) {
  const auto drifts = [](const AcceleratorOptions& options, int steps = 60) {
    const int rank = PartialState().process_index();
    Accelerator accelerator(anew(options));
    Mlp net;
    auto model = accelerator.prepare(net);
    {
      const torch::NoGradGuard no_grad;
      net->second->bias += rank;
    }
    return message_of<CommError>([&] {
      for (int step = 0; step < steps; ++step) {
        accelerator.backward(model(input_of(rank)).pow(2).mean());
      }
    });
  };
  const std::string silence = "nothing was thrown";
  on_processes(2, [&](PartialState&) {
    EXPECT_EQ(AcceleratorOptions().drift_check, 1);
    EXPECT_TRUE(contains(drifts({}), "'second.bias'"));
    EXPECT_EQ(drifts({.drift_check = 0}), silence);
    EXPECT_EQ(drifts({.drift_check = 5}, 4), silence);
    EXPECT_TRUE(contains(drifts({.drift_check = 5}, 200), "'second.bias'"));
    EXPECT_TRUE(contains(message_of<ConfigError>([&] { (void)drifts({.drift_check = -1}); }),
                         "drift_check is -1"));
    const int rank = PartialState().process_index();
    const auto message = message_of<CommError>([&] {
      Accelerator accelerator(anew({.drift_check = 1 + rank}));
      (void)accelerator.prepare(Mlp());
    });
    EXPECT_TRUE(contains(message, "drift_check is 1 on rank 0 and 2 on rank 1")) << message;
  });
  on_processes(2, {.environment = {{"ACCELERATE_DRIFT_CHECK", "0"}}},
               [&](PartialState&) { EXPECT_EQ(drifts({}), silence); });
  on_processes(2, {.environment = {{"ACCELERATE_DRIFT_CHECK", "-2"}}}, [&](PartialState&) {
    EXPECT_TRUE(contains(message_of<ConfigError>([&] { (void)drifts({}); }),
                         "ACCELERATE_DRIFT_CHECK is '-2'"));
  });
}

// ---- where processes may differ -----------------------------------------------------------------

TEST(DriftWatch, IsSilentUnderLocalSgdAndAfterIt) {
  for (const char* backend : {"shm", "gloo"}) {
    on_processes(
        2, {.environment = {{"ACCELERATE_HOST_BACKEND", backend}}}, [](PartialState& state) {
          const int rank = state.process_index();
          Accelerator accelerator(anew());
          Mlp net;
          auto [model, optimizer] = accelerator.prepare(net, sgd(net->parameters()));
          const auto train = [&, &model = model, &optimizer = optimizer](int step) {
            accelerator.backward(model(input_of(rank, step)).pow(2).mean());
            optimizer.step();
            optimizer.zero_grad();
          };
          for (int round = 0; round < 4; ++round) {
            // A backward whose gradients are dropped: the next step is a local one.
            accelerator.backward(model(input_of(rank)).pow(2).mean());
            optimizer.zero_grad();
            run_local_sgd(accelerator, model, {.local_sgd_steps = 4}, [&](LocalSGD& local) {
              for (int step = 0; step < 6; ++step) {
                train(step);
                local.step();
              }
            });
            for (int step = 0; step < 30; ++step) train(step);
          }
          EXPECT_TRUE(test::same_everywhere(net->parameters()));
        });
  }
}

TEST(DriftWatch, IsSilentWhereProcessesRunOutOfData) {
  for (const char* backend : {"shm", "gloo"}) {
    on_processes(4, {.environment = {{"ACCELERATE_HOST_BACKEND", backend}}},
                 [](PartialState& state) {
                   const int rank = state.process_index();
                   Accelerator accelerator(anew());
                   Mlp net;
                   auto [model, optimizer] = accelerator.prepare(net, sgd(net->parameters()));
                   const auto train = [&, &model = model, &optimizer = optimizer](int steps) {
                     for (int step = 0; step < steps; ++step) {
                       accelerator.backward(model(input_of(rank, step)).pow(2).mean());
                       optimizer.step();
                       optimizer.zero_grad();
                     }
                   };
                   for (int round = 0; round < 3; ++round) {
                     accelerator.join_uneven_inputs(std::tie(model), {.even_batches = false},
                                                    [&] { train(3 * rank); });
                     train(20);
                   }
                   EXPECT_TRUE(test::same_everywhere(net->parameters()));
                 });
  }
}

TEST(DriftWatch, IsSilentForTwoModelsWithTwoOptimizersAndSeveralBackwards) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    const CapturedLog log;
    Accelerator accelerator(anew({.gradient_accumulation_steps = 2}));
    Mlp generator(3, 3), critic(3, 1);
    auto [g, d, g_optimizer, d_optimizer] = accelerator.prepare(
        generator, critic, sgd(generator->parameters()), sgd(critic->parameters()));
    for (int step = 0; step < 120; ++step) {
      // Inputs stay small: the loss of a saturated net would be the same on all processes.
      const auto accumulating = accelerator.accumulate(g, d);
      const auto fake = g(input_of(rank, step % 5));
      accelerator.backward(d(input_of(rank, step % 5)).mean());
      accelerator.backward(-d(fake.detach()).mean());
      d_optimizer.step();
      d_optimizer.zero_grad();
      accelerator.backward(d(fake).mean());
      g_optimizer.step();
      g_optimizer.zero_grad();
      d_optimizer.zero_grad();
    }
    EXPECT_TRUE(test::same_everywhere(generator->parameters()));
    EXPECT_EQ(log.messages().size(), 0) << log.messages().front();
  });
}

TEST(DriftWatch, IsSilentForWeightsThatDifferInABackwardOnly) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    Accelerator accelerator(anew());
    Mlp net;
    auto [model, optimizer] = accelerator.prepare(net, sgd(net->parameters()));
    // Sharpness-aware minimization: each process climbs by its own gradient first.
    for (int step = 0; step < 120; ++step) {
      std::vector<torch::Tensor> before;
      {
        const auto alone = accelerator.no_sync(model);
        accelerator.backward(model(input_of(rank, step)).pow(2).mean());
      }
      {
        const torch::NoGradGuard no_grad;
        for (auto& parameter : net->parameters()) {
          before.push_back(parameter.clone());
          parameter += 0.05 * parameter.grad();
        }
      }
      test::forget_gradients(net->parameters());
      accelerator.backward(model(input_of(rank, step)).pow(2).mean());
      {
        const torch::NoGradGuard no_grad;
        auto parameters = net->parameters();
        for (std::size_t i = 0; i < before.size(); ++i) parameters[i].copy_(before[i]);
      }
      optimizer.step();
      optimizer.zero_grad();
    }
    EXPECT_TRUE(test::same_everywhere(net->parameters()));
  });
}

TEST(DriftWatch, IsSilentInMixedPrecisionWithReducersAndReplacedParameters) {
  for (const char* backend : {"shm", "gloo"}) {
    on_processes(
        2, {.environment = {{"ACCELERATE_HOST_BACKEND", backend}}}, [](PartialState& state) {
          const int rank = state.process_index();
          for (const auto& ddp :
               {DistributedDataParallelKwargs{.gradient_as_bucket_view = true},
                DistributedDataParallelKwargs{.find_unused_parameters = true},
                DistributedDataParallelKwargs{.comm_hook = DDPCommunicationHookType::kPowerSgd},
                DistributedDataParallelKwargs{.static_graph = true}}) {
            Accelerator accelerator(
                anew({.mixed_precision = PrecisionType::kBf16, .kwargs_handlers = {ddp}}));
            Mlp net;
            auto [model, optimizer] =
                accelerator.prepare(net, AdamW(net->parameters(), {.lr = 1e-2}));
            for (int step = 0; step < 60; ++step) {
              accelerator.backward(model(input_of(rank, step)).pow(2).mean());
              accelerator.clip_grad_norm_(model.parameters(), 1.0);
              optimizer.step();
              optimizer.zero_grad();
              // Another shape on process 0, which all take.
              if (step == 30) model.replace_parameter("second.bias", torch::full({2}, 1.0 + rank));
            }
          }
        });
  }
}

// ---- steps of what is not averaged --------------------------------------------------------------

TEST(StepChecks, NameParametersThatAModelGotAfterPrepare) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    Accelerator accelerator(anew());
    Mlp net;
    auto [model, optimizer] = accelerator.prepare(net, sgd(net->parameters()));
    torch::nn::Linear head(2, 1);
    net->register_module("head", head);
    optimizer.add_param_group(torch::optim::OptimizerParamGroup(head->parameters()));
    const auto train = [&](auto& prepared, auto& stepped) {
      accelerator.backward(head(prepared(input_of(rank))).pow(2).mean());
      stepped.step();
      stepped.zero_grad();
    };
    const auto message = message_of<StateError>([&] { train(model, optimizer); });
    EXPECT_TRUE(contains(message, "'head.weight', 'head.bias'")) << message;
    EXPECT_TRUE(contains(message, "accelerator.free_memory(model), then prepare")) << message;

    accelerator.free_memory(model);
    test::forget_gradients(net->parameters());
    auto again = accelerator.prepare(net);
    train(again, optimizer);
    EXPECT_TRUE(test::same_everywhere(net->parameters()));
  });
}

TEST(StepChecks, NameParametersThatWereUnfrozenAfterPrepare) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    Accelerator accelerator(anew());
    Mlp net;
    net->first->weight.set_requires_grad(false);
    auto [model, optimizer] = accelerator.prepare(net, sgd(net->parameters()));
    accelerator.backward(model(input_of(rank)).pow(2).mean());
    optimizer.step();
    net->first->weight.set_requires_grad(true);
    {
      const auto alone = accelerator.no_sync(model);
      accelerator.backward(model(input_of(rank)).pow(2).mean());
      optimizer.step();  // each process for itself, as asked for
    }
    const auto message = message_of<StateError>([&, &step = optimizer] { step.step(); });
    EXPECT_TRUE(contains(message, "'first.weight'")) << message;
    EXPECT_FALSE(contains(message, "'first.bias'")) << message;
  });
}

TEST(StepChecks, SeeAParameterThatTakesThePlaceOfAnother) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    const CapturedLog log;
    Accelerator accelerator(anew());
    Mlp net;
    auto [model, optimizer] = accelerator.prepare(net, sgd(net->parameters()));
    auto weights = torch::zeros({2}, torch::requires_grad());
    const auto train = [&, &model = model, &optimizer = optimizer] {
      accelerator.backward(model(input_of(rank)).pow(2).mean() + weights.sum());
      optimizer.step();
      optimizer.zero_grad();
    };
    train();
    optimizer.param_groups()[0].params()[3] = weights;
    train();
    EXPECT_EQ(count_of(log, "parameter 3 of group 0 [2]"), rank == 0 ? 1 : 0);
  });
}

TEST(StepChecks, WarnOnceOfParametersThatNoPreparedModelHas) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    const std::string text = "parameters that no prepared model has";
    const auto warnings = [&](const AcceleratorOptions& options, bool prepares_model) {
      const CapturedLog log;
      Accelerator accelerator(anew(options));
      Mlp net;
      auto weights = torch::zeros({2, 5}, torch::requires_grad());
      auto parameters = net->parameters();
      parameters.push_back(weights);
      auto optimizer = accelerator.prepare(sgd(parameters));
      if (prepares_model) (void)accelerator.prepare(net);
      for (int step = 0; step < 3; ++step) {
        accelerator.backward(net(input_of(rank)).pow(2).mean() + weights.sum());
        optimizer.step();
        optimizer.zero_grad();
      }
      const auto count = count_of(log, text);
      if (count > 0 && prepares_model) {
        EXPECT_TRUE(contains(log.messages().back(), "parameter 4 of group 0 [2, 5]"))
            << log.messages().back();
      }
      return count;
    };
    const std::size_t once = rank == 0 ? 1 : 0;
    EXPECT_EQ(warnings({.drift_check = 0}, true), 0);
    EXPECT_EQ(warnings({}, true), once);
    EXPECT_EQ(warnings({}, false), once) << "an unprepared model with a prepared optimizer";
  });
}

TEST(StepChecks, WarnOfAnOptimizerOfAnotherModel) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    const CapturedLog log;
    Accelerator accelerator(anew());
    Mlp net, other;
    auto [model, optimizer] = accelerator.prepare(net, sgd(other->parameters()));
    for (int step = 0; step < 3; ++step) {
      accelerator.backward(model(input_of(rank)).pow(2).mean());
      optimizer.step();
    }
    EXPECT_EQ(count_of(log, "none of the 4 parameters of the optimizer has a gradient"),
              rank == 0 ? 1 : 0);
  });
}

TEST(StepChecks, WarnOfASchedulerWhoseOptimizerIsNotPrepared) {
  on_processes(2, [](PartialState& state) {
    const CapturedLog log;
    const std::string text = "the optimizer of a prepared scheduler is not prepared";
    Accelerator accelerator(anew());
    Mlp net;
    auto optimizer = sgd(net->parameters());
    // Prepared before its optimizer.
    auto early = accelerator.prepare(StepLR(optimizer, {.step_size = 1}));
    (void)accelerator.prepare(optimizer);
    early.step();
    EXPECT_EQ(count_of(log, text), 0);
    auto plain = sgd(net->parameters());
    auto scheduler = accelerator.prepare(StepLR(plain, {.step_size = 1}));
    scheduler.step();
    scheduler.step();
    EXPECT_EQ(count_of(log, text), state.is_main_process() ? 1 : 0);
  });
}

TEST(StepChecks, WarnOfASchedulerThatMovesWhileGradientsAccumulate) {
  on_processes(1, [](PartialState&) {
    const CapturedLog log;
    const std::string text = "a scheduler that is not prepared";
    Accelerator accelerator(
        anew({.gradient_accumulation_steps = 2, .step_scheduler_with_optimizer = false}));
    Mlp net;
    auto [model, optimizer] = accelerator.prepare(net, sgd(net->parameters()));
    StepLR plain(optimizer, {.step_size = 1});
    auto prepared = accelerator.prepare(StepLR(optimizer, {.step_size = 1}));
    const auto train = [&, &model = model](auto& scheduler, bool guarded) {
      for (int step = 0; step < 4; ++step) {
        const auto accumulating = accelerator.accumulate(model);
        if (!guarded || accelerator.sync_gradients()) scheduler.step();
      }
    };
    train(prepared, false);
    train(plain, true);
    EXPECT_EQ(count_of(log, text), 0);
    train(plain, false);
    EXPECT_EQ(count_of(log, text), 1);
  });
}

TEST(StepChecks, WarnOnceWhereAllProcessesTrainOnTheSameBatches) {
  on_processes(2, [](PartialState& state) {
    const CapturedLog log;
    const std::string text = "the processes train on the same batches";
    Accelerator accelerator(anew());
    const auto train = [&](auto& loader) {
      Mlp net;
      auto [model, optimizer] = accelerator.prepare(net, sgd(net->parameters()));
      for (const auto& batch : loader) {
        accelerator.backward(model(batch).pow(2).mean());
        optimizer.step();
        optimizer.zero_grad();
      }
    };
    const auto loader = [] {
      return make_data_loader(torch::arange(240, torch::kFloat).view({80, 3}) / 100,
                              {.batch_size = 2});
    };
    auto prepared = accelerator.prepare(loader());
    train(prepared);
    EXPECT_EQ(count_of(log, text), 0);
    // The loss over the batches of all.
    Mlp net;
    auto [model, optimizer] = accelerator.prepare(net, sgd(net->parameters()));
    for (const auto& batch : prepared) {
      accelerator.backward(model(accelerator.gather(batch)).pow(2).mean());
      optimizer.step();
      optimizer.zero_grad();
    }
    EXPECT_EQ(count_of(log, text), 0);
    auto plain = loader();
    train(plain);
    train(plain);
    EXPECT_EQ(count_of(log, text), state.is_main_process() ? 1 : 0);
  });
}

// ---- LocalSGD on a mesh -------------------------------------------------------------------------

TEST(LocalSgdOnAMesh, AveragesOverTheReplicasOnly) {
  on_processes(4, [](PartialState& state) {
    // Ranks 0 and 2 hold one part of a model, 1 and 3 the other.
    Accelerator accelerator(anew(
        {.parallelism_config = ParallelismConfig{.dp_replicate_size = 2, .dp_shard_size = 2}}));
    test::Line part;
    const torch::NoGradGuard no_grad;
    part->weight.fill_(state.process_index());
    LocalSGD local(accelerator, part.ptr(), {});
    local.average();
    EXPECT_EQ(part->weight.item<float>(), state.process_index() % 2 == 0 ? 1 : 2);
  });
}

TEST(LocalSgdOnAMesh, NeedsReplicas) {
  on_processes(2, [](PartialState&) {
    Accelerator accelerator(anew({.parallelism_config = ParallelismConfig{.tp_size = 2}}));
    test::Line part;
    EXPECT_TRUE(
        contains(message_of<UnsupportedError>([&] { LocalSGD(accelerator, part.ptr(), {}); }),
                 "averages over dp_replicate"));
  });
}

}  // namespace
}  // namespace accelerate::drift_watch_test
