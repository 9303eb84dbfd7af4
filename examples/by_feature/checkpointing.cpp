// Checkpoints and exact resume: the run stops early, and a second one, here in the same program,
// goes on from its newest checkpoint.
//
//     accelerate launch --cpu --num_processes 2 build/dev/examples/by_feature/checkpointing
//
// Last line: "result: 99.8 % of 1000 test points right, resumed after 100 batches"
// One process: "result: 99.9 % of 1000 test points right, resumed after 100 batches"
#include <accelerate/accelerate.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>

#include "task.h"

namespace F = torch::nn::functional;

constexpr int kEpochs = 8;

// What the program itself counts.
struct Progress {
  std::int64_t batches = 0;

  accelerate::Value state_dict() const { return accelerate::Value::Dict{{"batches", batches}}; }
  void load_state_dict(const accelerate::Value& state) { batches = state.at("batches").as_int(); }
};

/// Trains until the end, or until so many batches in all. Returns where it began, and the accuracy.
std::pair<std::int64_t, double> train(const std::filesystem::path& project,
                                      std::int64_t stop_after) {
  accelerate::ProjectConfiguration configuration{.project_dir = project,
                                                 .automatic_checkpoint_naming = true,
                                                 .total_limit = 2,
                                                 .save_on_preemption = true};
  accelerate::Accelerator accelerator(
      {.dataloader_config = {.use_stateful_dataloader = true}, .project_config = configuration});
  accelerate::set_seed(42);
  auto data = accelerate::make_data_loader(task::spirals(2048), {.batch_size = 8, .shuffle = true});
  auto test_data = accelerate::make_data_loader(task::spirals(1000), {.batch_size = 64});
  auto net = task::make_classifier();
  auto adamw = accelerate::AdamW(net->parameters(), {.lr = 1e-2});
  auto cosine = accelerate::CosineAnnealingLR(adamw, {.t_max = kEpochs * data.size()});
  auto [model, optimizer, loader, test_loader, scheduler] = accelerator.prepare(
      net, std::move(adamw), std::move(data), std::move(test_data), std::move(cosine));

  Progress progress;
  accelerator.register_for_checkpointing(progress);
  if (std::filesystem::exists(project / "checkpoints")) accelerator.load_state();
  const auto began = progress.batches;
  while (loader.iteration() < kEpochs && progress.batches < stop_after) {
    for (auto& [x, y] : loader) {
      accelerator.backward(F::cross_entropy(model(x), y));
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
      if (++progress.batches % 50 == 0) accelerator.save_state({}, {.asynchronous = true});
      if (progress.batches == stop_after) break;
    }
  }
  accelerator.wait_for_save_state();
  return {began, task::accuracy(accelerator, model, test_loader)};
}

void run() {
  const accelerate::PartialState state;
  // A folder for each launch: the processes of one have the same parent.
  const auto project = std::filesystem::temp_directory_path() /
                       ("accelerate_checkpointing." + std::to_string(::getppid()));
  if (state.is_main_process()) std::filesystem::remove_all(project);
  state.wait_for_everyone();

  (void)train(project, 120);
  const auto [began, percent] = train(project, INT64_MAX);
  state.print("result:", percent, "% of 1000 test points right, resumed after", began, "batches");
  if (state.is_main_process()) std::filesystem::remove_all(project);
}

int main() { return accelerate::record(run); }
