#include <gtest/gtest.h>

#include "accelerate/errors.h"
#include "pipeline/nets.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using namespace test;
using enum PipelineSchedule;

TEST(Pipeline, TrainsInOneProcessAsTheModelAlone) {
  Accelerator accelerator({.cpu = true});
  const auto plain = plain_training(layers(), mean_squares, [](int i) { return numbers(i); }, 4);
  for (const auto schedule : {kGPipe, k1F1B}) {
    expect_equal(plain, pipeline_training(
                            accelerator, layers(), mean_squares,
                            {.schedule = schedule, .num_micro_batches = 4},
                            [](int i) { return numbers(i); }, 4));
  }
}

TEST(Pipeline, PassesActivationsBetweenItsChunksInOneProcess) {
  Accelerator accelerator({.cpu = true});
  expect_equal(plain_training(
                   TiedNet(), entropy, [](int i) { return tokens(i); }, 3),
               pipeline_training(
                   accelerator, TiedNet(), entropy,
                   {.schedule = kInterleaved1F1B, .num_micro_batches = 2, .chunks = 3},
                   [](int i) { return tokens(i); }, 3));
}

TEST(Pipeline, ComputesLayersAgainWithTheSameGradients) {
  Accelerator accelerator({.cpu = true});
  const auto plain = plain_training(layers(), mean_squares, [](int i) { return numbers(i); }, 2);
  for (const auto recompute : {PipelineRecompute::kUniform, PipelineRecompute::kBlock}) {
    expect_equal(plain, pipeline_training(
                            accelerator, layers(), mean_squares,
                            {.num_micro_batches = 2, .recompute = recompute, .recompute_layers = 3},
                            [](int i) { return numbers(i); }, 2));
  }
}

TEST(Pipeline, WeighsMicroBatchesOfDifferentSizeByTheirRows) {
  Accelerator accelerator({.cpu = true});
  const auto batches = [](int i) { return numbers(i, 7); };
  expect_equal(
      plain_training(layers(), mean_squares, batches, 2),
      pipeline_training(accelerator, layers(), mean_squares, {.num_micro_batches = 3}, batches, 2));
}

TEST(Pipeline, KeepsTheNamesOfTheModel) {
  TiedNet net;
  Pipeline pipeline(net, entropy);
  EXPECT_EQ(state_dict(*pipeline).keys(), state_dict(*net).keys());
  pipeline->eval();
  EXPECT_FALSE(net->is_training());
}

TEST(Pipeline, GivesLossAndOutputWithoutTrainingInEvaluation) {
  Accelerator accelerator({.cpu = true});
  auto net = layers();
  auto model = accelerator.prepare(Pipeline(net, mean_squares, {.num_micro_batches = 4}));
  model.eval();
  const auto [x, y] = numbers(0, 3);
  EXPECT_TRUE(torch::allclose(model(x), net->forward(x)));
  EXPECT_NEAR(model(x, y).item<double>(), mean_squares(net->forward(x), y).item<double>(), 1e-12);
  for (const auto& one : net->parameters()) EXPECT_FALSE(one.grad().defined());
}

TEST(Pipeline, TakesALossWithoutTargets) {
  Accelerator accelerator({.cpu = true});
  auto net = layers();
  auto model = accelerator.prepare(
      Pipeline(net,
               [](const PipelineTensors& outputs, const PipelineTensors& /*targets*/) {
                 return outputs.front().pow(2).mean();
               },
               {.num_micro_batches = 2}));
  const auto x = numbers(0).x;
  const auto wanted = net->forward(x).pow(2).mean().item<double>();
  EXPECT_NEAR(model->forward_backward({x}, {}).item<double>(), wanted, 1e-12);
  model.eval();
  EXPECT_NEAR(model->forward(PipelineTensors{x}, PipelineTensors{}).item<double>(), wanted, 1e-12);
}

TEST(Pipeline, SaysWhatIsWrong) {
  Accelerator accelerator({.cpu = true});
  EXPECT_NE(message_of<ArgumentError>([] {
              Pipeline(torch::nn::Linear(2, 2), mean_squares);
            }).find("derive the model from accelerate::StageList"),
            std::string::npos);
  Pipeline alone(layers(), mean_squares);
  EXPECT_NE(message_of<StateError>([&] {
              alone->train_step({numbers(0).x}, {numbers(0).y});
            }).find("Prepare the pipeline"),
            std::string::npos);
  auto model = accelerator.prepare(Pipeline(layers(), mean_squares, {.num_micro_batches = 4}));
  const auto [x, y] = numbers(0, 3);
  EXPECT_NE(message_of<ArgumentError>([&] {
              model->forward_backward({x}, {y});
            }).find("3 rows cannot be cut into 4 micro-batches"),
            std::string::npos);
  EXPECT_NE(message_of<StateError>([&] {
              model(numbers(0).x, numbers(0).y);
            }).find("No prepared optimizer"),
            std::string::npos);
}

TEST(Pippy, OfOneProcessIsTheModel) {
  auto net = layers();
  const auto x = numbers(0, 5).x;
  const auto expected = net->forward(x).detach();
  const auto model = prepare_pippy(net, {.num_chunks = 2});
  EXPECT_TRUE(torch::equal(model(x), expected));
  EXPECT_TRUE(model.hf_split_points().empty());
}

}  // namespace
}  // namespace accelerate
