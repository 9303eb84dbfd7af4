// A small GPT whose sequences are divided over processes trains as it does on one process.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerator/nets.h"
#include "core/captured_log.h"
#include "examples/gpt_model.h"
#include "model_parallel/whole_attention.h"
#include "support/has.h"
#include "support/message_of.h"
#include "support/on_processes.h"
#include "support/shared_folder.h"

namespace accelerate {
namespace {

namespace F = torch::nn::functional;
using test::anew;
using test::CapturedLog;
using test::has;
using test::message_of;
using Batch = std::map<std::string, torch::Tensor>;

constexpr std::int64_t kLength = 16;
constexpr int kSteps = 4;

examples::Gpt make_gpt() {
  torch::manual_seed(3);
  return examples::Gpt(
      examples::GptConfig{.vocab = 32, .block = kLength, .layers = 2, .heads = 4, .width = 16});
}

/// Batch `number` of all: two sequences, of which the second one ends early.
Batch text(std::int64_t number) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + number);
  const auto words =
      torch::randint(32, {2, kLength}, generator, torch::TensorOptions(torch::kLong));
  auto labels = words.clone();
  labels[1].slice(0, kLength - 5).fill_(-100);
  return {{"input_ids", words},
          {"position_ids", torch::arange(kLength).expand({2, kLength}).contiguous()},
          {"labels", labels}};
}

/// Steps of a run that is saved behind the last of them, and that others may go on from.
struct Steps {
  int first = 0;
  int last = kSteps;
  std::filesystem::path state = {};
};

template <class F>
void run_steps(Accelerator& accelerator, const Steps& steps, F&& step) {
  if (steps.first > 0) accelerator.load_state(steps.state);
  for (int i = steps.first; i < steps.last; ++i) step(i);
  if (steps.last < kSteps) accelerator.save_state(steps.state);
}

/// Those of all steps from `first` on.
void expect_goes_on(const std::vector<double>& seen, const std::vector<double>& wanted, int first) {
  ASSERT_EQ(seen.size() + static_cast<std::size_t>(first), wanted.size());
  for (std::size_t i = 0; i < seen.size(); ++i) {
    EXPECT_NEAR(seen[i], wanted[i + static_cast<std::size_t>(first)], 1e-5) << i;
  }
}

/// What predicts the next word at each place, and nothing in the last one.
torch::Tensor shifted(const torch::Tensor& labels) {
  auto result = torch::full_like(labels, -100);
  result.slice(1, 0, kLength - 1).copy_(labels.slice(1, 1));
  return result;
}

torch::Tensor loss_of(const torch::Tensor& scores, const torch::Tensor& labels) {
  return F::cross_entropy(scores.flatten(0, 1).to(torch::kFloat), labels.flatten());
}

struct Trace {
  std::vector<double> losses = {};
  std::vector<double> norms = {};
  std::vector<torch::Tensor> first_gradients = {};
  std::vector<torch::Tensor> parameters = {};
};

std::vector<torch::Tensor> copies(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> result;
  for (const auto& one : tensors) result.push_back(one.detach().clone());
  return result;
}

std::vector<torch::Tensor> gradients_of(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> result;
  for (const auto& one : parameters) result.push_back(one.grad().clone());
  return result;
}

constexpr double kMaxNorm = 0.25;

/// One process: each step has the mean of `batches` batches.
Trace plain_trace(int batches = 1, bool clips = false) {
  auto net = make_gpt();
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.3).momentum(0.9));
  Trace trace;
  for (int step = 0; step < kSteps; ++step) {
    double total = 0;
    for (int i = 0; i < batches; ++i) {
      const auto batch = text(step * batches + i);
      const auto loss = loss_of(net(batch.at("input_ids")), shifted(batch.at("labels"))) / batches;
      loss.backward();
      total += loss.item<double>();
    }
    trace.losses.push_back(total);
    if (step == 0) trace.first_gradients = gradients_of(net->parameters());
    if (clips) {
      trace.norms.push_back(torch::nn::utils::clip_grad_norm_(net->parameters(), kMaxNorm));
    }
    sgd.step();
    sgd.zero_grad();
  }
  trace.parameters = copies(net->parameters());
  return trace;
}

void expect_close(const std::vector<torch::Tensor>& seen,
                  const std::vector<torch::Tensor>& wanted) {
  ASSERT_EQ(seen.size(), wanted.size());
  for (std::size_t i = 0; i < seen.size(); ++i) {
    EXPECT_LT(test::largest_difference(seen[i], wanted[i]), 1e-5) << i;
  }
}

