// Processes that stray, die, or use what is not there.
#include <gtest/gtest.h>

#include <csignal>
#include <string>

#include "sharding/sharded_run.h"
#include "support/has.h"
#include "support/message_of.h"
#include "support/on_processes.h"
#include "support/patience.h"

namespace accelerate {
namespace {

using test::expect_equal;
using test::has;
using test::message_of;
using test::run;
using test::RunOptions;
using test::sharded;
using test::ShardedRun;
using test::ShardLevel;
using test::TinyGpt;

RunOptions level_three() { return {.spec = sharded(ShardLevel::kParameters)}; }

TEST(ShardedFaults, AUnitThatOneProcessSkipsInTheFirstStepIsNamedOnAll) {
  const auto outcomes = run_processes(2, {}, [] {
    auto options = level_three();
    const int rank = PartialState().process_index();
    options.before_step = [rank](TinyGpt& net, int) {
      if (rank == 1) net->skipped = {1};
    };
    (void)run(options);
  });
  for (const auto& outcome : outcomes) {
    EXPECT_FALSE(outcome.ok());
    EXPECT_FALSE(outcome.timed_out);
    EXPECT_TRUE(has(outcome.output, "gather blocks.1"));
    EXPECT_TRUE(has(outcome.output, "gather blocks.2"));
    EXPECT_LT(outcome.seconds, test::patient(test::Seconds(20)).count());
  }
}

TEST(ShardedFaults, AProcessThatDiesIsNamed) {
  const auto outcomes = run_processes(3, {}, [] {
    auto options = level_three();
    const int rank = PartialState().process_index();
    options.before_step = [rank](TinyGpt&, int step) {
      if (rank == 1 && step == 2) std::raise(SIGKILL);
    };
    (void)run(options);
  });
  EXPECT_EQ(outcomes[1].signal, SIGKILL);
  for (const int rank : {0, 2}) {
    EXPECT_FALSE(outcomes[rank].ok());
    EXPECT_FALSE(outcomes[rank].timed_out);
    EXPECT_TRUE(has(outcomes[rank].output, "rank 1"));
    EXPECT_LT(outcomes[rank].seconds, test::patient(test::Seconds(20)).count());
  }
}

TEST(ShardedFaults, AParameterThatIsNotHereThrowsByNameAndTrainingGoesOn) {
  on_processes(2, [] {
    const auto wanted = run({});
    auto options = level_three();
    options.before_step = [](TinyGpt& net, int step) {
      const auto weight = net->blocks->ptr(1)->as<test::Block>()->up->weight;
      for (const auto& use : {std::function<void()>([&] { (void)weight.norm(); }),
                              std::function<void()>([&] { (void)weight.data_ptr(); }),
                              std::function<void()>([&] { (void)(net->head->weight + 1); })}) {
        try {
          use();
          ADD_FAILURE() << "nothing was thrown in step " << step;
        } catch (const std::exception& error) {
          EXPECT_TRUE(has(error.what(), "is sharded over 2 processes"));
        }
      }
      EXPECT_TRUE(has(message_of<StateError>([&] { (void)weight.norm(); }),
                      "'blocks.1.up.weight' is sharded over 2 processes"));
      const torch::NoGradGuard no_grad;
      EXPECT_TRUE(
          has(message_of<StateError>([&] { weight.fill_(1); }), "a change of it would be lost"));
    };
    expect_equal(run(options), wanted, "after errors");
  });
}

TEST(ShardedFaults, GradientsAreTokensThatThrowAndTellOfZeroGrad) {
  on_processes(2, [] {
    for (const auto level : {ShardLevel::kGradients, ShardLevel::kParameters}) {
      ShardedRun training({.spec = sharded(level)});
      (void)training.train(0, 0, true);
      const auto gradient = training.net->head->weight.grad();
      ASSERT_TRUE(gradient.defined());
      EXPECT_EQ(gradient.sizes(), training.net->head->weight.sizes());
      EXPECT_ANY_THROW((void)gradient.sum());
      const auto& local = training.optimizer.param_groups()[0].params()[0];
      EXPECT_TRUE(local.grad().defined());
      training.net->zero_grad();
      (void)training.train(0, 0, true);
      const auto once = local.grad().clone();
      (void)training.train(0, 0, true);
      EXPECT_TRUE(local.grad().equal(once + once)) << "accumulated";
      training.net->zero_grad();
      (void)training.train(0, 0, true);
      EXPECT_TRUE(local.grad().equal(once)) << "zero_grad of the module is noticed";
    }
  });
}

TEST(ShardedFaults, ABackwardOfTheProgramAndMovedModelsAreRefused) {
  on_processes(2, [] {
    {
      ShardedRun training({.spec = sharded(ShardLevel::kGradients)});
      const auto loss = training.model(torch::zeros({1, 4}, torch::kLong)).sum();
      EXPECT_TRUE(
          has(message_of<StateError>([&] { loss.backward(); }), "Call accelerator.backward(loss)"));
    }
    for (const auto level : {ShardLevel::kGradients, ShardLevel::kParameters}) {
      ShardedRun training({.spec = sharded(level)});
      const auto loss = training.model(torch::zeros({1, 4}, torch::kLong)).sum();
      training.net->norm->weight.set_data(torch::ones({64}));
      EXPECT_TRUE(has(message_of<StateError>([&] { training.accelerator.backward(loss); }),
                      "The parameter 'norm.weight' was given other data"));
    }
    ShardedRun training({.spec = sharded(ShardLevel::kParameters)});
    const auto loss = training.model(torch::zeros({1, 4}, torch::kLong)).sum();
    EXPECT_TRUE(has(message_of<UnsupportedError>(
                        [&] { training.accelerator.backward(loss, {.create_graph = true}); }),
                    "create_graph is set"));
  });
}

TEST(ShardedFaults, OptimizersThatNeedWholeMatricesAreRefusedByName) {
  on_processes(2, [] {
    ShardedRun training({.spec = sharded(ShardLevel::kGradients)});
    Adafactor adafactor(training.net->parameters());
    EXPECT_TRUE(
        has(message_of<UnsupportedError>([&] { (void)training.accelerator.prepare(adafactor); }),
            "needs whole matrices"));
    torch::optim::LBFGS lbfgs(training.net->parameters());
    EXPECT_TRUE(has(
        message_of<UnsupportedError>([&] { (void)training.accelerator.prepare(lbfgs); }), "LBFGS"));
    EXPECT_TRUE(has(message_of<UnsupportedError>([&] {
                      training.accelerator.join_uneven_inputs(std::tie(training.model),
                                                              {.even_batches = false}, [] {});
                    }),
                    "each process has a part of the model only"));
  });
}

}  // namespace
}  // namespace accelerate
