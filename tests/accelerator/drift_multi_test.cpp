// What would let the parameters of processes drift apart, or their loops, without a word.
#include <accelerate/accelerate.h>
#include <accelerate/local_sgd.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <source_location>
#include <string>
#include <vector>

#include "accelerator/nets.h"
#include "core/captured_log.h"
#include "support/message_of.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using test::anew;
using test::averaging;
using test::CapturedLog;
using test::expect_gradients;
using test::forget_gradients;
using test::gradients_same_everywhere;
using test::input_of;
using test::means_of;
using test::message_of;
using test::Mlp;
using test::same_everywhere;

template <class Model>
torch::Tensor loss_of(Model& model, int rank, int step = 0) {
  return model(input_of(rank, step)).pow(2).mean();
}

std::size_t count_of(const CapturedLog& log, const std::string& text) {
  return static_cast<std::size_t>(std::ranges::count_if(
      log.messages(),
      [&](const std::string& message) { return message.find(text) != std::string::npos; }));
}

// ---- models that the accelerator of a backward does not know ------------------------------------

TEST(Drift, AModelIsAveragedThoughItsAcceleratorHasForgottenIt) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    for (const bool is_static : {false, true}) {
      Accelerator accelerator(averaging(DistributedDataParallelKwargs{.static_graph = is_static}));
      Mlp net;
      auto model = accelerator.prepare(net);
      const auto parameters = net->parameters();
      const auto wanted = means_of(parameters, 2, [&](int r) { return loss_of(net, r); });
      accelerator.free_memory();
      for (int round = 0; round < 3; ++round) {
        forget_gradients(parameters);
        accelerator.backward(loss_of(model, rank));
        expect_gradients(parameters, wanted, "kept");
      }
      // One that is prepared anew is averaged once, whichever handle is used.
      auto again = accelerator.prepare(net);
      EXPECT_NE(again._core(), model._core());
      for (auto* handle : {&model, &again}) {
        forget_gradients(parameters);
        accelerator.backward(loss_of(*handle, rank));
        expect_gradients(parameters, wanted, "prepared twice");
      }
      {
        const auto alone = accelerator.no_sync(again);
        accelerator.backward(loss_of(model, rank));
        EXPECT_FALSE(gradients_same_everywhere(parameters));
      }
      // Nothing is left of a model that is gone.
      accelerator.free_memory(model, again);
      forget_gradients(parameters);
      accelerator.backward(loss_of(net, rank));
      EXPECT_FALSE(gradients_same_everywhere(parameters));
    }
  });
}

TEST(Drift, AModelIsAveragedWhicheverAcceleratorRunsBackward) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    Accelerator first(anew());
    Accelerator second(AcceleratorOptions{.cpu = true});
    Mlp a, b;
    auto model = first.prepare(a);
    const auto mean_of = [&](Mlp& net) {
      return means_of(net->parameters(), 2, [&](int r) { return loss_of(net, r); });
    };
    second.backward(loss_of(model, rank));
    expect_gradients(a->parameters(), mean_of(a), "of the other");
    auto own = second.prepare(b);
    forget_gradients(a->parameters());
    second.backward(loss_of(model, rank) + loss_of(own, rank));
    expect_gradients(a->parameters(), mean_of(a), "of both");
    expect_gradients(b->parameters(), mean_of(b), "of both");

    forget_gradients(a->parameters());
    const auto alone = first.no_sync(model);
    second.backward(loss_of(model, rank));
    EXPECT_FALSE(gradients_same_everywhere(a->parameters()));
  });
}

// ---- a backward that is not ours ----------------------------------------------------------------

TEST(Drift, StepsWithGradientsOfAPlainBackwardAreRefused) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    for (const auto& ddp : {DistributedDataParallelKwargs{},
                            DistributedDataParallelKwargs{.gradient_as_bucket_view = true}}) {
      Accelerator accelerator(averaging(ddp));
      torch::nn::Sequential net(torch::nn::Linear(3, 3));
      auto [model, optimizer] = accelerator.prepare(
          net, torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.05)));
      const auto step = [&, &optimizer = optimizer] {
        optimizer.step();
        optimizer.zero_grad();
      };
      // What is asked for is done.
      accelerator.backward(loss_of(model, rank));
      step();
      {
        const auto alone = accelerator.no_sync(model);
        loss_of(model, rank).backward();
        accelerator.backward(loss_of(model, rank));
        step();
      }
      run_local_sgd(accelerator, model, {.local_sgd_steps = 2},
                    [&, &model = model](LocalSGD& local) {
                      loss_of(model, rank).backward();
                      step();
                      local.step();
                    });
      // A look at gradients, and what a later backward averages along.
      loss_of(model, rank).backward();
      optimizer.zero_grad();
      step();
      loss_of(model, rank, 1).backward();
      accelerator.backward(loss_of(model, rank));
      EXPECT_TRUE(gradients_same_everywhere(net->parameters()));
      step();
      EXPECT_TRUE(same_everywhere(net->parameters()));
      loss_of(model, rank).backward();
      optimizer.zero_grad(/*set_to_none=*/false);
      step();

      loss_of(model, rank).backward();
      const auto message = message_of<StateError>(step);
      EXPECT_NE(message.find("the last one is '0.bias'"), std::string::npos) << message;
      EXPECT_NE(message.find("accelerator.backward(loss)"), std::string::npos) << message;
      EXPECT_TRUE(same_everywhere(net->parameters()));
    }
  });
}

