// Low-rank adapters on weights in 4 bits: a model that knows the spirals of ../basic.cpp learns
// spirals that are turned. Only the adapters get gradients, and only they are saved.
//
//     accelerate launch --cpu --num_processes 2 build/dev/examples/by_feature/lora
//
// Last line: "result: 99 % of 1000 test points right; 1552 of 6099 numbers trained"
#include <accelerate/accelerate.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>

#include "task.h"

namespace F = torch::nn::functional;

struct ClassifierImpl : torch::nn::Module {
  ClassifierImpl() {
    first = register_module("first", accelerate::nn::LoraLinear(2, 64));
    second = register_module("second", accelerate::nn::LoraLinear(64, 64));
    head = register_module("head", torch::nn::Linear(64, 3));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return head(torch::relu(second(torch::relu(first(x)))));
  }
  accelerate::nn::LoraLinear first{nullptr}, second{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Classifier);

/// All weights, on spirals that are not turned: what a downloaded model has behind it.
void pretrain(Classifier& net) {
  for (auto& parameter : net->parameters()) parameter.requires_grad_(true);
  accelerate::AdamW optimizer(net->parameters(), {.lr = 1e-2});
  const auto [x, y] = task::spirals(2048);
  for (int step = 0; step < 300; ++step) {
    optimizer.zero_grad();
    F::cross_entropy(net->forward(x), y).backward();
    optimizer.step();
  }
}

std::pair<torch::Tensor, torch::Tensor> turned_spirals(std::int64_t count) {
  const auto [x, arms] = task::spirals(count);
  const auto turn = torch::tensor({{0.5, -0.866}, {0.866, 0.5}}, torch::kFloat);
  return {x.matmul(turn), arms};
}

void run() {
  accelerate::Accelerator accelerator;
  accelerate::set_seed(42);
  Classifier net;
  pretrain(net);

  auto parameters = accelerate::nn::mark_only_lora_as_trainable(*net);
  const auto quantized = accelerate::load_and_quantize_model(
      net, {.load_in_4bit = true,
            .bnb_4bit_quant_type = "nf4",
            .bnb_4bit_compute_dtype = accelerate::FloatType::kFp32});
  auto adamw = accelerate::AdamW(parameters, {.lr = 1e-2});
  auto data =
      accelerate::make_data_loader(turned_spirals(2048), {.batch_size = 16, .shuffle = true});
  auto test_data = accelerate::make_data_loader(turned_spirals(1000), {.batch_size = 64});
  auto [model, optimizer, loader, test_loader] =
      accelerator.prepare(net, std::move(adamw), std::move(data), std::move(test_data));
  accelerator.print(task::accuracy(accelerator, model, test_loader), "% right before");

  for (int epoch = 0; epoch < 8; ++epoch) {
    for (auto& [x, y] : loader) {
      accelerator.backward(F::cross_entropy(model(x), y));
      optimizer.step();
      optimizer.zero_grad();
    }
  }

  // The adapters alone are saved, and are all that the file gives back.
  const auto file = std::filesystem::temp_directory_path() /
                    ("accelerate_lora." + std::to_string(::getppid()) + ".safetensors");
  accelerate::save(accelerate::nn::lora_state_dict(*net), file, {.safe_serialization = true});
  accelerator.wait_for_everyone();
  net->first->reset_adapter();
  net->second->reset_adapter();
  accelerate::load_state_dict(*net, accelerate::load_state_dict(file), /*strict=*/false);
  const auto after = task::accuracy(accelerator, model, test_loader);

  std::int64_t trained = 0, all = 0;
  for (const auto& parameter : net->parameters()) {
    all += parameter.numel();
    if (parameter.requires_grad()) trained += parameter.numel();
  }
  accelerator.print("result:", after, "% of 1000 test points right;", trained, "of", all,
                    "numbers trained");
  accelerator.wait_for_everyone();
  if (accelerator.is_main_process()) std::filesystem::remove(file);
}

int main() { return accelerate::record(run); }
