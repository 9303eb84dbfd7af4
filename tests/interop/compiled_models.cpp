// Runs FOLDER/model.pt2 on FOLDER/inputs.safetensors with its own and with other weights.
#include <accelerate/modeling/compiled_model.h>
#include <accelerate/safetensors.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <iostream>

#include "accelerate/errors.h"

int main(int argc, char** argv) {
  using namespace accelerate;
  const std::filesystem::path folder = argc > 1 ? argv[1] : ".";
  const auto inputs = safetensors::load_file(folder / "inputs.safetensors");
  TorchDynamoPlugin plugin{.backend = DynamoBackend::kInductor};
  plugin.options = Value(Value::Dict{{"aoti_package", (folder / "model.pt2").string()}});
  CompiledModel model(plugin);

  StateDict results;
  const auto run = [&](const std::string& name) {
    const auto outputs = model({inputs["x"], inputs["mask"]});
    results.insert(name + "_logits", outputs.at(0));
    results.insert(name + "_sums", outputs.at(1));
  };
  run("own");
  model.load_state_dict(safetensors::load_file(folder / "other.safetensors"));
  run("other");
  safetensors::save_file(results, folder / "results.safetensors");

  auto names = model.constant_names();
  std::ranges::sort(names);
  for (const auto& name : names) std::cout << name << "\n";
  const bool named = names == std::vector<std::string>{"first.bias", "first.weight", "second.bias",
                                                       "second.weight"};
  const auto refuses = [](const auto& call) {
    try {
      call();
      return false;
    } catch (const Error& error) {
      std::cout << error.what() << "\n";
      return true;
    }
  };
  const bool refused = refuses([&] { (void)model({inputs["x"]}); }) &&
                       refuses([&] { model.load_state_dict(StateDict()); }) &&
                       refuses([&] { CompiledModel none(folder / "none.pt2"); }) &&
                       refuses([&] { CompiledModel wrong(folder / "inputs.safetensors"); });
  return named && refused ? 0 : 1;
}
