#include "parallel/join.h"

#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

#include "support/message_of.h"
#include "support/on_processes.h"
#include "training/two_heads.h"

namespace accelerate {
namespace {

using detail::parallel::DataParallel;
using detail::parallel::Joinable;
using detail::parallel::JoinScope;
using detail::parallel::ReachedLeaves;
using test::expect_close;
using test::forget_gradients;
using test::gradients;
using test::input_of;
using test::TwoHeads;
using Hook = DDPCommunicationHookType;

void step_down(TwoHeads& net) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) {
    if (parameter.grad().defined()) parameter.sub_(parameter.grad(), 0.01);
  }
}

void announced_backward(JoinScope& scope, std::vector<DataParallel*> models,
                        const torch::Tensor& loss) {
  const ReachedLeaves leaves(loss);
  scope.announce(std::vector<Joinable*>(models.begin(), models.end()), leaves);
  for (auto* model : models) model->before_backward({loss, leaves});
  loss.backward();
  for (auto* model : models) model->after_backward();
}

torch::Tensor loss_of(TwoHeads& net, int rank, int step, bool both) {
  return net->forward(input_of(rank) * (1 + step), both).pow(2).sum();
}

struct Uneven {
  /// Of each rank.
  std::vector<int> counts;
  DistributedDataParallelKwargs options = {};
  bool both = true;
  /// Backward passes before each averaged one.
  int local = 0;
  double tolerance = 1e-5;
};

void expect_steps_of_the_active(PartialState& state, const Uneven& uneven) {
  const int rank = state.process_index();
  const int ranks = state.num_processes();
  torch::manual_seed(3);
  TwoHeads net, alone;  // `alone` is trained by one process with the data of all
  {
    const torch::NoGradGuard no_grad;
    auto to = alone->parameters(), from = net->parameters();
    for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
  }
  DataParallel parallel(*net, state.process_group(), uneven.options);
  JoinScope scope({&parallel});
  const int most = *std::ranges::max_element(uneven.counts);
  std::vector<torch::Tensor> last_own;
  for (int step = 0; step < most; ++step) {
    forget_gradients(alone);
    for (int r = 0; r < ranks; ++r) {
      if (uneven.counts[r] <= step) continue;
      for (int i = 0; i <= uneven.local; ++i) {
        (loss_of(alone, r, step, uneven.both) / ranks).backward();
      }
    }
    if (uneven.counts[rank] > step) {
      forget_gradients(net);
      for (int i = 0; i < uneven.local; ++i) loss_of(net, rank, step, uneven.both).backward();
      net->count.fill_(10 * rank + step);
      announced_backward(scope, {&parallel}, loss_of(net, rank, step, uneven.both));
      expect_close(gradients(net), gradients(alone), uneven.tolerance);
      step_down(net);
      last_own = gradients(net);
    }
    step_down(alone);
  }
  scope.finish();
  if (!last_own.empty()) expect_close(gradients(net), last_own, 0);
  auto own = net->parameters(), wanted = alone->parameters();
  for (std::size_t i = 0; i < own.size(); ++i) {
    EXPECT_TRUE(torch::allclose(own[i], wanted[i], 1e-3, uneven.tolerance)) << i;
    const auto all = gather(own[i].detach().unsqueeze(0));
    for (int r = 1; r < ranks; ++r) EXPECT_TRUE(torch::equal(all[0], all[r])) << "parameter " << i;
  }
  if (most > 0) {
    // Of the lowest process that was active in the last step.
    const auto last = std::ranges::find(uneven.counts, most) - uneven.counts.begin();
    EXPECT_EQ(net->count.item<float>(), static_cast<float>(10 * last + most - 1));
  }
}

TEST(Join, AnswersForProcessesWithoutData) {
  on_processes(2, [](PartialState& state) {
    expect_steps_of_the_active(state, {.counts = {2, 2}});
    expect_steps_of_the_active(state, {.counts = {4, 1}});
    expect_steps_of_the_active(state, {.counts = {1, 4}});
    expect_steps_of_the_active(state, {.counts = {0, 3}});
    expect_steps_of_the_active(state, {.counts = {3, 0}});
    expect_steps_of_the_active(state, {.counts = {0, 0}});
    expect_steps_of_the_active(state, {.counts = {1, 3}, .local = 2});
  });
  on_processes(3, [](PartialState& state) {
    expect_steps_of_the_active(state, {.counts = {1, 3, 2}});
    expect_steps_of_the_active(state, {.counts = {3, 0, 3}, .local = 1});
    expect_steps_of_the_active(state, {.counts = {0, 0, 4}});
  });
}

