// interop_models save FOLDER: the models of tests/reference/models, one folder per model, limit and
//     format.
// interop_models copy FOLDER NAMES OUT: loads a checkpoint strictly into a model of float32
// tensors,
//     which NAMES lists, and writes its state dict to OUT. A line of NAMES is a name, the number of
//     the tensor (tied names have the same), the rank and the sizes.
// interop_models offload FOLDER: adds the tensors of tests/reference/offload to an offload folder.
// interop_models disk FOLDER NAMES OUT: the same model, with all of it in the offload folder OUT.
// interop_models copy_offloaded FOLDER OUT: writes the tensors of an offload folder to OUT.
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "accelerate/accelerator.h"
#include "accelerate/checkpoint.h"
#include "checkpoint/models.h"
#include "checkpoint/offloaded.h"

namespace {

namespace fs = std::filesystem;
using namespace accelerate;

template <class Net>
void save(const Accelerator& accelerator, const fs::path& folder, const std::string& name) {
  for (const std::int64_t limit : {100'000, 100, 32}) {
    for (const bool safe : {true, false}) {
      const auto kind = std::to_string(limit) + (safe ? "_safetensors" : "_bin");
      accelerator.save_model(test::filled<Net>(), folder / (name + "_" + kind),
                             {.max_shard_size = limit, .safe_serialization = safe});
    }
  }
}

/// Puts a tensor at a dotted name, making the modules on the way.
void place(torch::nn::Module& root, const std::string& name, const torch::Tensor& tensor) {
  torch::nn::Module* module = &root;
  std::size_t begin = 0;
  for (auto dot = name.find('.'); dot != name.npos; dot = name.find('.', begin)) {
    const auto part = name.substr(begin, dot - begin);
    const auto children = module->named_children();
    const auto* child = children.find(part);
    const auto next =
        child != nullptr
            ? *child
            : module->register_module(part, std::make_shared<test::Leaf>(test::Tied::Pairs{}));
    module = next.get();
    begin = dot + 1;
  }
  module->register_parameter(name.substr(begin), tensor, tensor.is_floating_point());
}

std::shared_ptr<test::Leaf> model_of(const fs::path& names) {
  std::ifstream in(names);
  auto root = std::make_shared<test::Leaf>(test::Tied::Pairs{});
  std::map<std::int64_t, torch::Tensor> tensors;
  std::string name;
  std::int64_t number = 0;
  std::int64_t rank = 0;
  while (in >> name >> number >> rank) {
    std::vector<std::int64_t> shape(static_cast<std::size_t>(rank));
    for (auto& size : shape) in >> size;
    const auto [tensor, is_new] = tensors.try_emplace(number);
    if (is_new) tensor->second = torch::full(shape, -1.0);
    place(*root, name, tensor->second);
  }
  return root;
}

void load_and_write(const fs::path& folder, const fs::path& names, const fs::path& out) {
  const auto root = model_of(names);
  load_checkpoint_in_model(*root, folder, {.strict = true});
  torch_save(state_dict(*root), out);
}

void copy_offloaded(const fs::path& folder, const fs::path& out) {
  const OffloadedWeightsLoader weights({.save_folder = folder});
  StateDict state("Tensor");
  for (const auto& name : weights.keys()) state.insert(name, weights.at(name));
  torch_save(state, out);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() == 2 && words[0] == "save") {
    const Accelerator accelerator({.cpu = true});
    save<test::Small>(accelerator, words[1], "small");
    save<test::Tied>(accelerator, words[1], "tied");
    save<test::Mixed>(accelerator, words[1], "mixed");
    return 0;
  }
  if (words.size() == 4 && words[0] == "copy") {
    load_and_write(words[1], words[2], words[3]);
    return 0;
  }
  if (words.size() == 2 && words[0] == "offload") {
    offload_state_dict(words[1], test::offloaded_tensors());
    return 0;
  }
  if (words.size() == 4 && words[0] == "disk") {
    load_checkpoint_in_model(
        *model_of(words[2]), words[1],
        {.device_map = {{"", "disk"}}, .offload_folder = words[3], .offload_buffers = true});
    return 0;
  }
  if (words.size() == 3 && words[0] == "copy_offloaded") {
    copy_offloaded(words[1], words[2]);
    return 0;
  }
  std::cerr
      << "usage: interop_models save FOLDER | copy FOLDER NAMES OUT | disk FOLDER NAMES OUT | "
         "offload FOLDER | copy_offloaded FOLDER OUT\n";
  return 2;
}
