// Training on several processes gives what one process gives: the same global batch, the same
// numbers.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "accelerator/nets.h"
#include "core/text.h"
#include "optim/optimizer_core.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

using test::anew;
using test::copy_parameters;
using test::distance;
using test::Mlp;
namespace F = torch::nn::functional;

/// One layer of attention. No bias on keys: its gradient is zero but for rounding, and Adam makes
/// steps of that.
struct AttentionImpl : torch::nn::Module {
  AttentionImpl() {
    register_module("qkv", qkv);
    register_module("norm", norm);
    register_module("head", head);
  }
  torch::Tensor forward(const torch::Tensor& x) {  // [batch, time, 4]
    const auto parts = qkv(x).chunk(3, -1);
    const auto weights = torch::softmax(parts[0].matmul(parts[1].transpose(1, 2)) / 2, -1);
    return head(norm(x + weights.matmul(parts[2])).mean(1));
  }
  torch::nn::Linear qkv{torch::nn::LinearOptions(4, 12).bias(false)};
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({4})};
  torch::nn::Linear head{4, 3};
};
TORCH_MODULE(Attention);

constexpr std::int64_t kSamples = 88;
constexpr std::int64_t kGlobalBatch = 8;
constexpr std::int64_t kSeed = 7;
constexpr int kSteps = 50;

std::pair<torch::Tensor, torch::Tensor> classes(torch::ScalarType type) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(11);
  const auto x = torch::randn({kSamples, 5, 4}, generator, torch::TensorOptions(torch::kDouble));
  return {x.to(type), x.sum(1).slice(1, 0, 3).argmax(1)};
}

struct Run {
  Attention net{nullptr};
  std::vector<double> losses;
};

using Optimizer = std::shared_ptr<torch::optim::Optimizer>;
using MakeOptimizer = std::function<Optimizer(std::vector<torch::Tensor>)>;

Attention make_net(torch::ScalarType type) {
  torch::manual_seed(3);
  Attention net;
  net->to(type);
  return net;
}

/// A plain loop of LibTorch over the order that the seed stands for.
Run alone(torch::ScalarType type, const MakeOptimizer& make) {
  Run run{.net = make_net(type), .losses = {}};
  const auto optimizer = make(run.net->parameters());
  const auto [x, y] = classes(type);
  for (int epoch = 0;; ++epoch) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(kSeed + epoch);
    const auto order = torch::randperm(kSamples, generator, torch::TensorOptions(torch::kLong));
    for (std::int64_t at = 0; at < kSamples; at += kGlobalBatch) {
      if (std::ssize(run.losses) == kSteps) return run;
      const auto chosen = order.slice(0, at, at + kGlobalBatch);
      const auto loss =
          F::cross_entropy(run.net(x.index_select(0, chosen)), y.index_select(0, chosen));
      optimizer->zero_grad();
      loss.backward();
      optimizer->step();
      run.losses.push_back(loss.item<double>());
    }
  }
}

Run together(torch::ScalarType type, bool split, const MakeOptimizer& make) {
  Accelerator accelerator(
      anew({.dataloader_config = {
                .split_batches = split, .use_seedable_sampler = true, .data_seed = kSeed}}));
  Run run{.net = make_net(type), .losses = {}};
  if (!accelerator.is_main_process()) {  // all begin with the values of process 0
    const torch::NoGradGuard no_grad;
    for (auto& parameter : run.net->parameters()) parameter.add_(1);
  }
  const auto [x, y] = classes(type);
  const auto batch_size = split ? kGlobalBatch : kGlobalBatch / accelerator.num_processes();
  auto [model, optimizer, loader] = accelerator.prepare(
      run.net, make(run.net->parameters()),
      make_data_loader(std::pair{x, y}, {.batch_size = batch_size, .shuffle = true}));
  while (true) {
    for (auto& [inputs, labels] : loader) {
      if (std::ssize(run.losses) == kSteps) return run;
      const auto loss = F::cross_entropy(model(inputs), labels);
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
      run.losses.push_back(accelerator.reduce(loss.detach(), Reduction::kMean).item<double>());
    }
  }
}

