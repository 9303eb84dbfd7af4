#include <gtest/gtest.h>

#include <csignal>
#include <limits>
#include <optional>
#include <stdexcept>
#include <vector>

#include "../examples/gpt_model.h"
#include "accelerate/errors.h"
#include "pipeline/nets.h"
#include "support/has.h"
#include "support/message_of.h"
#include "support/on_processes.h"
#include "support/patience.h"

namespace accelerate {
namespace {

using namespace test;
using enum PipelineSchedule;

AcceleratorOptions stages(std::int64_t pp, std::int64_t dp = 1) {
  return {.cpu = true,
          .parallelism_config = ParallelismConfig{.dp_replicate_size = dp, .pp_size = pp}};
}

TEST(PipelineTraining, OnTwoProcessesEqualsThatOfOne) {
  on_processes(2, [] {
    Accelerator accelerator(stages(2));
    const auto batches = [](int i) { return numbers(i); };
    const auto plain = plain_training(layers(), mean_squares, batches, 4);
    for (const auto schedule : {kGPipe, k1F1B}) {
      expect_equal(plain,
                   pipeline_training(accelerator, layers(), mean_squares,
                                     {.schedule = schedule, .num_micro_batches = 4}, batches, 4));
    }
    // Three chunks per process would leave a stage without layers: seven layers, four stages.
    expect_equal(plain, pipeline_training(
                            accelerator, layers(), mean_squares,
                            {.schedule = kInterleaved1F1B, .num_micro_batches = 4, .chunks = 2},
                            batches, 4));
    expect_equal(plain, pipeline_training(accelerator, layers(), mean_squares,
                                          {.num_micro_batches = 4,
                                           .variable_shapes = true,
                                           .recompute = PipelineRecompute::kUniform},
                                          batches, 4));
  });
}

TEST(PipelineTraining, FindsNormsOfAnyOrder) {
  on_processes(2, [] {
    Accelerator accelerator(stages(2));
    const auto [x, y] = numbers(0);
    auto plain = layers();
    mean_squares(plain->forward(x), y).backward();
    auto model = accelerator.prepare(Pipeline(layers(), mean_squares));
    const double infinity = std::numeric_limits<double>::infinity();
    for (const double order : {2.0, 1.0, 0.0, -1.0, infinity, -infinity}) {
      model->zero_grad();
      model->forward_backward({x}, {y});
      std::vector<torch::Tensor> norms;
      for (const auto& one : plain->parameters()) {
        norms.push_back(torch::linalg_vector_norm(one.grad(), order));
      }
      EXPECT_NEAR(accelerator.clip_grad_norm_(model.parameters(), 1e9, order).item<double>(),
                  torch::linalg_vector_norm(torch::stack(norms), order).item<double>(), 1e-10)
          << order;
    }
  });
}

TEST(PipelineTraining, OnFourProcessesEqualsThatOfOne) {
  on_processes(4, [] {
    Accelerator accelerator(stages(4));
    const auto batches = [](int i) { return numbers(i, i == 1 ? 6 : 8); };
    expect_equal(plain_training(layers(), mean_squares, batches, 3),
                 pipeline_training(accelerator, layers(), mean_squares, {.num_micro_batches = 3},
                                   batches, 3));
  });
}

TEST(PipelineTraining, LeavesFrozenLayersAsTheyAre) {
  on_processes(2, [] {
    Accelerator accelerator(stages(2));
    const auto batches = [](int i) { return numbers(i); };
    // All of the first stage but a bias, and a part of the second one.
    const auto net = [] {
      auto result = layers();
      for (const std::size_t frozen : {0U, 2U, 5U}) {
        result->parameters()[frozen].set_requires_grad(false);
      }
      return result;
    };
    expect_equal(
        plain_training(net(), mean_squares, batches, 3),
        pipeline_training(accelerator, net(), mean_squares, {.num_micro_batches = 4}, batches, 3));
  });
}

TEST(PipelineTraining, FreezesAndUnfreezesLayersBetweenSteps) {
  on_processes(2, [] {
    Accelerator accelerator(stages(2));
    const auto train = [&](bool cut) {
      TiedNet net;
      net->tokens->weight.set_requires_grad(false);
      std::optional<PreparedModel<Pipeline>> model;
      if (cut) {
        model = accelerator.prepare(
            Pipeline(net, entropy, {.num_micro_batches = 2, .variable_shapes = true}));
      }
      std::vector<double> norms;
      for (int step = 0; step < 4; ++step) {
        for (auto& one : net->parameters()) one.set_requires_grad(step != 0);
        net->first->bias.set_requires_grad(true);
        net->zero_grad();
        const auto [x, y] = tokens(step);
        if (cut) {
          (*model)->forward_backward({x}, {y});
          norms.push_back(accelerator.clip_grad_norm_(model->parameters(), 1e9).item<double>());
        } else {
          entropy(net->forward(x), y).backward();
          norms.push_back(torch::nn::utils::clip_grad_norm_(net->parameters(), 1e9));
        }
      }
      return norms;
    };
    const auto wanted = train(false);
    const auto given = train(true);
    for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(given[i], wanted[i], 1e-6) << i;
  });
}

TEST(PipelineTraining, NamesWhatALayerThatIsUnfrozenNeeds) {
  const auto outcomes = run_processes(2, {}, [] {
    Accelerator accelerator(stages(2));
    auto net = layers();
    auto model = accelerator.prepare(Pipeline(net, mean_squares, {.split_points = {"4"}}));
    const auto [x, y] = numbers(0);
    for (const bool trains : {false, true}) {
      for (const std::size_t i : {0U, 1U, 2U, 3U}) net->parameters()[i].set_requires_grad(trains);
      model->forward_backward({x}, {y});
    }
  });
  EXPECT_TRUE(has(outcomes[0].output, "but gave Double[8, 8] without gradient before"));
  EXPECT_TRUE(has(outcomes[0].output, "if layers are frozen or unfrozen between steps"));
}

TEST(PipelineTraining, RunsInBfloat16) {
  on_processes(2, [] {
    const auto losses = [](std::int64_t pp, PipelineOptions options) {
      AcceleratorState::_reset_state();
      GradientState::_reset_state();
      auto run = stages(pp, 2 / pp);
      run.mixed_precision = PrecisionType::kBf16;
      Accelerator accelerator(run);
      auto net = layers();
      net->to(torch::kFloat);
      options.num_micro_batches = 2;
      auto [model, optimizer] = accelerator.prepare(Pipeline(net, mean_squares, options),
                                                    AdamW(net->parameters(), {.lr = 1e-2}));
      std::vector<double> result;
      for (int step = 0; step < 4; ++step) {
        const auto [x, y] = numbers(step);
        result.push_back(model(x.to(torch::kFloat), y.to(torch::kFloat)).template item<double>());
      }
      return result;
    };
    const auto plain = plain_training(
        layers(), mean_squares, [](int i) { return numbers(i); }, 4, /*max_norm=*/1e9);
    const auto alone = losses(1, {});
    const auto cut = losses(2, {});
    EXPECT_EQ(losses(2, {.recompute = PipelineRecompute::kUniform, .recompute_layers = 2}), cut);
    for (std::size_t i = 0; i < cut.size(); ++i) {
      EXPECT_NEAR(cut[i], alone[i], 1e-6) << "the same products in the same types";
      EXPECT_NEAR(cut[i], plain.losses[i], 2e-2);
      EXPECT_NE(cut[i], plain.losses[i]);
    }
  });
}

TEST(PipelineTraining, AddsUpTheGradientsOfTiedWeightsOnce) {
  on_processes(2, [] {
    Accelerator accelerator(stages(2));
    const auto batches = [](int i) { return tokens(i); };
    const auto plain = plain_training(TiedNet(), entropy, batches, 4);
    expect_equal(plain, pipeline_training(accelerator, TiedNet(), entropy, {.num_micro_batches = 2},
                                          batches, 4));
    expect_equal(
        plain, pipeline_training(accelerator, TiedNet(), entropy,
                                 {.num_micro_batches = 4, .split_points = {"second"}}, batches, 4));
  });
}

TEST(PipelineTraining, NoticesTiedWeightsThatDriftApart) {
  on_processes(2, [] {
    Accelerator accelerator(stages(2));
    TiedNet net;
    auto [model, optimizer] = accelerator.prepare(Pipeline(net, entropy, {.num_micro_batches = 2}),
                                                  AdamW(net->parameters(), {.lr = 1e-2}));
    const auto step = [&, &model = model](int i) {
      const auto [x, y] = tokens(i);
      (void)model(x, y);
    };
    for (int i = 0; i < 3; ++i) step(i);
    if (accelerator.process_index() == 1) {
      const torch::NoGradGuard no_grad;
      net->tokens->weight.add_(0.5);
    }
    EXPECT_TRUE(has(message_of<CommError>([&] { step(3); }),
                    "The weight 'tokens.weight' is used by several stages"));
  });
}

TEST(PipelineTraining, AveragesOverDataParallelCopies) {
  on_processes(4, [] {
    Accelerator accelerator(stages(2, 2));
    // Rank r has stage r / 2 and the batches of copy r % 2.
    const auto copy = accelerator.process_index() % 2;
    const auto whole = [](int i) { return tokens(i, 8); };
    const auto half = [&](int i) {
      const auto [x, y] = whole(i);
      return Batch{x.narrow(0, 4 * copy, 4), y.narrow(0, 4 * copy, 4)};
    };
    expect_equal(
        plain_training(TiedNet(), entropy, whole, 4),
        pipeline_training(accelerator, TiedNet(), entropy, {.num_micro_batches = 2}, half, 4));
  });
}

TEST(PipelineTraining, ReadsEqualBatchesOnAllStages) {
  on_processes(4, [] {
    Accelerator accelerator(stages(2, 2));
    auto loader = accelerator.prepare(
        make_data_loader(std::pair{torch::arange(8), torch::arange(8)}, {.batch_size = 2}));
    std::vector<std::int64_t> seen;
    for (const auto& [x, y] : loader) {
      for (std::int64_t i = 0; i < x.size(0); ++i) seen.push_back(x[i].item<std::int64_t>());
    }
    const std::vector<std::int64_t> expected = accelerator.process_index() % 2 == 0
                                                   ? std::vector<std::int64_t>{0, 1, 4, 5}
                                                   : std::vector<std::int64_t>{2, 3, 6, 7};
    EXPECT_EQ(seen, expected);
  });
}

TEST(PipelineTraining, OfTheGptExampleEqualsThatOfOneProcess) {
  on_processes(2, [] {
    Accelerator accelerator(stages(2));
    const auto loss = [](const torch::Tensor& scores, const torch::Tensor& next) {
      return torch::cross_entropy_loss(scores.flatten(0, 1), next.flatten());
    };
    const auto batches = [](int i) {
      torch::manual_seed(i);
      const auto text = torch::randint(0, 256, {4, 17}, torch::kLong);
      return Batch{text.narrow(1, 0, 16), text.narrow(1, 1, 16)};
    };
    for (const auto dtype : {torch::kFloat, torch::kDouble}) {
      for (const bool tied : {false, true}) {
        const auto net = [&] {
          torch::manual_seed(5);
          examples::Gpt gpt(examples::GptConfig{.width = 32, .tied = tied});
          gpt->to(dtype);
          return gpt;
        };
        auto plain = plain_training(net(), loss, batches, 3);
        // Biases of keys have no gradient but rounding, which Adam makes steps of in float32.
        if (dtype == torch::kFloat) plain.weights.clear();
        expect_equal(
            plain,
            pipeline_training(accelerator, net(), loss, {.num_micro_batches = 2}, batches, 3),
            1e-5);
      }
    }
  });
}

TEST(PipelineTraining, GivesTheLossToTheLastStageOnlyIfAskedTo) {
  on_processes(2, [] {
    Accelerator accelerator(stages(2));
    auto net = layers();
    auto model = accelerator.prepare(
        Pipeline(net, mean_squares, {.num_micro_batches = 2, .broadcast_loss = false}));
    model.eval();
    const auto [x, y] = numbers(0);
    const auto loss = model(x, y).item<double>();
    const auto output = model(x);
    EXPECT_EQ(output.defined(), accelerator.process_index() == 1);
    EXPECT_EQ(loss == 0, accelerator.process_index() == 0);
    EXPECT_EQ(model->is_last_stage(), accelerator.process_index() == 1);
  });
}

TEST(PipelineTraining, LeavesClippingAndStepsToTheProgramIfAskedTo) {
  on_processes(2, [] {
    Accelerator accelerator(stages(2));
    auto net = layers();
    auto sgd = SGD(net->parameters(), {.lr = 0.1});
    auto [model, optimizer] =
        accelerator.prepare(Pipeline(net, mean_squares, {.num_micro_batches = 2}), std::move(sgd));
    auto plain = layers();
    const auto [x, y] = numbers(0);
    mean_squares(plain->forward(x), y).backward();
    const auto expected = torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.01);
    model->forward_backward({x}, {y});
    const auto norm = accelerator.clip_grad_norm_(model.parameters(), 0.01);
    EXPECT_NEAR(norm.item<double>(), expected, 1e-12);
    const auto parameters = net->parameters();
    const auto others = plain->parameters();
    int held = 0;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].is_meta()) continue;
      ++held;
      EXPECT_TRUE(torch::allclose(parameters[i].grad(), others[i].grad(), 0, 1e-12));
    }
    EXPECT_GT(held, 0);
    EXPECT_LT(held, 8);
    optimizer.step();
    optimizer.zero_grad();
  });
}