// ---- sparse gradients ---------------------------------------------------------------------------

struct WordsImpl : torch::nn::Module {
  explicit WordsImpl(bool sparse)
      : words(torch::nn::EmbeddingOptions(10, 4).sparse(sparse)),
        bags(torch::nn::EmbeddingBagOptions(10, 4).mode(torch::kSum).sparse(sparse)),
        out(4, 1) {
    register_module("words", words);
    register_module("bags", bags);
    register_module("out", out);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return out(torch::tanh(words(x) + bags(x.unsqueeze(0)))).sum();
  }
  torch::nn::Embedding words;
  torch::nn::EmbeddingBag bags;
  torch::nn::Linear out;
};
TORCH_MODULE(Words);

/// Another word per rank, and one that all have; rank 1 has more of them.
torch::Tensor words_of(int rank, int step) {
  return rank == 0 ? torch::tensor({1, 2 + step}) : torch::tensor({1, 7, 7, 3 + step});
}

TEST(Drift, SparseGradientsAreAveraged) {
  for (const char* backend : {"shm", "gloo"}) {
    on_processes(
        2, {.environment = {{"ACCELERATE_HOST_BACKEND", backend}}}, [](PartialState& state) {
          using Hook = DDPCommunicationHookType;
          const int rank = state.process_index();
          for (const auto& ddp : {DistributedDataParallelKwargs{},
                                  DistributedDataParallelKwargs{.comm_hook = Hook::kBf16},
                                  DistributedDataParallelKwargs{.find_unused_parameters = true},
                                  DistributedDataParallelKwargs{.gradient_as_bucket_view = true},
                                  DistributedDataParallelKwargs{.static_graph = true}}) {
            Accelerator accelerator(averaging(ddp));
            Words net(true), dense(false);
            auto [model, optimizer] = accelerator.prepare(
                net, torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.1)));
            test::copy_parameters(dense->words, net->words);
            test::copy_parameters(dense->bags, net->bags);
            test::copy_parameters(dense->out, net->out);
            torch::optim::SGD plain(dense->parameters(), torch::optim::SGDOptions(0.1));
            const double tolerance = ddp.comm_hook == Hook::kBf16 ? 1e-2 : 1e-5;
            for (int step = 0; step < 3; ++step) {
              accelerator.backward(model(words_of(rank, step)));
              for (const auto& weight : {net->words->weight, net->bags->weight}) {
                ASSERT_TRUE(weight.grad().is_sparse());
                EXPECT_TRUE(same_everywhere(weight.grad().to_dense()));
              }
              for (int r = 0; r < 2; ++r) (dense(words_of(r, step)) / 2).backward();
              EXPECT_TRUE(torch::allclose(net->words->weight.grad().to_dense(),
                                          dense->words->weight.grad(), tolerance, tolerance));
              optimizer.step();
              optimizer.zero_grad();
              plain.step();
              plain.zero_grad();
            }
            EXPECT_LT(test::distance(net, dense), tolerance);
            EXPECT_TRUE(same_everywhere(net->parameters()));
          }
        });
  }
}

/// Its words are also what it answers with: gradients of two layers meet, and are dense.
struct TiedImpl : torch::nn::Module {
  TiedImpl() : words(torch::nn::EmbeddingOptions(10, 4).sparse(true)) {
    register_module("words", words);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return words(x).matmul(words->weight.t()).pow(2).sum();
  }
  torch::nn::Embedding words;
};
TORCH_MODULE(Tied);