void expect_the_numbers_of_one_process(torch::ScalarType type, double parameters, double losses,
                                       const MakeOptimizer& reference, const MakeOptimizer& make,
                                       const std::string& what) {
  const auto wanted = alone(type, reference);
  EXPECT_LT(wanted.losses.back(), 0.9 * wanted.losses.front()) << what << " learns nothing";
  for (const bool split : {false, true}) {
    const auto run = together(type, split, make);
    EXPECT_LT(distance(run.net, wanted.net), parameters) << what << ", split_batches " << split;
    for (int i = 0; i < kSteps; ++i) {
      ASSERT_NEAR(run.losses[i], wanted.losses[i], losses) << what << ", step " << i;
    }
    EXPECT_TRUE(test::same_everywhere(run.net->parameters())) << what;
  }
}

TEST(Equality, SeveralProcessesTrainAsOneDoes) {
  for (const int ranks : {1, 2, 4}) {
    on_processes(ranks, [] {
      const MakeOptimizer sgd = [](auto parameters) {
        return std::make_shared<torch::optim::SGD>(
            parameters, torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(1e-3));
      };
      const MakeOptimizer our_sgd = [](auto parameters) {
        return std::make_shared<SGD>(parameters,
                                     SGDOptions{.lr = 0.05, .momentum = 0.9, .weight_decay = 1e-3});
      };
      const MakeOptimizer adamw = [](auto parameters) {
        return std::make_shared<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(1e-2));
      };
      const MakeOptimizer our_adamw = [](auto parameters) {
        return std::make_shared<AdamW>(parameters, AdamWOptions{.lr = 1e-2});
      };
      const auto check = expect_the_numbers_of_one_process;
      check(torch::kFloat, 1e-6, 1e-5, sgd, sgd, "LibTorch's SGD");
      check(torch::kFloat, 1e-6, 1e-5, sgd, our_sgd, "our SGD");
      check(torch::kDouble, 1e-11, 1e-11, adamw, adamw, "LibTorch's AdamW");
      check(torch::kDouble, 1e-11, 1e-11, adamw, our_adamw, "our AdamW");
      check(torch::kFloat, 1e-3, 1e-5, adamw, adamw, "LibTorch's AdamW in float32");
      check(torch::kFloat, 1e-3, 1e-5, adamw, our_adamw, "our AdamW in float32");
    });
  }
}

// ---- accumulation -------------------------------------------------------------------------------

/// Rows of three inputs and two wanted outputs, all different.
std::pair<torch::Tensor, torch::Tensor> rows(std::int64_t count) {
  const auto x = torch::arange(count * 3, torch::kDouble).view({count, 3});
  return {torch::sin(x), torch::cos(x.slice(1, 0, 2) * 1.3)};
}

Mlp make_mlp() {
  torch::manual_seed(5);
  Mlp net;
  net->to(torch::kDouble);
  return net;
}

struct Window {
  std::int64_t length;
  int steps;
  bool sync_with_dataloader = true;
  bool sync_each_batch = false;
};

std::ostream& operator<<(std::ostream& out, const Window& window) {
  return out << "length " << window.length << ", steps " << window.steps
             << ", sync_with_dataloader " << window.sync_with_dataloader << ", sync_each_batch "
             << window.sync_each_batch;
}

