#include "parallel/data_parallel.h"

#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "support/on_processes.h"
#include "training/two_heads.h"

namespace accelerate {
namespace {

using detail::parallel::DataParallel;
using detail::parallel::ReachedLeaves;
using namespace test;  // NOLINT(google-build-using-namespace)

/// Runs `steps` steps and compares each with the mean that one process computes.
void expect_means(PartialState& state, const DistributedDataParallelKwargs& options,
                  bool both = true, double tolerance = 1e-5, int steps = 4) {
  torch::manual_seed(state.process_index());  // all begin with the weights of process 0
  TwoHeads net;
  DataParallel parallel(*net, state.process_group(), options);
  for (int step = 0; step < steps; ++step) {
    const auto means = expected(net, state.num_processes(), both);
    backward(parallel, net->forward(input_of(state.process_index()), both).pow(2).sum());
    expect_close(gradients(net), means, tolerance);
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) {
      if (parameter.grad().defined()) parameter.sub_(parameter.grad(), 0.01);
    }
  }
}

TEST(DataParallel, AveragesGradientsInEveryStep) {
  for (const int ranks : {1, 2, 3}) {
    on_processes(ranks, [](PartialState& state) { expect_means(state, {}); });
  }
}

TEST(DataParallel, TakesTheOptionsOfDistributedDataParallel) {
  on_processes(2, [](PartialState& state) {
    expect_means(state, {.gradient_as_bucket_view = true});
    expect_means(state, {.bucket_cap_mb = 1});
    expect_means(state, {.find_unused_parameters = true});
    expect_means(state, {.find_unused_parameters = true, .gradient_as_bucket_view = true});
    expect_means(state, {.static_graph = true});
    expect_means(state, {.gradient_as_bucket_view = true, .static_graph = true});
  });
}

TEST(DataParallel, SendsGradientsIn16Bits) {
  on_processes(2, [](PartialState& state) {
    using Hook = DDPCommunicationHookType;
    expect_means(state, {.comm_hook = Hook::kFp16}, true, 2e-3);
    expect_means(state, {.comm_hook = Hook::kBf16}, true, 2e-2);
    expect_means(state, {.comm_hook = Hook::kFp16, .comm_wrapper = Hook::kBf16}, true, 2e-2);
    expect_means(state, {.comm_wrapper = Hook::kBf16});

    // Python's numbers: rounded first, then averaged.
    torch::nn::Linear one(torch::nn::LinearOptions(1, 1).bias(false));
    DataParallel parallel(*one, state.process_group(), {.comm_hook = Hook::kFp16});
    backward(parallel, one->weight.sum() * 0.3);
    EXPECT_EQ(one->weight.grad().item<double>(), 0.300048828125);
  });
}

TEST(DataParallel, LeavesGradientsAloneThatItIsNotAskedFor) {
  on_processes(2, [](PartialState& state) {
    TwoHeads net;
    DataParallel parallel(*net, state.process_group(), {});
    const int rank = state.process_index();
    const auto loss = [&] { return net->forward(input_of(rank)).pow(2).sum(); };
    for (int round = 0; round < 3; ++round) {
      const auto means = expected(net, 2);
      loss().backward();
      const auto own = gradients(net);
      EXPECT_FALSE(torch::allclose(own[0], means[0]));
      backward(parallel, loss());  // adds up with what is there, and is averaged as one
      std::vector<torch::Tensor> twice;
      for (const auto& mean : means) twice.push_back(mean * 2);
      expect_close(gradients(net), twice);
    }
  });
}

TEST(DataParallel, NamesTheParametersThatALossDoesNotReach) {
  on_processes(2, [](PartialState& state) {
    TwoHeads net;
    DataParallel parallel(*net, state.process_group(), {});
    const auto loss = net->forward(input_of(0), /*both=*/false).sum();
    const ReachedLeaves leaves(loss);
    EXPECT_TRUE(parallel.reached_by(leaves));
    EXPECT_FALSE(parallel.reached_by(ReachedLeaves(torch::ones(1, torch::requires_grad()) * 2)));
    try {
      parallel.before_backward({loss, leaves});
      FAIL() << "nothing was thrown";
    } catch (const ArgumentError& error) {
      EXPECT_NE(std::string(error.what())
                    .find("2 of the 6 parameters of the model: right.weight, "
                          "right.bias."),
                std::string::npos)
          << error.what();
    }
    // Nothing is left behind: the next loss is averaged.
    const auto means = expected(net, 2);
    backward(parallel, net->forward(input_of(state.process_index())).pow(2).sum());
    expect_close(gradients(net), means);
  });
}

TEST(DataParallel, DoesWithoutUnusedParametersWhereToldSo) {
  on_processes(2, [](PartialState& state) {
    expect_means(state, {.find_unused_parameters = true}, /*both=*/false);

    // Not the same ones in every step.
    TwoHeads net;
    DataParallel parallel(*net, state.process_group(), {.find_unused_parameters = true});
    for (int step = 0; step < 5; ++step) {
      const bool both = step % 2 == 0;
      const auto means = expected(net, 2, both);
      backward(parallel, net->forward(input_of(state.process_index()), both).pow(2).sum());
      expect_close(gradients(net), means);
    }
  });
}

TEST(DataParallel, SaysWhichLocalGradientsWereDiscarded) {
  on_processes(2, [](PartialState& state) {
    TwoHeads net;
    DataParallel parallel(*net, state.process_group(), {.find_unused_parameters = true});
    const auto loss = [&](bool both) {
      return net->forward(input_of(state.process_index()), both).pow(2).sum();
    };
    for (const bool keeps : {false, true}) {
      loss(true).backward();  // not averaged
      net->zero_grad(/*set_to_none=*/!keeps);
      if (keeps) {
        backward(parallel, loss(false));
        EXPECT_TRUE(net->left->weight.grad().ne(0).any().item<bool>());
        EXPECT_TRUE(net->right->weight.grad().eq(0).all().item<bool>());
        continue;
      }
      try {
        backward(parallel, loss(false));
        FAIL() << "nothing was thrown";
      } catch (const ArgumentError& error) {
        EXPECT_NE(std::string(error.what()).find("are gone: right.weight, right.bias. With "),
                  std::string::npos)
            << error.what();
      }
    }
    // Nothing is left behind.
    net->zero_grad();
    const auto means = expected(net, 2, false);
    backward(parallel, loss(false));
    expect_close(gradients(net), means);
  });
}

TEST(DataParallel, LeavesFrozenParametersOutAndCountsSharedOnesOnce) {
  on_processes(2, [](PartialState& state) {
    TwoHeads net;
    for (auto& parameter : net->right->parameters()) parameter.requires_grad_(false);
    net->register_module("again", net->left);
    DataParallel parallel(*net, state.process_group(), {});
    backward(parallel, net->forward(input_of(state.process_index())).pow(2).sum());
    const auto own = net->left->weight.grad();
    EXPECT_TRUE(torch::equal(gather(own.unsqueeze(0))[0], gather(own.unsqueeze(0))[1]));
    EXPECT_FALSE(net->right->weight.grad().defined());
  });
}

TEST(DataParallel, GivesAllProcessesTheBuffersOfTheFirst) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    for (const bool broadcasts : {true, false}) {
      TwoHeads net;
      net->count.fill_(rank + 1);
      DataParallel parallel(*net, state.process_group(), {.broadcast_buffers = broadcasts});
      EXPECT_EQ(net->count.item<float>(), 1) << "at the start always";
      net->count.fill_(rank + 5);
      net->forward(input_of(rank)).sum().backward();
      EXPECT_EQ(net->count.item<float>(), rank + 5) << "nobody asked";
      backward(parallel, net->forward(input_of(rank)).sum());
      EXPECT_EQ(net->count.item<float>(), broadcasts ? 5 : rank + 5);
    }
  });
}