TEST(PipelineTraining, RefusesAModelThatIsNoPipeline) {
  on_processes(2, [] {
    Accelerator accelerator(stages(2));
    EXPECT_NE(message_of<UnsupportedError>([&] {
                (void)accelerator.prepare(layers());
              }).find("accelerate::Pipeline"),
              std::string::npos);
  });
}

// ---- errors ----------------------------------------------------------------------------------

/// A layer that does `f` when it is called for the third time.
struct TroubleImpl : torch::nn::Module {
  explicit TroubleImpl(std::function<void()> action) : f(std::move(action)) {}
  torch::Tensor forward(const torch::Tensor& x) {
    if (++calls == 3) f();
    return x;
  }
  std::function<void()> f;
  int calls = 0;
};
TORCH_MODULE(Trouble);

std::vector<RankOutcome> run_with_trouble(const std::function<void()>& f) {
  return run_processes(2, {}, [&] {
    Accelerator accelerator(stages(2));
    torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::Linear(8, 3), Trouble(f));
    net->to(torch::kDouble);
    (void)pipeline_training(
        accelerator, net, mean_squares, {.num_micro_batches = 4, .split_points = {"1"}},
        [](int i) { return numbers(i); }, 2);
  });
}

TEST(PipelineFaults, AnErrorInAStageNamesItAndTheMicroBatchAndEndsAll) {
  const auto outcomes =
      run_with_trouble([] { throw std::runtime_error("the table is not there"); });
  EXPECT_TRUE(has(outcomes[1].output,
                  "Stage 1 of the pipeline (2 stages) failed in the forward of micro-batch 2: "));
  EXPECT_TRUE(has(outcomes[1].output, "the table is not there"));
  EXPECT_TRUE(has(outcomes[0].output, "Stage 0 of the pipeline (2 stages) failed in the "));
  for (const auto& outcome : outcomes) {
    EXPECT_FALSE(outcome.ok());
    EXPECT_FALSE(outcome.timed_out);
    EXPECT_LT(outcome.seconds, test::patient(test::Seconds(20)).count());
  }
}