/// Two epochs of `length` batches per process; the mean over processes of the sum over a window,
/// divided by the number of steps also where the window is short.
void expect_windows(const Window& window) {
  Accelerator accelerator(anew({.gradient_accumulation_plugin = GradientAccumulationPlugin{
                                    .num_steps = window.steps,
                                    .sync_with_dataloader = window.sync_with_dataloader,
                                    .sync_each_batch = window.sync_each_batch}}));
  const int ranks = accelerator.num_processes();
  constexpr std::int64_t kBatch = 2;
  const auto [x, y] = rows(window.length * ranks * kBatch);
  auto net = make_mlp();
  auto alone = make_mlp();
  torch::optim::SGD plain(alone->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  auto [model, optimizer, loader] = accelerator.prepare(
      net, torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)),
      make_data_loader(std::pair{x, y}, {.batch_size = kBatch}));
  ASSERT_EQ(loader.size(), window.length);
  int counted = 0;
  for (int epoch = 0; epoch < 2; ++epoch) {
    std::int64_t batch = 0;
    for (auto& [inputs, wanted] : loader) {
      const auto accumulating = accelerator.accumulate(model);
      accelerator.backward(torch::mse_loss(model(inputs), wanted));
      optimizer.step();
      optimizer.zero_grad();

      const auto first = batch * ranks * kBatch;
      for (int rank = 0; rank < ranks; ++rank) {
        const auto from = first + rank * kBatch;
        const auto loss = torch::mse_loss(alone(x.slice(0, from, from + kBatch)),
                                          y.slice(0, from, from + kBatch));
        (loss / window.steps / ranks).backward();
      }
      ++counted;
      ++batch;
      const bool ends = window.sync_with_dataloader && batch == window.length;
      if (ends || counted % window.steps == 0) {
        plain.step();
        plain.zero_grad();
        EXPECT_TRUE(accelerator.sync_gradients()) << window << ", batch " << batch;
      } else {
        EXPECT_FALSE(accelerator.sync_gradients()) << window << ", batch " << batch;
      }
      if (ends) counted = 0;
      EXPECT_LT(distance(net, alone), 1e-12) << window << ", batch " << batch;
    }
    EXPECT_EQ(batch, window.length);
  }
}

/// Sequences of one to four tokens. Each token counts the same, wherever it is.
void expect_tokens_count_the_same(std::int64_t length, int steps) {
  Accelerator accelerator(anew({.gradient_accumulation_steps = steps}));
  const int ranks = accelerator.num_processes();
  constexpr std::int64_t kBatch = 2;
  constexpr std::int64_t kLongest = 4;
  const auto count = length * ranks * kBatch;
  const auto [flat_x, flat_y] = rows(count * kLongest);
  const auto x = flat_x.view({count, kLongest, 3});
  const auto y = flat_y.view({count, kLongest, 2});
  const auto lengths = (torch::arange(count, torch::kLong) * 7 + 3).remainder(kLongest) + 1;
  const auto sum_of = [](const torch::Tensor& outputs, const torch::Tensor& wanted,
                         const torch::Tensor& tokens) {
    const auto mask = torch::arange(outputs.size(1)).unsqueeze(0) < tokens.unsqueeze(1);
    return ((outputs - wanted).pow(2).sum(-1) * mask).sum();
  };
  auto net = make_mlp();
  auto alone = make_mlp();
  torch::optim::SGD plain(alone->parameters(), torch::optim::SGDOptions(0.1));
  auto [model, optimizer, loader] =
      accelerator.prepare(net, torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.1)),
                          make_data_loader(std::tuple{x, y, lengths}, {.batch_size = kBatch}));

  // How many tokens each window has, on all processes.
  std::vector<std::int64_t> totals;
  std::int64_t batch = 0;
  for (auto& [inputs, wanted, tokens] : loader) {
    const auto all = accelerator.gather(tokens.sum()).sum().item<std::int64_t>();
    if (batch++ % steps == 0) totals.push_back(0);
    totals.back() += all;
  }
  batch = 0;
  for (auto& [inputs, wanted, tokens] : loader) {
    const auto accumulating = accelerator.accumulate(model);
    const auto total = static_cast<double>(totals.at(batch / steps));
    const auto loss = sum_of(model(inputs), wanted, tokens);
    accelerator.backward(loss * ranks * steps / total);
    optimizer.step();
    optimizer.zero_grad();
    ++batch;
    if (!accelerator.sync_gradients()) continue;
    // One big batch.
    const auto begin = (batch - 1) / steps * steps * ranks * kBatch;
    const auto end = batch * ranks * kBatch;
    plain.zero_grad();
    const auto tokens_here = lengths.slice(0, begin, end);
    (sum_of(alone(x.slice(0, begin, end)), y.slice(0, begin, end), tokens_here) / tokens_here.sum())
        .backward();
    plain.step();
    EXPECT_LT(distance(net, alone), 1e-12) << "length " << length << ", steps " << steps;
  }
  EXPECT_EQ(batch, length);
}

