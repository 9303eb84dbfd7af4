// A training run that says what it computes, batch by batch, and goes on from its newest
// checkpoint.
//
//     accelerate launch --num_processes 2 resume_program folder=F [name=value ...]
//
// Each process appends to F/trace.<rank> one line per batch: its number, which samples it had, the
// loss, a sum of all parameters, the learning rate and random numbers, floats in hexadecimal. Two
// runs are the same if their lines are. F/pid.<rank> has its process, as soon as it can be
// preempted.
#include <accelerate/accelerate.h>
#include <torch/torch.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <iostream>
#include <optional>
#include <sstream>
#include <string>

#include "resume/settings.h"
#include "resume/trace.h"

namespace {

using namespace accelerate;
using test::Settings;
using test::sum_of;
using test::Trace;

/// Rows of numbers with noise, and the number of the row.
struct NoisyRows {
  [[nodiscard]] std::size_t size() const { return rows; }
  [[nodiscard]] std::pair<torch::Tensor, torch::Tensor> get(std::size_t index,
                                                            at::Generator& generator) const {
    const auto noise = at::randn({6}, generator, torch::kFloat);
    const auto row = static_cast<std::int64_t>(index);
    return {torch::sin(torch::arange(6) + static_cast<double>(row)).to(torch::kFloat) + noise,
            torch::tensor(row)};
  }
  std::size_t rows = 0;
};

struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("first", first);
    register_module("norm", norm);
    register_module("drop", drop);
    register_module("second", second);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return second(drop(torch::relu(norm(first(x)))));
  }
  torch::nn::Linear first{6, 8}, second{8, 1};
  torch::nn::BatchNorm1d norm{8};
  torch::nn::Dropout drop{0.3};
};
TORCH_MODULE(Net);

/// What the program itself counts.
struct Progress {
  [[nodiscard]] Value state_dict() const { return Value::Dict{{"batches", batches}}; }
  void load_state_dict(const Value& state) { batches = state.at("batches").as_int(); }
  std::int64_t batches = 0;
};

/// So much that saving it takes a while.
struct Ballast {
  [[nodiscard]] Value state_dict() const { return Value::Dict{{"bytes", bytes}}; }
  void load_state_dict(const Value& /*state*/) {}
  torch::Tensor bytes = torch::zeros({256 << 20}, torch::kByte);
};

void train(const Settings& settings) {
  const std::string folder = settings.text("folder", "");
  ProjectConfiguration project{.project_dir = folder,
                               .automatic_checkpoint_naming = true,
                               .total_limit = settings.number("limit", 1),
                               .save_on_preemption = settings.number("preemption", 0) != 0};
  Accelerator accelerator(
      {.gradient_accumulation_steps = settings.number("accumulate", 1),
       .dataloader_config = {.split_batches = settings.number("split", 0) != 0,
                             .dispatch_batches = settings.number("dispatch", 0) != 0,
                             .use_seedable_sampler = settings.number("seedable", 0) != 0,
                             .use_stateful_dataloader = true},
       .project_config = project});
  const auto rank = std::to_string(accelerator.process_index());
  Trace(folder + "/pid." + rank).write(std::to_string(::getpid()) + '\n');
  set_seed(11);
  Net net;
  AdamW adamw(net->parameters(), {.lr = 0.01});
  CosineAnnealingLR cosine(adamw, {.t_max = 40});
  auto data =
      make_data_loader(NoisyRows{.rows = static_cast<std::size_t>(settings.number("rows", 50))},
                       {.batch_size = settings.number("batch", 4),
                        .shuffle = true,
                        .num_workers = settings.number("workers", 0)});
  auto [model, optimizer, loader, scheduler] =
      accelerator.prepare(net, std::move(adamw), std::move(data), std::move(cosine));
  Progress progress;
  accelerator.register_for_checkpointing(progress);
  set_seed(5, {.device_specific = true});  // every process draws numbers of its own from here on

  const auto checkpoints = std::filesystem::path(folder) / "checkpoints";
  const bool saved = accelerator.agree_to_stop(std::filesystem::exists(checkpoints) &&
                                               !std::filesystem::is_empty(checkpoints));
  if (saved) accelerator.load_state();
  std::optional<Accelerator> beside;  // saves when the signal comes
  Ballast ballast;
  if (settings.given.contains("beside")) {
    beside.emplace(
        AcceleratorOptions{.project_config = {{.project_dir = settings.text("beside", ""),
                                               .automatic_checkpoint_naming = true}}});
    beside->register_for_checkpointing(ballast);
  }
  const Trace trace(folder + "/trace." + rank);
  const int every = settings.number("every", 3);
  const bool asynchronous = settings.number("async", 0) != 0;
  const bool uneven = settings.number("uneven", 0) != 0;
  const auto run_epoch = [&] {
    std::int64_t in_epoch = 0;
    for (auto& [x, ids] : loader) {
      auto accumulating = accelerator.accumulate(model);
      const auto target = x.sum(1, true);
      const auto loss = torch::mse_loss(model(x), target);
      accelerator.backward(loss);
      if (accelerator.sync_gradients()) accelerator.clip_grad_norm_(model.parameters(), 1.0);
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
      ++progress.batches;

      std::ostringstream line;
      // What is counted over epochs is saved by process 0 for all.
      const auto number = uneven ? 100 * loader.iteration() + ++in_epoch : progress.batches;
      line << std::hexfloat << "batch " << number << " epoch " << loader.iteration() << " ids";
      for (std::int64_t i = 0; i < ids.size(0); ++i) line << ' ' << ids[i].item<std::int64_t>();
      auto tensors = model.parameters();
      for (const auto& buffer : net->buffers()) tensors.push_back(buffer);
      line << " loss " << loss.item<float>() << " sum " << std::hex << sum_of(tensors) << " lr "
           << scheduler.get_last_lr().front() << " random " << torch::rand({1}).item<float>() << ' '
           << host_rng()() << '\n';
      trace.write(line.str());
      if (progress.batches % every == 0) {
        accelerator.save_state({}, {.asynchronous = asynchronous});
      }
      if (beside && progress.batches == settings.number("signal_at", 0)) {
        beside->save_state({}, {.asynchronous = true});
      }
      const bool is_last = accelerator.is_last_process();
      static bool rests = true;  // from the signal on it is ahead of the others
      if (is_last && progress.batches == settings.number("signal_at", 0)) {
        ::raise(SIGUSR1);
        rests = false;
      }
      if (const int pause = settings.number("pause_us", 0); rests && pause > 0) ::usleep(pause);
    }
  };
  while (loader.iteration() < settings.number("epochs", 2)) {
    if (!uneven) {
      run_epoch();
      continue;
    }
    accelerator.join_uneven_inputs(std::tie(model), {.even_batches = false}, run_epoch);
    accelerator.check_preemption();
  }
  accelerator.wait_for_save_state();
  accelerator.print("done");
  if (!settings.given.contains("then")) accelerator.end_training();
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings(argc, argv);
  try {
    train(settings);
    if (const auto then = settings.given.extract("then")) {  // a second run in these processes
      settings.given["folder"] = then.mapped();
      train(settings);
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
