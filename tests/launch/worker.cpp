// A program that uses the library and does what its arguments say: the actions of actions.h and
//
//     join           meets the others
//     facts          "rank 1 of 2, local 1, host a, master 10.0.0.1"
//     gather         every rank prints "gathered 0 1 2"
//     sum            adds a one from everybody, as training does, and prints the first result
//     loop=FILE      the same over and over, "step N" for the first and each hundredth, until FILE
//     is
//                    there; rank 0 looks, and all stop together
//     engine         "engine FSDP 2 Block" or "engine DEEPSPEED 3 0.5": the plugin that the
//     launcher
//                    made, with its version and classes, or its stage and clipping
//     train          trains by whatever engine there is, and prints "trained SUM-OF-WEIGHTS"
//     mesh           "mesh pp 2 tp 2": how the processes are divided
//     throw=TEXT     leaves by an exception
#include <accelerate/accelerate.h>
#include <accelerate/state/device_mesh.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "launch/actions.h"

namespace {

using accelerate::test::say;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "(unset)";
}

void print_facts() {
  const accelerate::PartialState state;
  say(STDOUT_FILENO, "rank " + std::to_string(state.process_index()) + " of " +
                         std::to_string(state.num_processes()) + ", local " +
                         std::to_string(state.local_process_index()) + ", host " +
                         state.host_name() + ", master " + variable("MASTER_ADDR"));
}

void gather_ranks() {
  const accelerate::PartialState state;
  const auto ranks = accelerate::gather(torch::full({1}, state.process_index(), torch::kLong));
  std::string line = "gathered";
  for (std::int64_t i = 0; i < ranks.numel(); ++i) {
    line += " " + std::to_string(ranks[i].item<std::int64_t>());
  }
  say(STDOUT_FILENO, line);
}

double sum_over_all(double value) {
  return accelerate::reduce(torch::full({1}, value, torch::kDouble), accelerate::Reduction::kSum)
      .item<double>();
}

void print_engine() {
  const accelerate::Accelerator accelerator;
  std::string line = "engine " + std::string(to_string(accelerator.distributed_type()));
  if (const auto fsdp = accelerator.state().fsdp_plugin()) {
    line += " " + std::to_string(*fsdp->fsdp_version);
    for (const auto& name : *fsdp->transformer_cls_names_to_wrap) line += " " + name;
  }
  if (const auto deepspeed = accelerator.deepspeed_plugin()) {
    line += " " + std::to_string(*deepspeed->zero_stage) + " " +
            deepspeed->get_value("gradient_clipping").repr();
  }
  say(STDOUT_FILENO, line);
}

/// Names no engine.
void train() {
  accelerate::Accelerator accelerator;
  torch::manual_seed(3);
  torch::nn::Linear net(4, 2);
  const auto inputs = torch::linspace(0, 1, 48).reshape({12, 4});
  auto [model, optimizer, loader] = accelerator.prepare(
      net, accelerate::SGD(net->parameters(), {.lr = 0.5}),
      accelerate::make_data_loader(std::pair{inputs, inputs.slice(1, 0, 2)}, {.batch_size = 2}));
  for (const auto& [input, target] : loader) {
    // Small: `--use_deepspeed` clips gradients to a norm of 1.
    accelerator.backward((model(input) - target).pow(2).mean() * 0.1);
    optimizer.step();
    optimizer.zero_grad();
  }
  const auto sum = accelerate::gathered_parameters(
      model, {}, [&] { return net->weight.detach().sum().item<double>(); });
  say(STDOUT_FILENO, "trained " + std::to_string(sum));
}

void print_mesh() {
  const accelerate::Accelerator accelerator;
  std::string line = "mesh";
  const auto mesh = accelerator.torch_device_mesh();
  for (const auto& name : mesh->mesh_dim_names()) {
    line += " " + name + " " + std::to_string(mesh->size(name));
  }
  say(STDOUT_FILENO, line);
}

void loop_until(const std::string& stop_file) {
  const accelerate::PartialState state;
  for (int step = 1;; ++step) {
    const bool stop = state.is_main_process() && std::filesystem::exists(stop_file);
    const double stops = sum_over_all(stop ? 1 : 0);
    if (step == 1 || step % 100 == 0) say(STDOUT_FILENO, "step " + std::to_string(step));
    if (stops > 0) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

}  // namespace

int main(int argc, char** argv) {
  return accelerate::record([&] {
    return accelerate::test::act(
        {argv + 1, argv + argc},
        {
            {"join", [](const std::string&) { const accelerate::PartialState state; }},
            {"facts", [](const std::string&) { print_facts(); }},
            {"gather", [](const std::string&) { gather_ranks(); }},
            {"sum",
             [](const std::string&) {
               say(STDOUT_FILENO, "sum " + std::to_string(static_cast<int>(sum_over_all(1))));
             }},
            {"loop", loop_until},
            {"engine", [](const std::string&) { print_engine(); }},
            {"train", [](const std::string&) { train(); }},
            {"mesh", [](const std::string&) { print_mesh(); }},
            {"throw", [](const std::string& text) { throw std::runtime_error(text); }},
        });
  });
}