TEST(Equality, AccumulationIsTheSumOfAllWindowsAndProcesses) {
  for (const int ranks : {1, 2, 3}) {
    on_processes(ranks, [] {
      for (std::int64_t length = 1; length <= 7; ++length) {
        for (int steps = 1; steps <= 4; ++steps) {
          expect_windows({.length = length, .steps = steps});
          expect_windows({.length = length, .steps = steps, .sync_each_batch = true});
          expect_windows({.length = length, .steps = steps, .sync_with_dataloader = false});
          expect_tokens_count_the_same(length, steps);
        }
      }
    });
  }
}

TEST(Equality, AccumulationTakesSplitAndDispatchedBatches) {
  on_processes(2, [] {
    for (const bool split : {false, true}) {
      for (const bool dispatch : {false, true}) {
        Accelerator accelerator(
            anew({.gradient_accumulation_steps = 2,
                  .dataloader_config = {.split_batches = split, .dispatch_batches = dispatch}}));
        const auto [x, y] = rows(20);
        auto net = make_mlp();
        auto alone = make_mlp();
        torch::optim::SGD plain(alone->parameters(), torch::optim::SGDOptions(0.1));
        auto [model, optimizer, loader] = accelerator.prepare(
            net, torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.1)),
            make_data_loader(std::pair{x, y}, {.batch_size = split ? 4 : 2}));
        std::string synced;
        std::int64_t at = 0;
        for (auto& [inputs, wanted] : loader) {
          const auto accumulating = accelerator.accumulate(model);
          accelerator.backward(torch::mse_loss(model(inputs), wanted));
          optimizer.step();
          optimizer.zero_grad();
          synced += accelerator.sync_gradients() ? '1' : '0';
          (torch::mse_loss(alone(x.slice(0, at, at + 4)), y.slice(0, at, at + 4)) / 2).backward();
          at += 4;
          if (accelerator.sync_gradients()) {
            plain.step();
            plain.zero_grad();
          }
          EXPECT_LT(distance(net, alone), 1e-12) << split << dispatch << at;
        }
        EXPECT_EQ(synced, "01011") << split << dispatch;
      }
    }

    // Steps can be changed on the way.
    Accelerator accelerator(anew({.gradient_accumulation_steps = 2}));
    auto net = make_mlp();
    auto model = accelerator.prepare(net);
    std::string synced;
    for (int i = 0; i < 6; ++i) {
      if (i == 2) accelerator.set_gradient_accumulation_steps(3);
      if (i == 5) accelerator.set_gradient_accumulation_steps(1);
      const auto accumulating = accelerator.accumulate(model);
      synced += accelerator.sync_gradients() ? '1' : '0';
    }
    EXPECT_EQ(synced, "011001");
  });
}

// ---- schedules ----------------------------------------------------------------------------------

/// Learning rates: at the start, after a good step, a skipped one and an accumulating one.
std::vector<double> rates(AcceleratorOptions options) {
  Accelerator accelerator(anew(std::move(options)));
  auto net = make_mlp();
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(1.0));
  LambdaLR schedule(sgd, [](std::int64_t k) { return 1 - static_cast<double>(k) / 20; });
  auto [model, optimizer, scheduler] =
      accelerator.prepare(net, std::move(sgd), std::move(schedule));
  const auto rate = [&, &optimizer = optimizer] {
    return optimizer.param_groups()[0].options().get_lr();
  };
  std::vector<double> result{rate()};
  accelerator.backward(model(torch::ones({1, 3}, torch::kDouble)).sum());
  optimizer.step();
  scheduler.step();
  result.push_back(rate());
  optimizer._core()->step_was_skipped = true;  // float16 would do so
  scheduler.step();
  result.push_back(rate());
  optimizer._core()->step_was_skipped = false;
  accelerator.set_sync_gradients(false);
  optimizer.step();
  scheduler.step();
  result.push_back(rate());
  return result;
}

