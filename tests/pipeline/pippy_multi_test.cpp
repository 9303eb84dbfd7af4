#include <gtest/gtest.h>

#include "accelerate/errors.h"
#include "pipeline/nets.h"
#include "support/message_of.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using namespace test;

TEST(PreparePippy, GivesTheOutputOfTheModelOnTheLastProcess) {
  on_processes(2, [](PartialState& state) {
    auto net = layers();
    const auto x = numbers(0, 6).x;
    const auto expected = net->forward(x).detach();
    const auto model = prepare_pippy(net, {.example_args = {x}});
    EXPECT_EQ(model.num_chunks(), 2);
    const auto output = model(state.is_main_process() ? x : torch::Tensor());
    ASSERT_EQ(output.defined(), state.is_last_process());
    if (output.defined()) {
      EXPECT_TRUE(torch::allclose(output, expected, 0, 1e-12));
    }
  });
}

TEST(PreparePippy, GivesItToAllWithGatherOutput) {
  on_processes(3, [](PartialState&) {
    auto net = layers();
    const auto x = numbers(0, 7).x;
    const auto expected = net->forward(x).detach();
    // 7 rows in 4 parts: the last row is repeated once, and its output is dropped.
    const auto model = prepare_pippy(net, {.split_points = std::vector<std::string>{"2", "4"},
                                           .num_chunks = 4,
                                           .gather_output = true});
    EXPECT_EQ(model.hf_split_points(), (std::vector<std::string>{"2", "4"}));
    EXPECT_TRUE(torch::allclose(model(x), expected, 0, 1e-12));
    const auto one_row = model(x.narrow(0, 0, 1));
    EXPECT_TRUE(torch::allclose(one_row, expected.narrow(0, 0, 1), 0, 1e-12));
  });
}

TEST(PreparePippy, KeepsTheLayersOfTheProcessAlone) {
  on_processes(2, [](PartialState& state) {
    auto net = layers();
    const auto model = prepare_pippy(net, {.split_points = std::vector<std::string>{"4"}});
    EXPECT_EQ(model.stages(),
              (std::vector<std::vector<std::string>>{{"0", "1", "2", "3"}, {"4", "5", "6"}}));
    EXPECT_EQ(net->named_parameters()["0.weight"].is_meta(), state.process_index() == 1);
    EXPECT_EQ(net->named_parameters()["6.weight"].is_meta(), state.process_index() == 0);
  });
}

TEST(PreparePippy, RefusesWhatCannotBeCut) {
  on_processes(2, [](PartialState&) {
    const auto message = [](const PreparePippyOptions& options) {
      return message_of<ArgumentError>([&] { (void)prepare_pippy(layers(), options); });
    };
    using Names = std::vector<std::string>;
    EXPECT_NE(message({.num_chunks = 0}).find("num_chunks is 0"), std::string::npos);
    EXPECT_NE(message({.split_points = Names{"head"}}).find("'head' is no layer"),
              std::string::npos);
    EXPECT_NE(message({.split_points = Names{"0"}}).find("in the order of the layers"),
              std::string::npos);
    EXPECT_NE(message({.split_points = Names{"1", "2"}}).find("has 1 split points, not 2"),
              std::string::npos);
    EXPECT_NE(message({.split_points = "even"}).find("split_points is 'even'"), std::string::npos);
    torch::nn::Sequential one(torch::nn::Linear(2, 2));
    EXPECT_NE(message_of<ArgumentError>([&] {
                (void)prepare_pippy(one);
              }).find("has 1 layers, too few for a pipeline of 2 stages"),
              std::string::npos);
    const auto model = prepare_pippy(layers());
    EXPECT_NE(message_of<ArgumentError>([&] {
                (void)model(torch::ones({}));
              }).find("Could not find batch size from args or kwargs"),
              std::string::npos);
  });
}

}  // namespace
}  // namespace accelerate