TEST(Join, TakesTheOptionsOfDistributedDataParallel) {
  on_processes(2, [](PartialState& state) {
    const std::vector<std::vector<int>> all_counts{{4, 2}, {0, 3}};
    for (const auto& counts : all_counts) {
      expect_steps_of_the_active(state,
                                 {.counts = counts, .options = {.gradient_as_bucket_view = true}});
      for (const bool both : {true, false}) {
        expect_steps_of_the_active(
            state, {.counts = counts, .options = {.find_unused_parameters = true}, .both = both});
        expect_steps_of_the_active(
            state, {.counts = counts, .options = {.static_graph = true}, .both = both, .local = 1});
      }
      expect_steps_of_the_active(
          state, {.counts = counts, .options = {.comm_hook = Hook::kFp16}, .tolerance = 2e-2});
      expect_steps_of_the_active(state,
                                 {.counts = counts, .options = {.comm_hook = Hook::kPowerSgd}});
    }
  });
}

TEST(Join, DividesByAllProcesses) {
  on_processes(2, [](PartialState& state) {
    torch::nn::Linear one(torch::nn::LinearOptions(1, 1).bias(false));
    DataParallel parallel(*one, state.process_group(), {});
    JoinScope scope({&parallel});
    if (state.process_index() == 0) {
      announced_backward(scope, {&parallel}, one->weight.sum() * 3);
      EXPECT_EQ(one->weight.grad().item<double>(), 1.5);
    }
    scope.finish();
    EXPECT_EQ(one->weight.grad().defined(), state.process_index() == 0);
  });
}

TEST(Join, TakesSeveralModels) {
  for (const int ranks : {2, 3}) {
    on_processes(ranks, [](PartialState& state) {
      const int rank = state.process_index();
      const int ranks = state.num_processes();
      for (const bool at_once : {false, true}) {
        torch::manual_seed(3);
        TwoHeads a, b;
        DataParallel first(*a, state.process_group(), {});
        DataParallel second(*b, state.process_group(), {});
        JoinScope scope({&first, &second});
        for (int step = 0; step < 1 + 2 * rank; ++step) {
          const int active = step == 0 ? ranks : ranks - (step + 1) / 2;
          const auto share = [&](TwoHeads& net) {
            auto result = test::expected(net, ranks);
            forget_gradients(net);
            for (int r = ranks - active; r < ranks; ++r) {
              (net->forward(input_of(r)).pow(2).sum() / ranks).backward();
            }
            result = gradients(net);
            forget_gradients(net);
            return result;
          };
          const auto means_a = share(a), means_b = share(b);
          const auto loss_a = a->forward(input_of(rank)).pow(2).sum();
          const auto loss_b = b->forward(input_of(rank)).pow(2).sum();
          if (at_once) {
            announced_backward(scope, {&first, &second}, loss_a + loss_b);
          } else {
            announced_backward(scope, {&second}, loss_b);
            announced_backward(scope, {&first}, loss_a);
          }
          expect_close(gradients(a), means_a);
          expect_close(gradients(b), means_b);
        }
        scope.finish();
      }
    });
  }
}

TEST(Join, SaysThatProcessesAnnounceDifferentModels) {
  on_processes(3, [](PartialState& state) {
    torch::nn::Linear a(1, 1), b(1, 1);
    DataParallel first(*a, state.process_group(), {}), second(*b, state.process_group(), {});
    JoinScope scope({&first, &second});
    const int rank = state.process_index();
    const auto message = test::message_of<CommError>([&] {
      if (rank == 0) {
        scope.finish();
      } else {
        const auto loss = (rank == 1 ? a : b)->weight.sum();
        announced_backward(scope, {rank == 1 ? &first : &second}, loss);
      }
    });
    EXPECT_NE(message.find("rank 1 announces number 0, rank 2 announces number 1"),
              std::string::npos)
        << message;
  });
}

TEST(Join, WantsModelsOfOneGroup) { EXPECT_THROW(JoinScope({}), ArgumentError); }

}  // namespace
}  // namespace accelerate