void expect_rates(AcceleratorOptions options, const std::vector<double>& wanted,
                  const std::string& what) {
  const auto seen = rates(std::move(options));
  ASSERT_EQ(seen.size(), wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_NEAR(seen[i], wanted[i], 1e-12) << what << ", event " << i;
  }
}

/// Learning rates of 10 * steps micro-batches.
void expect_a_schedule_that_ends(int steps, bool adjust) {
  Accelerator accelerator(anew({.gradient_accumulation_plugin = GradientAccumulationPlugin{
                                    .num_steps = steps, .adjust_scheduler = adjust}}));
  const int ranks = accelerator.num_processes();
  const int total = 10 * ranks;
  auto net = make_mlp();
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(1.0));
  LambdaLR schedule(sgd, [total](std::int64_t k) {
    return std::max(0.0, static_cast<double>(total - k) / total);
  });
  auto [model, optimizer, scheduler] =
      accelerator.prepare(net, std::move(sgd), std::move(schedule));
  for (int i = 1; i <= 10 * steps; ++i) {
    const auto accumulating = accelerator.accumulate(model);
    accelerator.backward(model(torch::ones({1, 3}, torch::kDouble)).sum());
    optimizer.step();
    scheduler.step();
    optimizer.zero_grad();
    const double rate = optimizer.param_groups()[0].options().get_lr();
    EXPECT_NEAR(rate, 1 - static_cast<double>(i / steps) / 10, 1e-12) << steps << " " << i;
    EXPECT_EQ(rate == 0, i == 10 * steps) << steps << " " << i;
  }
}

TEST(Equality, SchedulesMoveByProcesses) {
  for (const int ranks : {1, 2, 4}) {
    on_processes(ranks, [](PartialState& state) {
      const int ranks = state.num_processes();
      const double after = 1 - 0.05 * ranks;
      expect_rates({}, {1, after, after, after}, "plain");
      expect_rates({.split_batches = true}, {1, 0.95, 0.95, 0.95}, "split");
      expect_rates({.step_scheduler_with_optimizer = false}, {1, 0.95, 0.9, 0.85}, "whenever told");
      expect_rates({.step_scheduler_per_process = false}, {1, 0.95, 0.95, 0.95}, "once");
      expect_rates({.step_scheduler_with_optimizer = false, .step_scheduler_per_process = false},
                   {1, 0.95, 0.9, 0.85}, "whenever told, once");
      for (const int steps : {1, 2, 4}) {
        for (const bool adjust : {true, false}) expect_a_schedule_that_ends(steps, adjust);
      }

      // A schedule of fixed length is not overrun.
      Accelerator accelerator(anew());
      auto net = make_mlp();
      torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      const int total = std::max(2, ranks);
      OneCycleLR cycle(sgd, {.max_lr = 0.1, .total_steps = total});
      auto [model, optimizer, scheduler] =
          accelerator.prepare(net, std::move(sgd), std::move(cycle));
      for (int i = 0; i < 3; ++i) {
        accelerator.backward(model(torch::ones({1, 3}, torch::kDouble)).sum());
        optimizer.step();
        scheduler.step();
        EXPECT_EQ(scheduler.scheduler().last_epoch(), std::min(total, (i + 1) * ranks)) << i;
      }

      // One that goes by a metric moves once.
      torch::optim::SGD other(net->parameters(), torch::optim::SGDOptions(1.0));
      auto plateau = accelerator.prepare(ReduceLROnPlateau(other, {.factor = 0.5, .patience = 1}));
      for (int i = 0; i < 2; ++i) plateau.step(1.0);
      EXPECT_DOUBLE_EQ(other.param_groups()[0].options().get_lr(), 1);
      plateau.step(1.0);
      EXPECT_DOUBLE_EQ(other.param_groups()[0].options().get_lr(), 0.5);
    });
  }
}