TEST(Drift, SparseGradientsMayBeDenseMissingOrAccumulated) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    Accelerator accelerator(averaging({.find_unused_parameters = true}));
    Tied tied;
    auto model = accelerator.prepare(tied);
    accelerator.backward(model(words_of(rank, 0)));
    EXPECT_FALSE(tied->words->weight.grad().is_sparse());
    expect_gradients(tied->parameters(),
                     means_of(tied->parameters(), 2, [&](int r) { return tied(words_of(r, 0)); }));

    // Rank 1 does without its words, then both do.
    Words net(true);
    auto other = accelerator.prepare(net);
    const auto answer = [&] { return net->out(torch::ones({4})).sum(); };
    accelerator.backward(rank == 0 ? other(words_of(0, 0)) : answer());
    auto gradient = net->words->weight.grad();
    ASSERT_TRUE(gradient.defined() && gradient.is_sparse());
    EXPECT_TRUE(same_everywhere(gradient.to_dense()));
    EXPECT_EQ(gradient._nnz(), 2);
    forget_gradients(net->parameters());
    accelerator.backward(answer());
    EXPECT_FALSE(net->words->weight.grad().defined());
    EXPECT_TRUE(net->out->weight.grad().defined());

    // Rank 1 does with its words alone.
    forget_gradients(net->parameters());
    accelerator.backward(rank == 0 ? other(words_of(0, 0)) : net->words->weight.pow(2).sum());
    for (const auto& parameter : net->parameters()) {
      EXPECT_TRUE(same_everywhere(parameter.grad().to_dense()));
    }

    // Those of several batches are averaged with the last one.
    forget_gradients(net->parameters());
    {
      const auto alone = accelerator.no_sync(other);
      accelerator.backward(other(words_of(rank, 0)));
    }
    accelerator.backward(other(words_of(rank, 1)));
    gradient = net->words->weight.grad();
    const auto wanted = means_of(net->parameters(), 2,
                                 [&](int r) { return net(words_of(r, 0)) + net(words_of(r, 1)); });
    EXPECT_TRUE(torch::allclose(gradient.to_dense(), wanted[0].to_dense()));
  });
}

TEST(Drift, SparseGradientsOfProcessesThatRunOutOfData) {
  on_processes(2, [](PartialState& state) {
    const int rank = state.process_index();
    for (const bool searches : {false, true}) {
      Accelerator accelerator(averaging({.find_unused_parameters = searches}));
      Words net(true);
      auto [model, optimizer] = accelerator.prepare(
          net, torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.1)));
      accelerator.join_uneven_inputs(std::tie(model), {.even_batches = false},
                                     [&, &model = model, &optimizer = optimizer] {
                                       for (int step = 0; step < 2 + rank; ++step) {
                                         accelerator.backward(model(words_of(rank, step)));
                                         EXPECT_TRUE(net->words->weight.grad().is_sparse());
                                         optimizer.step();
                                         optimizer.zero_grad();
                                       }
                                     });
      EXPECT_TRUE(same_everywhere(net->parameters()));
    }
  });
}

// ---- schedules ----------------------------------------------------------------------------------

TEST(Drift, StepsOfSchedulesThatDifferAreExplainedOnce) {
  for (const int ranks : {1, 2}) {
    on_processes(ranks, [](PartialState& state) {
      const CapturedLog log;
      const auto prepare = [](const AcceleratorOptions& options) {
        Accelerator accelerator(anew(options));
        Mlp net;
        torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1));
        auto optimizer = accelerator.prepare(sgd);
        auto plateau = accelerator.prepare(ReduceLROnPlateau(sgd));
        for (int i = 0; i < 2; ++i) {
          auto scheduler = accelerator.prepare(StepLR(sgd, {.step_size = 1}));
        }
      };
      const std::string text = "steps of its schedule";
      prepare({.split_batches = true});
      prepare({.step_scheduler_with_optimizer = false});
      prepare({.step_scheduler_per_process = false});
      EXPECT_EQ(count_of(log, text), 0) << "they step as they are told";
      prepare({});
      prepare({});
      const bool told = state.num_processes() > 1 && state.is_main_process();
      ASSERT_EQ(count_of(log, text), told ? 1 : 0);
      if (told) {
        EXPECT_NE(log.messages().back().find("step_scheduler_per_process"), std::string::npos);
      }
    });
  }
}

// ---- who strayed --------------------------------------------------------------------------------

TEST(Drift, ARankThatPreparesAloneIsNamedWithItsLine) {
  const auto run = [](const auto& prepares) {
    return run_processes(2, {.timeout = std::chrono::seconds(30)}, [=](PartialState& state) {
      Accelerator accelerator(anew());
      if (state.process_index() == 1) {
        prepares(accelerator);
      } else {
        accelerator.wait_for_everyone();
      }
    });
  };
  const auto expect_line = [](const std::vector<RankOutcome>& outcomes, std::uint32_t line) {
    const auto place = "drift_multi_test.cpp:" + std::to_string(line);
    for (const auto& outcome : outcomes) {
      EXPECT_FALSE(outcome.ok());
      EXPECT_TRUE(outcome.output_contains(place)) << place << "\n" << outcome.output;
    }
  };
  const auto model_line = std::source_location::current().line() + 1;
  expect_line(run([](Accelerator& one) { (void)one.prepare_model(Mlp()); }), model_line);
  const auto loader = [](Accelerator& one) {
    (void)one.prepare_data_loader(make_data_loader(torch::arange(8), {.shuffle = true}));
  };
  expect_line(run(loader), std::source_location::current().line() - 2);
}

}  // namespace
}  // namespace accelerate
