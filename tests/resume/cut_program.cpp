// As resume_program, for a model that is cut: mode=tp, pp, cp or sp says how. With launched=1 the
// sizes come from the launcher.
#include <accelerate/accelerate.h>
#include <accelerate/parallel.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "resume/settings.h"
#include "resume/trace.h"

namespace {

using namespace accelerate;
using test::Settings;
using test::Trace;
using torch::Tensor;
using Batch = std::map<std::string, Tensor>;

constexpr std::int64_t kLength = 8;

/// Sequences of noise, with the number of the row at each place.
struct NoisyRows {
  [[nodiscard]] std::size_t size() const { return rows; }
  [[nodiscard]] Batch get(std::size_t index, at::Generator& generator) const {
    return {{"input_ids", at::randn({kLength, 4}, generator, torch::kFloat)},
            {"position_ids", torch::arange(kLength)},
            {"rows", torch::full({kLength}, static_cast<std::int64_t>(index))}};
  }
  std::size_t rows = 0;
};

/// In three layers: the middle one is attention with as many heads as the process has.
struct NetImpl : torch::nn::Module {
  NetImpl() { register_module("layers", layers); }
  Tensor forward(const Tensor& x) { return layers->forward(x); }
  torch::nn::Sequential layers{torch::nn::Linear(4, 16), torch::nn::Functional([](const Tensor& x) {
                                 const auto heads = x.unflatten(-1, {-1, 4}).transpose(1, 2);
                                 const auto y = at::scaled_dot_product_attention(
                                     heads, heads, heads, {}, 0.0, true);
                                 return y.transpose(1, 2).flatten(2);
                               }),
                               torch::nn::Linear(16, 1), torch::nn::Dropout(0.2)};
};
TORCH_MODULE(Net);

Tensor loss_of(const Tensor& output, const Tensor& target) {
  return torch::mse_loss(output, target);
}

/// What the program itself counts.
struct Progress {
  [[nodiscard]] Value state_dict() const { return Value::Dict{{"batches", batches}}; }
  void load_state_dict(const Value& state) { batches = state.at("batches").as_int(); }
  std::int64_t batches = 0;
};

/// Those of this process.
std::vector<Tensor> own(std::vector<Tensor> parameters) {
  std::erase_if(parameters, [](const Tensor& one) { return one.is_meta(); });
  return parameters;
}

/// `step` takes the tensors of a batch and returns its loss.
template <class Model, class Step>
void run(Accelerator& accelerator, const Settings& settings, const Model& model,
         const DataLoader<Batch>& loader, const Step& step) {
  auto parts = accelerator.deepspeed_ulysses_dl_adapter(loader, model);
  Progress progress;
  accelerator.register_for_checkpointing(progress);
  const std::filesystem::path folder = settings.text("folder", "");
  const auto saved = folder / "checkpoints";
  if (accelerator.agree_to_stop(std::filesystem::exists(saved) &&
                                !std::filesystem::is_empty(saved))) {
    accelerator.load_state();
  }
  const Trace trace(folder / ("trace." + std::to_string(accelerator.process_index())));
  while (parts.iteration() < 2) {
    for (auto& batch : parts) {
      const Tensor loss = step(batch.at("input_ids"));
      std::ostringstream line;
      line << std::hexfloat << "batch " << ++progress.batches << " rows";
      const Tensor rows = batch.at("rows").select(1, 0).contiguous();
      for (std::int64_t i = 0; i < rows.numel(); ++i) line << ' ' << rows[i].item<std::int64_t>();
      line << " input " << Tensor(batch.at("input_ids")).sum().item<float>() << " loss "
           << loss.item<float>() << " sum " << std::hex << test::sum_of(own(model.parameters()))
           << " random " << torch::rand({1}).item<float>() << '\n';
      trace.write(line.str());
      if (const int pause = settings.number("pause_us", 0); pause > 0) ::usleep(pause);
    }
  }
  accelerator.print("done");
  accelerator.end_training();
}

void train(const Settings& settings) {
  const std::string folder = settings.text("folder", "");
  const std::string mode = settings.text("mode", "");
  const auto size = [&](const char* of) -> std::int64_t { return mode == of ? 2 : 1; };
  std::optional<ParallelismConfig> sizes;
  if (settings.number("launched", 0) == 0) {
    sizes = ParallelismConfig{
        .tp_size = size("tp"), .cp_size = size("cp"), .sp_size = size("sp"), .pp_size = size("pp")};
  }
  Accelerator accelerator(
      {.dataloader_config = {.use_stateful_dataloader = true},
       .project_config =
           ProjectConfiguration{.project_dir = folder,
                                .automatic_checkpoint_naming = true,
                                .save_on_preemption = settings.number("preemption", 0) != 0},
       .parallelism_config = sizes});
  Trace(folder + "/pid." + std::to_string(accelerator.process_index()))
      .write(std::to_string(::getpid()) + '\n');
  set_seed(11);
  Net net;
  apply_tp_plan(*net, make_tp_plan({{"layers.0", "colwise"}, {"layers.2", "rowwise"}}),
                accelerator.torch_device_mesh());
  AdamW adamw(net->parameters(), {.lr = 0.01});
  auto data =
      make_data_loader(NoisyRows{.rows = static_cast<std::size_t>(settings.number("rows", 50))},
                       {.batch_size = 4, .shuffle = true});
  const auto target_of = [](const Tensor& x) { return x.sum(-1, /*keepdim=*/true); };
  if (mode == "pp") {
    auto [model, optimizer, loader] =
        accelerator.prepare(Pipeline(net->layers, loss_of, {.num_micro_batches = 2}),
                            std::move(adamw), std::move(data));
    run(accelerator, settings, model, loader,
        [&, &model = model](const Tensor& x) { return model(x, target_of(x)); });
    return;
  }
  auto [model, optimizer, loader] = accelerator.prepare(net, std::move(adamw), std::move(data));
  run(accelerator, settings, model, loader,
      [&, &model = model, &optimizer = optimizer](const Tensor& x) {
        const auto target = target_of(x);
        std::unique_ptr<ContextParallelScope> split;
        if (mode == "cp") {
          split.reset(new ContextParallelScope(accelerator.maybe_context_parallel(
              {.buffers = {x, target}, .buffer_seq_dims = {1, 1}})));
        }
        const auto loss = loss_of(model(x), target);
        accelerator.backward(loss);
        optimizer.step();
        optimizer.zero_grad();
        return loss.detach();
      });
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Settings settings(argc, argv);
    if (settings.text("mode", "") == "cp") ::setenv("ACCELERATE_ALLOW_CP_STANDALONE", "true", 1);
    train(settings);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