// ---- metrics ------------------------------------------------------------------------------------

struct Counted {
  std::int64_t limit = 0;
  std::int64_t at = 0;
  std::optional<torch::Tensor> next() {
    if (at == limit) return std::nullopt;
    return torch::tensor(static_cast<double>(at++));
  }
  void reset() { at = 0; }
};

TEST(Equality, MetricsCountEachSampleOnce) {
  for (const int ranks : {2, 3}) {
    on_processes(ranks, [](PartialState& state) {
      const int ranks = state.num_processes();
      for (const std::int64_t size : {99, 512}) {
        for (const bool split : {false, true}) {
          for (const bool dispatch : {false, true}) {
            for (const bool drop_last : {false, true}) {
              const std::int64_t batch = ranks == 3 ? 15 : 16;
              Accelerator accelerator(anew(
                  {.dataloader_config = {.split_batches = split, .dispatch_batches = dispatch}}));
              torch::nn::Linear net(1, 1);
              net->to(torch::kDouble);
              {
                const torch::NoGradGuard no_grad;
                net->weight.fill_(2);
                net->bias.fill_(1);
              }
              const auto x = torch::arange(size, torch::kDouble).view({size, 1});
              auto [model, loader] = accelerator.prepare(
                  net, make_data_loader(std::pair{x, 2 * x + 1},
                                        {.batch_size = batch, .drop_last = drop_last}));
              model.eval();
              std::vector<torch::Tensor> outputs;
              std::vector<torch::Tensor> targets;
              for (auto& [inputs, wanted] : loader) {
                const torch::NoGradGuard no_grad;
                auto [a, b] = accelerator.gather_for_metrics(std::pair{model(inputs), wanted});
                outputs.push_back(a);
                targets.push_back(b);
              }
              const auto what = detail::str("size ", size, " split ", split, " dispatch ", dispatch,
                                            " drop_last ", drop_last);
              const auto all = torch::cat(outputs);
              const auto round = split ? batch : batch * ranks;
              const auto count = drop_last ? size / round * round : size;
              EXPECT_EQ(all.size(0), count) << what;
              EXPECT_TRUE(torch::equal(all, torch::cat(targets))) << what;
              EXPECT_TRUE(torch::equal(torch::cat(targets), (2 * x + 1).slice(0, 0, count)))
                  << what;
            }
          }
        }
      }
      Accelerator accelerator(anew());
      auto loader = accelerator.prepare(make_data_loader(Counted{30}, {.batch_size = 4}));
      std::int64_t seen = 0;
      for (auto& batch : loader) seen += accelerator.gather_for_metrics(batch).numel();
      EXPECT_EQ(seen, 30);
    });
  }
}

TEST(Prepare, LeavesModelsAndStatesOnTheCpuWhereTheyAre) {
  on_processes(2, [] {
    Accelerator accelerator({.cpu = true});
    torch::nn::Linear net(3, 2);
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    net->forward(torch::ones({1, 3})).sum().backward();
    sgd.step();
    sgd.zero_grad();
    const auto momentum = [&sgd](const torch::Tensor& parameter) {
      auto& state = *sgd.state().at(parameter.unsafeGetTensorImpl());
      return static_cast<torch::optim::SGDParamState&>(state).momentum_buffer().data_ptr();
    };
    const auto* const weight = net->weight.data_ptr();
    const auto* const state = momentum(net->weight);
    (void)accelerator.prepare(net, sgd);
    EXPECT_EQ(net->weight.data_ptr(), weight);
    EXPECT_EQ(momentum(net->weight), state);
  });
}

}  // namespace
}  // namespace accelerate