TEST(DataParallel, NamesTheParameterThatIsAnotherOneElsewhere) {
  on_processes(3, [](PartialState& state) {
    torch::nn::Linear net(3, state.process_index() == 2 ? 5 : 4);
    try {
      DataParallel parallel(*net, state.process_group(), {});
      FAIL() << "nothing was thrown";
    } catch (const CommError& error) {
      EXPECT_EQ(error.rank(), 2);
      EXPECT_NE(std::string(error.what())
                    .find("parameter 0 is weight float32[4, 3] on rank 0 and weight float32[5, 3] "
                          "on rank 2"),
                std::string::npos)
          << error.what();
    }
  });
}

TEST(DataParallel, IsBuiltAnewForParametersOfAnotherShape) {
  for (const bool is_static : {false, true}) {
    on_processes(2, [is_static](PartialState& state) {
      using Hook = DDPCommunicationHookType;
      for (const auto hook : {Hook::kNo, Hook::kPowerSgd}) {
        const int rank = state.process_index();
        torch::nn::Linear net(torch::nn::LinearOptions(3, 5).bias(false));
        DataParallel parallel(*net, state.process_group(),
                              {.static_graph = is_static, .comm_hook = hook});
        const auto step = [&] {
          backward(parallel, net->forward(input_of(rank)).pow(2).sum());
          const auto own = net->weight.grad();
          net->weight.mutable_grad() = torch::Tensor();
          for (int r = 0; r < 2; ++r) (net->forward(input_of(r)).pow(2).sum() / 2).backward();
          EXPECT_TRUE(torch::allclose(own, net->weight.grad(), 1e-5, 1e-5));
          net->weight.mutable_grad() = torch::Tensor();
        };
        for (int i = 0; i < 3; ++i) step();
        net->forward(input_of(rank)).sum().backward();  // a gradient of the old shape
        net->weight.set_data(torch::rand({7, 3}) + rank);
        parallel.rebuild();
        EXPECT_FALSE(net->weight.grad().defined());
        const auto weights = gather(net->weight.detach().unsqueeze(0));
        EXPECT_TRUE(torch::equal(weights[0], weights[1])) << "those of process 0";
        for (int i = 0; i < 3; ++i) step();
      }
    });
  }
}

