// Captured steps when options, memory or shapes change between the calls.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "accelerator/fake_graphs.h"
#include "accelerator/nets.h"
#include "core/captured_log.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using test::anew;
using test::FakeGraphs;
using test::memory_of;
using test::message_of;
using test::Tensors;

class CaptureChangesTest : public test::Stateless {};

std::int64_t count_of(const test::CapturedLog& log, const std::string& text) {
  return std::ranges::count_if(log.messages(), [&](const std::string& message) {
    return message.find(text) != std::string::npos;
  });
}

/// A line trained by SGD with momentum, whose step can be captured.
struct LineRun {
  explicit LineRun(const AcceleratorOptions& options = {}) : accelerator(anew(options)) {
    auto sgd = SGD(net->parameters(), {.lr = 0.1, .momentum = 0.5});
    std::tie(model, optimizer) = accelerator.prepare(net, std::move(sgd));
  }
  torch::Tensor operator()(torch::Tensor& x) {
    const auto accumulating = accelerator.accumulate(model);
    const auto loss = (model(x) - 2 * x).pow(2).mean();
    accelerator.backward(loss);
    optimizer.step();
    if (zeroes_inside) optimizer.zero_grad();
    return loss;
  }
  Tensors memory() { return memory_of(net->parameters(), optimizer); }

  Accelerator accelerator;
  test::Line net;
  PreparedModel<test::Line> model;
  AcceleratedOptimizer optimizer;
  bool zeroes_inside = true;
};

/// The losses of 12 calls of a step, captured or not; `between` runs before each call.
struct Outcome {
  std::vector<float> losses = {};
  int records = 0;
};
template <class Between>
Outcome losses_of(LineRun& run, bool captured, const Between& between) {
  FakeGraphs fake([&] { return run.memory(); });
  auto step = run.accelerator.capture([&](torch::Tensor& x) { return run(x); }, {.warmup = 1});
  Outcome outcome;
  for (int i = 0; i < 12; ++i) {
    between(i);
    auto x = torch::full({2}, 1 + 0.1 * i);
    outcome.losses.push_back((captured ? step(x) : run(x)).template item<float>());
  }
  outcome.records = fake.records;
  return outcome;
}

TEST_F(CaptureChangesTest, RefusesMomentumThatASchedulerChanges) {
  LineRun run;
  auto& sgd = run.optimizer.optimizer();
  CyclicLR cyclic(sgd, {.base_lr = 0.01, .max_lr = 0.1, .step_size_up = 4});
  const FakeGraphs fake([&] { return run.memory(); });
  auto x = torch::ones({2});
  auto step = run.accelerator.capture([&](torch::Tensor& one) { return run(one); }, {.warmup = 1});
  float before = 0;
  const auto message = message_of<UnsupportedError>([&] {
    for (int i = 0; i < 12; ++i) {
      before = run.net->weight.item<float>();
      (void)step(x);
      cyclic.step();
    }
  });
  EXPECT_NE(message.find("momentum of SGD changes from step to step"), std::string::npos)
      << message;
  EXPECT_NE(message.find("cycle_momentum of OneCycleLR and CyclicLR"), std::string::npos)
      << message;
  EXPECT_EQ(run.net->weight.item<float>(), before) << "nothing was computed with the old momentum";
  EXPECT_THROW((void)step(x), UnsupportedError) << "the next time too";
}

TEST_F(CaptureChangesTest, FallsBackToEagerStepsIfMomentumCycles) {
  const auto train = [](bool captured) {
    LineRun run;
    CyclicLR cyclic(run.optimizer.optimizer(), {.base_lr = 0.01, .max_lr = 0.1, .step_size_up = 4});
    const FakeGraphs fake([&] { return run.memory(); });
    auto step = run.accelerator.capture([&](torch::Tensor& one) { return run(one); },
                                        {.warmup = 1, .fallback_to_eager = true});
    auto x = torch::ones({2});
    std::vector<float> losses;
    for (int i = 0; i < 12; ++i) {
      losses.push_back((captured ? step(x) : run(x)).template item<float>());
      cyclic.step();
    }
    return losses;
  };
  const auto expected = train(false);
  const test::CapturedLog log;
  EXPECT_EQ(train(true), expected);
  EXPECT_EQ(count_of(log, "It runs as it is."), 1);
}

TEST_F(CaptureChangesTest, RecordsAgainAfterAnOptionWasChangedOnce) {
  const auto train = [](bool captured) {
    LineRun run;
    return losses_of(run, captured, [&](int i) {
      if (i == 6) dynamic_cast<SGD&>(run.optimizer.optimizer()).options().weight_decay = 0.5;
    });
  };
  const auto expected = train(false);
  const test::CapturedLog log(LogLevel::kDebug);
  const auto found = train(true);
  EXPECT_EQ(found.losses, expected.losses);
  EXPECT_EQ(found.records, 2);
  EXPECT_EQ(count_of(log, "recorded again, because weight_decay of SGD has changed"), 1);
}

TEST_F(CaptureChangesTest, RecordsAgainAfterAParameterWasReplaced) {
  const auto train = [](bool captured) {
    LineRun run;
    return losses_of(run, captured, [&](int i) {
      if (i == 6) run.model.replace_parameter("weight", torch::full({1}, 5.0));
    });
  };
  const auto expected = train(false);
  const test::CapturedLog log(LogLevel::kDebug);
  const auto found = train(true);
  EXPECT_EQ(found.losses, expected.losses);
  EXPECT_EQ(found.records, 2);
  EXPECT_EQ(count_of(log, "because a parameter or buffer has other memory"), 1);
}

