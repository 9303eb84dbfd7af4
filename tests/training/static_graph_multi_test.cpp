#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "parallel/data_parallel.h"
#include "support/message_of.h"
#include "support/on_processes.h"
#include "support/recomputed.h"
#include "training/two_heads.h"

namespace accelerate {
namespace {

using detail::parallel::DataParallel;
using test::backward;
using test::expect_close;
using test::forget_gradients;
using test::gradients;
using test::input_of;
using test::recomputed;
using test::TwoHeads;
using Hook = DDPCommunicationHookType;
using Forward = std::function<torch::Tensor(TwoHeads&, int rank)>;

torch::Tensor plain(TwoHeads& net, int rank) { return net->forward(input_of(rank)).pow(2).sum(); }

torch::Tensor one_head(TwoHeads& net, int rank) {
  return net->forward(input_of(rank), /*both=*/false).pow(2).sum();
}

torch::Tensor body_twice(TwoHeads& net, int rank) {
  const auto x = input_of(rank);
  return plain(net, rank) + net->left(torch::tanh(net->body(x * 2))).sum();
}

/// The right head is hidden from the graph, the body comes twice, in parts with a backward each.
torch::Tensor with_recomputed_parts(TwoHeads& net, int rank) {
  const auto x = input_of(rank).requires_grad_(true);
  const auto body = [net](const torch::Tensor& t) mutable { return torch::tanh(net->body(t)); };
  const auto right = [net](const torch::Tensor& t) mutable { return net->right(t); };
  const auto hidden = recomputed(x, body) + recomputed(x * 2, body);
  return (net->left(hidden) + recomputed(hidden, right)).pow(2).sum();
}

/// The right head on rank 1 alone.
torch::Tensor on_one_rank_more(TwoHeads& net, int rank) {
  return net->forward(input_of(rank), /*both=*/rank == 1).pow(2).sum();
}

std::vector<torch::Tensor> means_of(TwoHeads& net, int ranks, const Forward& forward) {
  forget_gradients(net);
  for (int rank = 0; rank < ranks; ++rank) (forward(net, rank) / ranks).backward();
  auto result = gradients(net);
  forget_gradients(net);
  return result;
}

struct Steps {
  DistributedDataParallelKwargs options = {};
  double tolerance = 1e-5;
  /// Backward passes before each averaged one.
  int local = 0;
};

void expect_means(PartialState& state, const Forward& forward, Steps steps = {}) {
  const int rank = state.process_index();
  torch::manual_seed(rank);
  TwoHeads net;
  steps.options.static_graph = true;
  DataParallel parallel(*net, state.process_group(), steps.options);
  for (int step = 0; step < 4; ++step) {
    auto means = means_of(net, state.num_processes(), forward);
    for (int i = 0; i < steps.local; ++i) forward(net, rank).backward();
    backward(parallel, forward(net, rank));
    for (auto& mean : means) {
      if (mean.defined()) mean *= 1 + steps.local;
    }
    expect_close(gradients(net), means, steps.tolerance);
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) {
      if (parameter.grad().defined()) parameter.sub_(parameter.grad(), 0.001);
    }
  }
}

TEST(StaticGraph, AveragesWhatTheFirstStepUsed) {
  for (const int ranks : {1, 2, 3}) {
    on_processes(ranks, [](PartialState& state) {
      expect_means(state, plain);
      expect_means(state, one_head);
      expect_means(state, body_twice);
      expect_means(state, with_recomputed_parts);
      if (state.num_processes() > 1) expect_means(state, on_one_rank_more);
      expect_means(state, one_head, {.options = {.find_unused_parameters = true}});
      expect_means(state, with_recomputed_parts, {.options = {.gradient_as_bucket_view = true}});
    });
  }
}

TEST(StaticGraph, AddsUpBackwardPassesThatAreNotAveraged) {
  for (const int ranks : {2, 3}) {
    on_processes(ranks, [](PartialState& state) {
      for (const auto& forward : {plain, one_head, body_twice, with_recomputed_parts}) {
        expect_means(state, forward, {.local = 2});
      }
      expect_means(state, with_recomputed_parts,
                   {.options = {.gradient_as_bucket_view = true}, .local = 1});
    });
  }
}

TEST(StaticGraph, SendsGradientsThroughTheHook) {
  on_processes(2, [](PartialState& state) {
    expect_means(state, with_recomputed_parts,
                 {.options = {.comm_hook = Hook::kBf16}, .tolerance = 3e-2});
    expect_means(state, with_recomputed_parts,
                 {.options = {.comm_hook = Hook::kPowerSgd}});  // plain before step 1000
    torch::nn::Linear one(torch::nn::LinearOptions(1, 1).bias(false));
    DataParallel parallel(*one, state.process_group(),
                          {.static_graph = true, .comm_hook = Hook::kFp16});
    for (int step = 0; step < 3; ++step) {
      backward(parallel, one->weight.sum() * 0.3);
      EXPECT_EQ(one->weight.grad().item<double>(), 0.300048828125) << step;
      one->zero_grad();
    }
  });
}

TEST(StaticGraph, SaysWhenTheGraphHasChanged) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    TwoHeads net;
    DataParallel parallel(*net, state.process_group(), {.static_graph = true});
    backward(parallel, one_head(net, rank));
    const auto more =
        test::message_of<ArgumentError>([&] { backward(parallel, plain(net, rank)); });
    EXPECT_NE(more.find("the graph has changed"), std::string::npos) << more;
    EXPECT_NE(more.find("right.weight, right.bias"), std::string::npos) << more;
    EXPECT_NE(more.find("find_unused_parameters = true"), std::string::npos) << more;
    forget_gradients(net);
    const auto less = test::message_of<ArgumentError>(
        [&] { backward(parallel, net->body(input_of(rank)).sum()); });
    EXPECT_NE(less.find("left.weight, left.bias"), std::string::npos) << less;
    EXPECT_NE(less.find("static_graph"), std::string::npos) << less;
    const auto means = means_of(net, 2, one_head);
    backward(parallel, one_head(net, rank));
    expect_close(gradients(net), means);
  });
}

}  // namespace
}  // namespace accelerate