TEST(DataParallel, FindsTheLeavesOfALargeGraph) {
  const auto used = torch::ones(3, torch::requires_grad());
  const auto unused = torch::ones(3, torch::requires_grad());
  auto x = used * 1;
  for (int i = 0; i < 1000; ++i) x = x + x.sin();
  ReachedLeaves leaves;
  for (int i = 0; i < 2; ++i) {
    leaves.walk(x);
    EXPECT_TRUE(leaves.contains(used));
    EXPECT_FALSE(leaves.contains(unused));
  }
  leaves.walk(unused);
  EXPECT_TRUE(leaves.contains(unused)) << "a leaf is reached by itself";
  EXPECT_FALSE(leaves.contains(used));
}

TEST(DataParallel, NamesBuffersAndFrozenParametersThatDiffer) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    const auto message = [&](torch::nn::Module& module) {
      try {
        DataParallel parallel(module, state.process_group(), {});
      } catch (const CommError& error) {
        return std::string(error.what());
      }
      return std::string("nothing was thrown");
    };
    torch::nn::Linear net(3, 4);
    net->register_buffer("seen", torch::zeros({rank + 1}));
    EXPECT_NE(message(*net).find("the buffer seen float32[2] on rank 1"), std::string::npos)
        << message(*net);
    torch::nn::Linear other(3, 4);
    other->bias.requires_grad_(rank == 0);
    EXPECT_NE(message(*other).find("the frozen bias float32[4] on rank 1"), std::string::npos)
        << message(*other);
  });
}

TEST(DataParallel, NamesParametersThatAreNoLongerFrozen) {
  on_processes(2, [](PartialState& state) {
    TwoHeads net;
    for (auto& parameter : net->right->parameters()) parameter.requires_grad_(false);
    DataParallel parallel(*net, state.process_group(), {});
    const auto loss = [&] { return net->forward(input_of(state.process_index())).pow(2).sum(); };
    backward(parallel, loss());
    net->right->weight.requires_grad_(true);
    try {
      backward(parallel, loss());
      FAIL() << "nothing was thrown";
    } catch (const ArgumentError& error) {
      EXPECT_NE(std::string(error.what()).find("averaged: right.weight. Prepare"),
                std::string::npos)
          << error.what();
    }
    // As the message says, and as free_memory and prepare do.
    parallel.rebuild();
    forget_gradients(net);
    backward(parallel, loss());
    EXPECT_TRUE(torch::equal(gather(net->right->weight.grad().unsqueeze(0))[0],
                             gather(net->right->weight.grad().unsqueeze(0))[1]));
  });
}

/// Parameters that are large enough to be averaged where they lie, and small ones. The gradients of
/// `a` and `b` are one piece of memory.
struct WideImpl : torch::nn::Module {
  WideImpl() {
    register_module("first", first);
    register_module("second", second);
    a = register_parameter("a", torch::randn({160, 200}));
    b = register_parameter("b", torch::randn({32000}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto sum = (a.reshape(-1) + b).tanh();
    return second(torch::tanh(first(x))).pow(2).mean() + (sum * sum.roll(1)).mean() * x.mean();
  }
  torch::nn::Linear first{3, 150}, second{150, 200};
  torch::Tensor a, b;
};
TORCH_MODULE(Wide);

TEST(DataParallel, AveragesLargeGradientsByEveryWay) {
  // Where they lie, or through the buckets of c10d's Reducer.
  for (const char* backend : {"shm", "gloo"}) {
    on_processes(
        2, {.environment = {{"ACCELERATE_HOST_BACKEND", backend}}}, [backend](PartialState& state) {
          const int rank = state.process_index();
          Wide net;
          DataParallel parallel(*net, state.process_group(), {});
          for (int step = 0; step < 4; ++step) {
            std::vector<torch::Tensor> wanted;
            for (int r = 0; r < 2; ++r) {
              (net->forward(input_of(r) + step) / 2).backward();
              if (step == 3) (net->forward(input_of(r)) / 2).backward();
            }
            for (const auto& one : net->parameters()) wanted.push_back(one.grad().clone());
            for (auto& one : net->parameters()) one.mutable_grad() = torch::Tensor();
            // In the last step what is averaged adds to what is there.
            if (step == 3) net->forward(input_of(rank)).backward();
            backward(parallel, net->forward(input_of(rank) + step));
            for (std::size_t i = 0; i < wanted.size(); ++i) {
              EXPECT_TRUE(torch::allclose(net->parameters()[i].grad(), wanted[i], 1e-4, 1e-7))
                  << "parameter " << i << " in step " << step;
            }
            for (auto& one : net->parameters()) one.mutable_grad() = torch::Tensor();
          }
          // With a graph through the gradients, which the Reducer does not take.
          if (backend == std::string("gloo")) return;
          const auto loss = net->forward(input_of(rank));
          const ReachedLeaves leaves(loss);
          parallel.before_backward({loss, leaves});
          loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
          parallel.after_backward();
          const auto own = net->a.grad().detach().unsqueeze(0);
          EXPECT_TRUE(torch::equal(gather(own)[0], gather(own)[1]));
          for (auto& one : net->parameters()) one.mutable_grad() = torch::Tensor();
        });
  }
}

}  // namespace
}  // namespace accelerate