TEST_F(CaptureChangesTest, RecordsAgainAfterAModuleWasMoved) {
  const auto train = [](bool captured) {
    LineRun run;
    torch::Tensor old;  // so that the new memory is elsewhere
    return losses_of(run, captured, [&](int i) {
      if (i != 6) return;
      old = run.net->weight.detach();
      run.net->to(torch::kDouble);
      run.net->to(torch::kFloat);
    });
  };
  const auto found = train(true);
  EXPECT_EQ(found.losses, train(false).losses);
  EXPECT_EQ(found.records, 2);
}

TEST_F(CaptureChangesTest, RecordsAgainAfterOptimizerStatesWereReplaced) {
  const auto train = [](bool captured) {
    LineRun run;
    NamedTensors held;
    return losses_of(run, captured, [&](int i) {
      if (i != 6) return;
      const auto state = run.optimizer.state_dict();
      // A state that the program refers to is not overwritten.
      held = dynamic_cast<FusedOptimizer&>(run.optimizer.optimizer()).state_of(run.net->weight);
      run.optimizer.load_state_dict(state);
    });
  };
  const auto expected = train(false);
  const test::CapturedLog log(LogLevel::kDebug);
  const auto found = train(true);
  EXPECT_EQ(found.losses, expected.losses);
  EXPECT_EQ(found.records, 2);
  EXPECT_EQ(count_of(log, "because the state of an optimizer has other memory"), 1);
}

TEST_F(CaptureChangesTest, RecordsAgainAfterKeptGradientsWereDroppedOutside) {
  const auto train = [](bool captured) {
    LineRun run({.gradient_accumulation_steps = 2});
    return losses_of(run, captured, [&](int i) {
      if (i == 6) run.net->zero_grad();
    });
  };
  const auto expected = train(false);
  const test::CapturedLog log(LogLevel::kDebug);
  const auto found = train(true);
  EXPECT_EQ(found.losses, expected.losses);
  EXPECT_EQ(found.records, 4) << "both recordings, twice";
  EXPECT_GE(count_of(log, "because a gradient has other memory"), 1);
}

TEST_F(CaptureChangesTest, GradientsThatTheStepDropsFirstMayChange) {
  LineRun run;
  run.zeroes_inside = false;
  FakeGraphs fake([&] {  // a recording does not touch old gradients
    Tensors memory{run.net->weight};
    const auto& sgd = dynamic_cast<FusedOptimizer&>(run.optimizer.optimizer());
    for (const auto& [name, tensor] : sgd.state_of(run.net->weight)) memory.push_back(tensor);
    return memory;
  });
  auto step = run.accelerator.capture(
      [&](torch::Tensor& x) {
        run.optimizer.zero_grad();
        return run(x);
      },
      {.warmup = 1});
  auto x = torch::ones({2});
  for (int i = 0; i < 12; ++i) {
    if (i == 6) run.net->zero_grad();
    (void)step(x);
  }
  EXPECT_EQ(fake.records, 1);
}

TEST_F(CaptureChangesTest, WarnsOfMemoryThatChangesFromStepToStep) {
  LineRun run;
  Tensors old;
  const test::CapturedLog log;
  (void)losses_of(run, /*captured=*/true, [&](int) {
    old.push_back(run.net->weight.detach());
    run.net->to(torch::kDouble);
    run.net->to(torch::kFloat);
  });
  EXPECT_EQ(count_of(log, "has other memory from step to step"), 1);
}

/// Calls a step of one argument with these lengths, in turn.
struct Lengths {
  explicit Lengths(CaptureOptions options) : step(accelerator.capture(&add, options)) {}
  void call(std::int64_t length) {
    auto x = torch::zeros({length});
    ASSERT_EQ(step(x).sum().item<float>(), static_cast<float>(length));
  }
  static torch::Tensor add(torch::Tensor& x) { return x + 1; }

  Accelerator accelerator{anew()};
  FakeGraphs fake;
  CapturedStep<torch::Tensor (*)(torch::Tensor&)> step;
};

TEST_F(CaptureChangesTest, RecordsEachOfMoreLengthsThanGraphs) {
  const test::CapturedLog log;
  Lengths lengths({.warmup = 2, .max_graphs = 2});
  for (int round = 0; round < 3; ++round) {
    for (std::int64_t length = 1; length <= 4; ++length) lengths.call(length);
  }
  EXPECT_EQ(lengths.fake.records, 4);
  EXPECT_EQ(lengths.step.num_graphs(), 2);
  EXPECT_EQ(count_of(log, "more than max_graphs = 2 sets of shapes"), 1);
}

TEST_F(CaptureChangesTest, LengthsThatAreSeenOnceTakeNoGraphAway) {
  const test::CapturedLog log;
  Lengths lengths({.warmup = 1, .max_graphs = 1});
  for (int i = 0; i < 3; ++i) lengths.call(5);
  for (std::int64_t length = 6; length < 20; ++length) lengths.call(length);
  lengths.call(5);
  EXPECT_EQ(lengths.fake.records, 1);
  EXPECT_EQ(lengths.fake.replays, 3);
  EXPECT_TRUE(log.messages().empty());
}

TEST_F(CaptureChangesTest, WarnsIfTooManyLengthsTakeTurnsToBeRecorded) {
  const test::CapturedLog log;
  Lengths lengths({.warmup = 2});
  for (int round = 0; round < 3; ++round) {
    for (std::int64_t length = 1; length <= 70; ++length) lengths.call(length);
  }
  EXPECT_EQ(lengths.fake.records, 0);
  EXPECT_EQ(log.messages().size(), 1u);
  EXPECT_EQ(count_of(log, "more than 64 sets of shapes take turns"), 1);
}

}  // namespace
}  // namespace accelerate
