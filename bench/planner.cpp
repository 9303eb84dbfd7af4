// Planning a model of 10,000 modules without memory: sizes, balanced budgets, device maps.
// planner.py does the same with Python Accelerate.
#include <memory>
#include <string>

#include "support.h"

namespace {

using accelerate::MaxMemory;
using torch::nn::Module;

struct Layer : Module {
  Layer(std::int64_t in, std::int64_t out) {
    if (in > 0) register_parameter("weight", torch::empty({out, in}, torch::kMeta));
    if (out > 0) register_parameter("bias", torch::empty(out, torch::kMeta));
  }
};

struct Block : Module {
  Block() {
    const auto add = [this](const char* name, std::int64_t in, std::int64_t out) {
      register_module(name, std::make_shared<Layer>(in, out));
    };
    for (const auto* name : {"q", "k", "v", "o"}) add(name, 64, 64);
    add("norm1", 1, 64);
    add("norm2", 1, 64);
    add("up", 64, 256);
    add("down", 256, 64);
    add("act", 0, 0);
  }
};

struct Net : Module {
  explicit Net(int blocks) {
    const auto embedding = torch::empty({1000, 64}, torch::kMeta);
    register_module("embedding", std::make_shared<Layer>(0, 0))
        ->register_parameter("weight", embedding);
    const auto layers = register_module("layers", std::make_shared<Module>());
    for (int i = 0; i < blocks; ++i) {
      layers->register_module(std::to_string(i), std::make_shared<Block>());
    }
    register_module("head", std::make_shared<Layer>(0, 0))->register_parameter("weight", embedding);
  }
};

}  // namespace

int main() {
  const auto net = std::make_shared<Net>(1000);
  double total = 0;
  // The first call: names of classes are slow once.
  const auto once = [](const char* name, const std::function<void()>& f) {
    bench::report(name, bench::microseconds(1, f) / 1e3, "ms");
  };
  once("compute_module_sizes", [&] { total = accelerate::compute_module_sizes(*net).get("", 0); });
  MaxMemory budget;
  for (int gpu = 0; gpu < 4; ++gpu) budget.set(gpu, static_cast<std::int64_t>(total / 4));
  budget.set("cpu", static_cast<std::int64_t>(total));
  once("get_balanced_memory, blocks stay whole", [&] {
    (void)accelerate::get_balanced_memory(
        *net, {.max_memory = budget, .no_split_module_classes = {"Block"}});
  });
  once("infer_auto_device_map",
       [&] { (void)accelerate::infer_auto_device_map(*net, {.max_memory = budget}); });
  once("infer_auto_device_map, blocks stay whole", [&] {
    (void)accelerate::infer_auto_device_map(
        *net, {.max_memory = budget, .no_split_module_classes = {"Block"}});
  });
}
