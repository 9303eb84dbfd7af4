// join_uneven_inputs: processes that see different numbers of batches.
#include "accelerate/accelerator.h"

#include <accelerate/accelerate.h>
#include <accelerate/local_sgd.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>

#include "accelerator/nets.h"
#include "core/captured_log.h"
#include "support/message_of.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using test::anew;
using test::copy_parameters;
using test::distance;
using test::forget_gradients;
using test::gradients_same_everywhere;
using test::input_of;
using test::message_of;
using test::Mlp;
using test::same_everywhere;

torch::Tensor loss_of(Mlp& net, int rank, int step = 0) {
  return net(input_of(rank, step)).pow(2).mean();
}

template <class Model>
torch::Tensor loss_of(const PreparedModel<Model>& model, int rank, int step = 0) {
  return model(input_of(rank, step)).pow(2).mean();
}

TEST(UnevenInputs, JoinsProcessesThatRunOutOfData) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    for (const bool by_option : {true, false}) {
      Accelerator accelerator(anew({.dataloader_config = {.even_batches = by_option}}));
      const auto data = torch::arange(9, torch::kFloat).view({3, 3}) / 9;
      Mlp net, alone;
      auto [model, optimizer, loader, second] = accelerator.prepare(
          net, torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.1)),
          make_data_loader(data), make_data_loader(data));
      copy_parameters(alone, net);
      torch::optim::SGD plain(alone->parameters(), torch::optim::SGDOptions(0.1));
      JoinOptions options;
      if (by_option) options.even_batches = false;
      int seen = 0;
      accelerator.join_uneven_inputs(
          std::tie(model), options,
          [&, &model = model, &optimizer = optimizer, &loader = loader, &second = second] {
            for (auto& x : loader) {
              accelerator.backward(model(x).pow(2).mean());
              optimizer.step();
              optimizer.zero_grad();
              ++seen;
            }
            int count = 0;
            for ([[maybe_unused]] auto& x : second) ++count;
            EXPECT_EQ(count, 2 - rank) << "all loaders are told";
          });
      EXPECT_EQ(seen, 2 - rank);
      for (int step = 0; step < 2; ++step) {
        plain.zero_grad();
        for (int row = 2 * step; row < std::min(3, 2 * step + 2); ++row) {
          (alone(data[row].unsqueeze(0)).pow(2).mean() / 2).backward();
        }
        plain.step();
      }
      EXPECT_LT(distance(net, alone), 1e-6) << "the mean is over all processes";
      EXPECT_TRUE(same_everywhere(net->parameters()));
      EXPECT_EQ(accelerator.even_batches(), by_option);
      int after = 0;
      for ([[maybe_unused]] auto& x : loader) ++after;
      EXPECT_EQ(after, by_option ? 2 : 2 - rank) << "the loaders are as they were";

      // Also where an error leaves the scope: on all processes here.
      EXPECT_EQ(message_of<std::runtime_error>([&, &model = model] {
                  accelerator.join_uneven_inputs(std::tie(model), options,
                                                 [] { throw std::runtime_error("left"); });
                }),
                "left");
      after = 0;
      for ([[maybe_unused]] auto& x : loader) ++after;
      EXPECT_EQ(after, by_option ? 2 : 2 - rank);
      forget_gradients(net->parameters());
      accelerator.backward(loss_of(model, rank));
      EXPECT_TRUE(gradients_same_everywhere(net->parameters()));
    }
  });
}

TEST(UnevenInputs, JoinsWithAccumulationAndTwoModels) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    Accelerator accelerator(anew({.gradient_accumulation_steps = 2}));
    Mlp a, b, alone_a, alone_b;
    const auto options = torch::optim::SGDOptions(0.1);
    auto [first, second, optimizer] =
        accelerator.prepare(a, b,
                            torch::optim::SGD({torch::optim::OptimizerParamGroup(a->parameters()),
                                               torch::optim::OptimizerParamGroup(b->parameters())},
                                              options));
    copy_parameters(alone_a, a);
    copy_parameters(alone_b, b);
    torch::optim::SGD plain({torch::optim::OptimizerParamGroup(alone_a->parameters()),
                             torch::optim::OptimizerParamGroup(alone_b->parameters())},
                            options);
    const auto count_of = [](int r) { return r == 0 ? 2 : 6; };
    accelerator.join_uneven_inputs(
        std::tie(first, second), {.even_batches = false},
        [&, &first = first, &second = second, &optimizer = optimizer] {
          for (int step = 0; step < count_of(rank); ++step) {
            const auto accumulating = accelerator.accumulate(first, second);
            accelerator.backward(loss_of(first, rank, step) + loss_of(second, rank, step));
            optimizer.step();
            optimizer.zero_grad();
          }
        });
    for (int step = 0; step < 6; ++step) {
      for (int r = 0; r < 2; ++r) {
        if (step >= count_of(r)) continue;
        ((loss_of(alone_a, r, step) + loss_of(alone_b, r, step)) / 4).backward();
      }
      if (step % 2 == 1) {
        plain.step();
        plain.zero_grad();
      }
    }
    EXPECT_LT(distance(a, alone_a), 1e-6);
    EXPECT_LT(distance(b, alone_b), 1e-6);
  });
}

TEST(UnevenInputs, SaysWhatItCannotJoin) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    struct Numbers {
      int at = 0;
      std::optional<torch::Tensor> next() {
        return at == 4 ? std::nullopt : std::optional(torch::tensor(at++));
      }
      void reset() { at = 0; }
    };
    Accelerator accelerator(anew());
    Mlp net;
    torch::nn::Linear raw(1, 1);
    auto [model, stream, loader] = accelerator.prepare(
        net, make_data_loader(Numbers{}, {.batch_size = 2}), make_data_loader(torch::arange(3)));
    const auto messages_of = [&](auto&& f) {
      const test::CapturedLog log;
      f();
      std::string all;
      for (const auto& message : log.messages()) all += message + "\n";
      return all;
    };
    auto text = messages_of([&, &model = model, &loader = loader] {
      accelerator.join_uneven_inputs(std::tie(model), {.even_batches = false}, [&] {
        int count = 0;
        for ([[maybe_unused]] auto& x : loader) ++count;
        EXPECT_EQ(count, 2 - rank) << "loaders of data by index are changed all the same";
      });
    });
    EXPECT_EQ(text.find("data by index only") != std::string::npos, rank == 0) << text;
    text = messages_of(
        [&, &model = model] { accelerator.join_uneven_inputs(std::tie(model), {}, [] {}); });
    EXPECT_EQ(text, "") << "batches are even: nothing to do";
    text = messages_of(
        [&] { accelerator.join_uneven_inputs(std::tie(raw), {.even_batches = false}, [] {}); });
    EXPECT_EQ(text.find("nothing to join") != std::string::npos, rank == 0) << text;
    EXPECT_NE(message_of<StateError>([&, &model = model] {
                accelerator.join_uneven_inputs(std::tie(model), {.even_batches = false}, [&] {
                  accelerator.join_uneven_inputs(std::tie(model), {.even_batches = false}, [] {});
                });
              }).find("nested"),
              std::string::npos);
  });
}

}  // namespace
}  // namespace accelerate