void expect_close(const Trace& seen, const Trace& wanted) {
  for (int step = 0; step < kSteps; ++step) {
    EXPECT_NEAR(seen.losses[step], wanted.losses[step], 1e-5) << "step " << step;
  }
  if (!seen.first_gradients.empty()) expect_close(seen.first_gradients, wanted.first_gradients);
  expect_close(seen.parameters, wanted.parameters);
}

// ---- context parallelism ------------------------------------------------------------------------

struct ContextRun {
  ParallelismConfig sizes;
  std::optional<FullyShardedDataParallelPlugin> plugin = std::nullopt;
  bool checkpoints = false;
  int batches = 1;
  Steps steps = {};
  bool clips = false;
};

Trace context_trace(const ContextRun& run) {
  Accelerator accelerator(anew({.fsdp_plugin = run.plugin, .parallelism_config = run.sizes}));
  auto net = make_gpt();
  if (run.checkpoints) {
    apply_activation_checkpointing(*net, [](const torch::nn::Module& module) {
      return dynamic_cast<const examples::GptBlockImpl*>(&module) != nullptr;
    });
  }
  auto [model, optimizer] =
      accelerator.prepare(net, SGD(net->parameters(), {.lr = 0.3, .momentum = 0.9}));
  const auto mesh = accelerator.torch_device_mesh();
  const auto own = accelerator.process_index() / *accelerator.parallelism_config()->cp_size;
  Trace trace;
  run_steps(accelerator, run.steps, [&](int step) {
    auto batch = text(step * run.batches + own);
    auto labels = shifted(batch.at("labels"));
    const auto& ids = batch.at("input_ids");
    const auto& positions = batch.at("position_ids");
    const auto split = accelerator.maybe_context_parallel(
        {.buffers = {ids, positions, labels}, .buffer_seq_dims = {1, 1, 1}});
    // The parts have unequal numbers of tokens.
    const auto loss =
        sp_weighted_loss(loss_of(model(ids, positions), labels), labels, mesh->get_group("cp"));
    accelerator.backward(loss);
    trace.losses.push_back(
        reduce(loss.detach(), mesh->get_group("dp_cp"), Reduction::kMean).item<double>());
    if (step == 0 && !run.plugin && !mesh->has("dp_shard")) {
      trace.first_gradients = gradients_of(model.parameters());
    }
    if (run.clips) {
      trace.norms.push_back(
          accelerator.clip_grad_norm_(model.parameters(), kMaxNorm).item<double>());
    }
    optimizer.step();
    optimizer.zero_grad();
  });
  for (const auto& entry : accelerator.get_state_dict(model)) {
    trace.parameters.push_back(entry.value());
  }
  return trace;
}

const OnProcessesOptions kStandalone{.environment = {{"ACCELERATE_ALLOW_CP_STANDALONE", "true"}}};

ParallelismConfig context(std::int64_t cp, const std::string& strategy, std::int64_t shard = 1) {
  return {.dp_shard_size = shard,
          .cp_size = cp,
          .cp_handler = TorchContextParallelConfig{.cp_comm_strategy = strategy}};
}

TEST(ContextParallelTraining, IsThatOfOneProcessOnTwo) {
  on_processes(2, kStandalone, [] {
    const auto wanted = plain_trace();
    expect_close(context_trace({.sizes = context(2, "allgather")}), wanted);
    expect_close(context_trace({.sizes = context(2, "alltoall"), .checkpoints = true}), wanted);
  });
}

TEST(ContextParallelTraining, IsThatOfOneProcessOnFour) {
  on_processes(4, kStandalone, [] {
    expect_close(context_trace({.sizes = context(4, "alltoall")}), plain_trace());
  });
}

TEST(ContextParallelTraining, ShardsTheModelOverDataAndSequence) {
  on_processes(4, [] {
    const FullyShardedDataParallelPlugin plugin{.fsdp_version = 2};
    const auto seen =
        context_trace({.sizes = context(2, "allgather", 2), .plugin = plugin, .batches = 2});
    const auto wanted = plain_trace(2);
    for (int step = 0; step < kSteps; ++step) {
      EXPECT_NEAR(seen.losses[step], wanted.losses[step], 1e-5) << "step " << step;
    }
    if (!seen.parameters.empty()) expect_close(seen.parameters, wanted.parameters);
    const auto alone = context_trace({.sizes = context(4, "alltoall"), .plugin = plugin});
    EXPECT_NEAR(alone.losses.back(), plain_trace().losses.back(), 1e-5);
  });
}