/// Throws in its call number `call`.
torch::Tensor thrown(const torch::Tensor& x, int* calls, int call) {
  if (++*calls == call) throw std::runtime_error("out of paper");
  return x;
}

TEST(PipelineFaults, AStepAfterAnErrorThatWasCaughtIsRefused) {
  on_processes(2, [] {
    Accelerator accelerator(stages(2));
    int first = 0, second = 0;
    torch::nn::Sequential net(
        torch::nn::Linear(6, 8),
        torch::nn::Functional([&](const torch::Tensor& x) { return thrown(x, &first, 4); }),
        torch::nn::Linear(8, 3),
        torch::nn::Functional([&](const torch::Tensor& x) { return thrown(x, &second, 1); }));
    net->to(torch::kDouble);
    auto model = accelerator.prepare(Pipeline(
        net, mean_squares, {.schedule = kGPipe, .num_micro_batches = 4, .split_points = {"2"}}));
    const auto [x, y] = numbers(0);
    // Too few rows for all stages: nothing has been sent.
    EXPECT_TRUE(has(message_of<ArgumentError>([&, x = x, y = y] {
                      model->forward_backward({x.narrow(0, 0, 2)}, {y.narrow(0, 0, 2)});
                    }),
                    "2 rows cannot be cut"));
    // The second stage has messages left of three micro-batches.
    EXPECT_TRUE(
        has(message_of<StateError>([&, x = x, y = y] { model->forward_backward({x}, {y}); }),
            "out of paper"));
    const auto refused = "An error has ended an earlier step of this pipeline in its middle";
    EXPECT_TRUE(has(
        message_of<StateError>([&, x = x, y = y] { model->forward_backward({x}, {y}); }), refused));
    model.eval();
    EXPECT_TRUE(has(message_of<StateError>([&, x = x, y = y] { (void)model(x, y); }), refused));
    EXPECT_TRUE(has(message_of<StateError>([&, x = x] { (void)model(x); }), refused));
  });
}

TEST(PipelineFaults, AStageThatDiesIsNamed) {
  const auto outcomes = run_with_trouble([] { std::raise(SIGKILL); });
  EXPECT_EQ(outcomes[1].signal, SIGKILL);
  EXPECT_FALSE(outcomes[0].ok());
  EXPECT_FALSE(outcomes[0].timed_out);
  EXPECT_TRUE(has(outcomes[0].output,
                  "Stage 0 of the pipeline (2 stages) failed in the backward "
                  "of micro-batch "));
  EXPECT_TRUE(has(outcomes[0].output, "rank 1"));
}

}  // namespace
}  // namespace accelerate
