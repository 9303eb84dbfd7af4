// Trains a small GPT on the bytes of a text, then lets it write a few lines.
//
//     accelerate launch --num_processes 2 build/dev/examples/gpt --text book.txt --model small
//
// Without --text the program makes a text of its own. With no flags at all:
//
// Last line: "result: loss 5.58 -> 0.27 after 200 steps"
// One process: "result: loss 5.58 -> 0.3 after 200 steps"
//
// Shorter, with --steps 20:
//
// Last line then: "result: loss 5.58 -> 2.68 after 20 steps"
// One process then: "result: loss 5.58 -> 2.74 after 20 steps"
#include <accelerate/accelerate.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "arguments.h"
#include "gpt_data.h"
#include "gpt_model.h"
#include "utf8.h"

namespace {

namespace F = torch::nn::functional;
using Batch = std::pair<torch::Tensor, torch::Tensor>;

struct Options {
  std::string text;  // a file
  std::string model = "tiny";
  std::int64_t steps = 200;
  std::int64_t batch_size = 16;   // of each process
  std::int64_t accumulation = 2;  // batches of each process in a step
  std::int64_t seed = 42;
  std::optional<accelerate::PrecisionType> mixed_precision = std::nullopt;
  bool capture = false;  // a GPU repeats the step from a recording
};

Options parse(int argc, char** argv) {
  Options options;
  examples::read_arguments(argc, argv,
                           {{"--text", options.text},
                            {"--model", options.model},
                            {"--steps", options.steps},
                            {"--batch_size", options.batch_size},
                            {"--accumulation", options.accumulation},
                            {"--seed", options.seed, /*least=*/0},
                            {"--mixed_precision", options.mixed_precision},
                            {"--capture", options.capture}});
  return options;
}

examples::GptConfig config_of(const std::string& model) {
  if (model == "tiny") return examples::GptConfig::tiny();
  if (model == "small") return examples::GptConfig::small();
  if (model == "gpt2") return examples::GptConfig::gpt2();
  throw accelerate::ConfigError("--model is '" + model + "'. Choose one of: tiny, small, gpt2.");
}

/// The mean over all windows of all processes, each window once.
template <class Model, class Loader>
double evaluate(accelerate::Accelerator& accelerator, Model& model, Loader& loader) {
  torch::NoGradGuard no_grad;
  model.eval();
  double sum = 0;
  std::int64_t windows = 0;
  for (auto& [x, y] : loader) {
    const auto losses = F::cross_entropy(model(x).transpose(1, 2), y,
                                         F::CrossEntropyFuncOptions().reduction(torch::kNone));
    const auto all = accelerator.gather_for_metrics(losses.mean(1));  // one for each window
    sum += all.sum().template item<double>();
    windows += all.numel();
  }
  model.train();
  return sum / static_cast<double>(windows);
}

/// `length` bytes behind `text`, drawn one by one; likely ones are preferred. The model sees whole
/// blocks: a new length for each byte would make a GPU choose its kernels anew. What stands behind
/// the last byte has no effect, since attention is causal.
template <class Model>
std::string write_on(Model& model, std::string text, std::size_t length, std::int64_t block,
                     torch::Device device) {
  torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < length; ++i) {
    const auto known = std::min(std::ssize(text), block);
    const auto seen = examples::encode(text).slice(0, std::ssize(text) - known);
    const auto padded = accelerate::pad_to_multiple_of(seen, block);
    const auto scores = model(padded.unsqueeze(0).to(device)).select(1, known - 1).slice(1, 0, 256);
    text += static_cast<char>((2 * scores).softmax(1).multinomial(1).template item<std::int64_t>());
  }
  return text;
}

void run(const Options& options) {
  const auto config = config_of(options.model);
  accelerate::Accelerator accelerator({.mixed_precision = options.mixed_precision,
                                       .gradient_accumulation_steps = options.accumulation});
  const auto processes = accelerator.num_processes();
  accelerator.print(processes, processes == 1 ? "process" : "processes");
  accelerate::set_seed(options.seed);

  const auto text = options.text.empty() ? examples::make_text(/*count=*/3000, options.seed)
                                         : examples::read_text(options.text);
  const auto [beginning, end] = examples::split_text(text);
  auto data = accelerate::make_data_loader(examples::TextWindows(beginning, config.block),
                                           {.batch_size = options.batch_size, .shuffle = true});
  auto test_data = accelerate::make_data_loader(examples::TextWindows(end, config.block),
                                                {.batch_size = options.batch_size});

  examples::Gpt net(config);
  // Wider models want smaller steps.
  accelerate::AdamW adamw(net->parameters(),
                          {.lr = 0.32 / static_cast<double>(config.width), .weight_decay = 0.1});
  // A prepared schedule moves on once for each process.
  const auto moves = options.steps * processes;
  auto cosine = accelerate::get_cosine_schedule_with_warmup(adamw, moves / 10, moves);

  auto [model, optimizer, loader, test_loader, scheduler] = accelerator.prepare(
      net, std::move(adamw), std::move(data), std::move(test_data), std::move(cosine));

  const auto body = [&, &model = model, &optimizer = optimizer,
                     &scheduler = scheduler](Batch& batch) {
    auto accumulating = accelerator.accumulate(model);
    const auto& [x, y] = batch;
    const auto loss = F::cross_entropy(model(x).flatten(0, 1), y.flatten());
    accelerator.backward(loss);
    if (accelerator.sync_gradients()) accelerator.clip_grad_norm_(model.parameters(), 1.0);
    optimizer.step();
    scheduler.step();
    optimizer.zero_grad();
    return loss;
  };
  auto captured = accelerator.capture(body);

  const double before = evaluate(accelerator, model, test_loader);
  accelerate::ProgressBar bar({.desc = "training", .total = options.steps});
  while (bar.n() < options.steps) {
    for (auto& batch : loader) {
      options.capture ? captured(batch) : body(batch);
      if (accelerator.sync_gradients()) bar.update();
      if (bar.n() == options.steps) break;
    }
  }
  bar.close();
  const double after = evaluate(accelerator, model, test_loader);

  const auto written = write_on(model, "the ", 120, config.block, accelerator.device());
  accelerator.print(examples::readable(written));  // at first it writes what is no text
  const auto rounded = [](double x) { return std::round(x * 100) / 100; };
  accelerator.print("result: loss", rounded(before), "->", rounded(after), "after", options.steps,
                    "steps");
}

}  // namespace

int main(int argc, char** argv) {
  return accelerate::record([&] { run(parse(argc, argv)); });
}