TEST(ContextParallelTraining, GoesOnFromASavedStateOnEightProcesses) {
  const test::SharedFolder folder;
  auto options = folder.options();
  options.environment.insert(options.environment.end(), kStandalone.environment.begin(),
                             kStandalone.environment.end());
  const auto state = folder.path() / "state";
  on_processes(8, options, [&] {
    const ContextRun run{.sizes = context(2, "allgather", 4),
                         .batches = 4,
                         .steps = {.last = 2, .state = state},
                         .clips = true};
    const auto wanted = plain_trace(4, /*clips=*/true);
    const auto seen = context_trace(run);
    for (int step = 0; step < 2; ++step) {
      EXPECT_NEAR(seen.losses[step], wanted.losses[step], 1e-5) << "step " << step;
      EXPECT_NEAR(seen.norms[step], wanted.norms[step], 1e-5) << "step " << step;
    }
    auto rest = run;
    rest.steps = {.first = 2, .state = state};
    const auto last = context_trace(rest);
    expect_goes_on(last.losses, wanted.losses, 2);
    expect_goes_on(last.norms, wanted.norms, 2);
  });
}

TEST(ContextParallelTraining, RefusesAttentionThatCannotBeIntercepted) {
  on_processes(2, kStandalone, [] {
    Accelerator accelerator(anew({.parallelism_config = context(2, "allgather")}));
    EXPECT_EQ(accelerator.context_parallel_rank(), accelerator.process_index());
    const torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::MultiheadAttention(4, 2));
    EXPECT_TRUE(has(message_of<UnsupportedError>([&] { (void)accelerator.prepare(net); }),
                    "prepare: 1 is a torch::nn::MultiheadAttention"));
  });
}

/// Attention by matrix products, which look like any others.
struct OwnAttentionImpl : torch::nn::Module {
  OwnAttentionImpl() { register_module("words", words); }
  torch::Tensor forward(const torch::Tensor& ids) {
    const auto x = words(ids);
    return torch::matmul(torch::softmax(torch::matmul(x, x.transpose(1, 2)), -1), x);
  }
  torch::nn::Embedding words{32, 4};
};
TORCH_MODULE(OwnAttention);

bool holds(const CapturedLog& log, const std::string& text) {
  return std::ranges::any_of(
      log.messages(), [&](const std::string& one) { return one.find(text) != std::string::npos; });
}

TEST(ContextParallelTraining, WarnsOfAModelWithoutAttentionThatItKnows) {
  on_processes(2, kStandalone, [] {
    const CapturedLog log;
    Accelerator accelerator(anew({.parallelism_config = context(2, "allgather")}));
    const auto pass = [&](auto net) {
      auto model = accelerator.prepare(net);
      const auto ids = text(0).at("input_ids");
      const auto split =
          accelerator.maybe_context_parallel({.buffers = {ids}, .buffer_seq_dims = {1}});
      accelerator.backward(model(ids).pow(2).mean());
    };
    const auto warning = "cp_size is above 1, but the model has not called at::scaled_dot";
    pass(make_gpt());
    EXPECT_FALSE(holds(log, warning));
    pass(OwnAttention());
    EXPECT_EQ(holds(log, warning), accelerator.is_main_process());
  });
}

// ---- sequence parallelism -----------------------------------------------------------------------

/// Batches of all steps in one dataset.
Batch dataset(int batches) {
  Batch all;
  for (int i = 0; i < batches; ++i) {
    for (const auto& [name, tensor] : text(i)) {
      all[name] = all[name].defined() ? torch::cat({all[name], tensor}) : tensor;
    }
  }
  return all;
}

AcceleratorOptions sequences(std::int64_t sp, std::int64_t replicate = 1,
                             const DeepSpeedSequenceParallelConfig& handler = {}) {
  return anew({.parallelism_config = ParallelismConfig{
                   .dp_replicate_size = replicate, .sp_size = sp, .sp_handler = handler}});
}

