#include "sharding/sharded_run.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "accelerator/nets.h"

namespace accelerate::test {
namespace {

namespace F = torch::nn::functional;
using detail::sharding::ShardProcesses;

torch::Tensor words_of(int rank, int step, int batch) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(1000 * step + 10 * batch + rank);
  return torch::randint(kWords, {4, 9}, generator, torch::TensorOptions(torch::kLong));
}

std::shared_ptr<torch::optim::Optimizer> make_optimizer(Step step,
                                                        const std::vector<torch::Tensor>& all) {
  // Vectors without decay, as is usual.
  std::vector<torch::Tensor> matrices, vectors;
  for (const auto& one : all) (one.dim() > 1 ? matrices : vectors).push_back(one);
  switch (step) {
    case Step::kSgd:
      return std::make_shared<SGD>(all, SGDOptions{.lr = 0.5});
    case Step::kMomentum:
      return std::make_shared<SGD>(all, SGDOptions{.lr = 0.125, .momentum = 0.5});
    case Step::kAdamW: {
      std::vector<torch::optim::OptimizerParamGroup> groups{
          torch::optim::OptimizerParamGroup(matrices), torch::optim::OptimizerParamGroup(vectors)};
      auto optimizer = std::make_shared<AdamW>(groups, AdamWOptions{.lr = 0.01});
      optimizer->options(1).weight_decay = 0;
      return optimizer;
    }
    case Step::kTorchAdamW:
      break;
  }
  return std::make_shared<torch::optim::AdamW>(all, torch::optim::AdamWOptions(0.01));
}

AcceleratorOptions accelerator_options(const RunOptions& options) {
  auto result = options.spec ? anew() : averaging({.find_unused_parameters = options.find_unused});
  result.cpu = false;  // ACCELERATE_USE_CPU decides: tests/cuda runs on a GPU
  return result;
}

TinyGpt make_net(const RunOptions& options) {
  torch::manual_seed(3);
  TinyGpt net(options.width);
  if (options.change_net) options.change_net(net);
  return net;
}

std::vector<std::vector<torch::Tensor>> tensors_in(const Value& state) {
  std::vector<std::vector<torch::Tensor>> tensors;
  for (const auto& [index, of_parameter] : state.at("state").as_dict()) {
    auto& list = tensors.emplace_back();
    for (const auto& [name, tensor] : of_parameter.as_dict()) {
      list.push_back(tensor.as_tensor().cpu().clone());
    }
  }
  return tensors;
}

}  // namespace

ShardSpec sharded(ShardLevel level, std::int64_t prefetch) {
  return {.level = level,
          .forward_prefetch = prefetch,
          .backward_prefetch = prefetch,
          .units = {"blocks.0", "blocks.1", "blocks.2"}};
}

ShardedRun::ShardedRun(const RunOptions& wanted)
    : options(wanted), accelerator(accelerator_options(wanted)), net(make_net(wanted)) {
  if (!accelerator.is_main_process()) {  // all begin with the values of process 0
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.add_(1);
  }
  auto built = make_optimizer(options.step, net->parameters());
  if (!options.spec) {
    model = accelerator.prepare(net);
  } else {
    model = accelerator.prepare_model(net, {.evaluation_mode = true});
    const auto group = accelerator.state().process_group();
    engine = std::make_shared<ShardedEngine>(
        *net, *options.spec, ShardProcesses{.shard = group, .all = group}, accelerator.device());
    model._core()->use(engine);
  }
  optimizer = accelerator.prepare(std::move(built));
}

double ShardedRun::train(int step, int batch, bool synchronizes) {
  const auto pass = [&] {
    const auto words = words_of(accelerator.process_index(), step, batch).to(accelerator.device());
    const auto scores = model(words.slice(1, 0, 8));
    const auto loss = F::cross_entropy(scores.reshape({-1, kWords}), words.slice(1, 1).reshape(-1));
    accelerator.backward(loss / options.batches);
    return loss.item<double>();
  };
  if (synchronizes) return pass();
  const auto alone = accelerator.no_sync(model);
  return pass();
}

void ShardedRun::take_step() {
  if (options.max_norm > 0) accelerator.clip_grad_norm_(model.parameters(), options.max_norm);
  optimizer.step();
  optimizer.zero_grad();
}

std::vector<torch::Tensor> ShardedRun::whole_parameters() {
  return gathered_parameters(model, {}, [&] {
    std::vector<torch::Tensor> all;
    for (const auto& parameter : net->parameters()) all.push_back(parameter.detach().clone());
    return all;
  });
}

Result run(const RunOptions& options) {
  ShardedRun training(options);
  Result result;
  for (int step = 0; step < options.steps; ++step) {
    if (options.before_step) options.before_step(training.net, step);
    for (int batch = 0; batch < options.batches; ++batch) {
      result.losses.push_back(training.train(step, batch, batch + 1 == options.batches));
    }
    training.take_step();
  }
  if (training.engine) result.stats = training.engine->stats();
  result.parameters = training.whole_parameters();
  const auto state = training.optimizer.state_dict();
  if (training.accelerator.is_main_process()) result.states = tensors_in(state);
  return result;
}

void expect_equal(const Result& result, const Result& wanted, const std::string& what) {
  EXPECT_EQ(result.losses, wanted.losses) << what;
  ASSERT_EQ(result.parameters.size(), wanted.parameters.size()) << what;
  for (std::size_t i = 0; i < wanted.parameters.size(); ++i) {
    EXPECT_TRUE(result.parameters[i].equal(wanted.parameters[i]))
        << what << ", parameter " << i << ": "
        << distance(result.parameters[i], wanted.parameters[i]);
  }
  ASSERT_EQ(result.states.size(), wanted.states.size()) << what;
  for (std::size_t i = 0; i < wanted.states.size(); ++i) {
    for (std::size_t j = 0; j < wanted.states[i].size(); ++j) {
      EXPECT_TRUE(result.states[i][j].equal(wanted.states[i][j]))
          << what << ", state " << j << " of parameter " << i;
    }
  }
}

}  // namespace accelerate::test