Trace sequence_trace(const AcceleratorOptions& options, int batches = 1) {
  Accelerator accelerator(options);
  auto net = make_gpt();
  auto [model, optimizer, loader] =
      accelerator.prepare(net, SGD(net->parameters(), {.lr = 0.3, .momentum = 0.9}),
                          make_data_loader(dataset(kSteps * batches), {.batch_size = 2}));
  auto parts = accelerator.deepspeed_ulysses_dl_adapter(loader, model);
  EXPECT_EQ(parts.size(), kSteps);
  Trace trace;
  for (auto& batch : parts) {
    EXPECT_EQ(batch.at("input_ids").size(1), kLength / *accelerator.parallelism_config()->sp_size);
    const auto& labels = batch.at("shift_labels");
    const auto scores = model(batch.at("input_ids"), batch.at("position_ids"));
    const auto loss = sp_weighted_loss(loss_of(scores, labels), labels);
    accelerator.backward(loss);
    trace.losses.push_back(accelerator.reduce(loss.detach(), Reduction::kMean).item<double>());
    if (trace.losses.size() == 1 && !accelerator.torch_device_mesh()->has("dp_shard")) {
      trace.first_gradients = gradients_of(model.parameters());
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  for (const auto& entry : accelerator.get_state_dict(model)) {
    trace.parameters.push_back(entry.value());
  }
  return trace;
}

TEST(SequenceParallelTraining, IsThatOfOneProcessOnTwo) {
  on_processes(2, [] { expect_close(sequence_trace(sequences(2)), plain_trace()); });
}

TEST(SequenceParallelTraining, IsThatOfOneProcessOnFour) {
  on_processes(4, [] {
    expect_close(sequence_trace(sequences(4)), plain_trace());
    expect_close(sequence_trace(sequences(2, /*replicate=*/2), 2), plain_trace(2));
  });
}

TEST(SequenceParallelTraining, ShardsTheModelOverDataAndSequence) {
  on_processes(4, [] {
    auto options =
        anew({.parallelism_config = ParallelismConfig{.dp_shard_size = 2, .sp_size = 2}});
    const auto seen = sequence_trace(options, 2);
    const auto wanted = plain_trace(2);
    for (int step = 0; step < kSteps; ++step) {
      EXPECT_NEAR(seen.losses[step], wanted.losses[step], 1e-5) << "step " << step;
    }
  });
}

TEST(SequenceParallelTraining, EvaluatesWholeSamplesOnEachProcess) {
  on_processes(2, [] {
    Accelerator accelerator(sequences(2));
    auto net = make_gpt();
    const auto ids = text(accelerator.process_index()).at("input_ids");
    const torch::NoGradGuard no_grad;
    const auto wanted = net(ids);
    auto model = accelerator.prepare(net);
    model.eval();
    EXPECT_TRUE(model(ids).equal(wanted));
    EXPECT_EQ(accelerator.sequence_parallel_rank(), accelerator.process_index());
  });
}

TEST(SequenceParallelTraining, WarnsOfWhatIsNotDivided) {
  on_processes(2, [] {
    const CapturedLog log;
    Accelerator accelerator(sequences(2));
    auto [model, other, loader] = accelerator.prepare(
        make_gpt(), OwnAttention(), make_data_loader(dataset(2), {.batch_size = 2}));
    const auto pass = [&, &model = model](auto& batches) {
      for (auto& batch : batches) (void)model(batch.at("input_ids"), batch.at("position_ids"));
    };
    auto parts = accelerator.deepspeed_ulysses_dl_adapter(loader, model);
    pass(parts);
    EXPECT_TRUE(log.messages().empty()) << log.messages().front();
    const bool logs = accelerator.is_main_process();
    pass(loader);
    EXPECT_EQ(holds(log, "Loop over deepspeed_ulysses_dl_adapter(loader, model)"), logs);
    (void)other(text(0).at("input_ids"));
    EXPECT_EQ(holds(log, "sp_size is above 1, but the model has not called at::scaled_dot"), logs);
    model.eval();
    pass(loader);
    EXPECT_FALSE(holds(log, "In evaluation mode"));
    pass(parts);
    EXPECT_EQ(holds(log, "In evaluation mode a model with sp_size above 1 takes whole"), logs);
  });
}

TEST(SequenceParallelTraining, HoldsTheLengthThatTheHandlerFixes) {
  on_processes(2, [] {
    {
      Accelerator accelerator(
          sequences(2, 1, {.sp_seq_length = 8, .sp_seq_length_is_variable = false}));
      auto model = accelerator.prepare(make_gpt());
      EXPECT_TRUE(has(message_of<ArgumentError>([&] { (void)model(text(0).at("input_ids")); }),
                      "this process has 16 positions, but sp_seq_length 8 gives each of 2 "
                      "processes 4"));
    }
    Accelerator odd(sequences(2, 1, {.sp_seq_length = 9, .sp_seq_length_is_variable = false}));
    EXPECT_TRUE(has(message_of<ConfigError>([&] { (void)odd.prepare(make_gpt()); }),
                    "sp_seq_length is 9, which sp_size 2 does not divide"));
  });
}

}  // namespace
}  // namespace accelerate
