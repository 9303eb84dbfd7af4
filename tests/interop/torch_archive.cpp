// Our side of torch_archive.sh.
//
//     interop_torch_archive write FOLDER    files for Python: values, tensors, states
//     interop_torch_archive copy FROM TO    reads a file and writes it again
#include <accelerate/accelerate.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "checkpoint/state_cases.h"

namespace {

using namespace accelerate;

Value plain_values() {
  return Value::Dict{
      {"none", nullptr},
      {"ints", Value::List{0, 255, 256, 65535, 65536, -1, 3000000000, INT64_MAX, INT64_MIN}},
      {"doubles", Value::tuple({0.0, 0.1, 1e-300})},
      {"texts", Value::List{"", "\xc3\xa4\xf0\x9f\x98\x80"}},
      {"bytes", Value::bytes(std::string("\0\xff\x80", 3))},
      {"empty", Value::List{Value::bytes(""), Value::tuple({}), Value::Dict{}, Value::list({})}},
      {"keys",
       Value::Dict{{1, "one"}, {true, "overwritten"}, {"text", Value::tuple({1, 2, 3, 4})}}}};
}

Value tensors() {
  const auto base = torch::arange(12, torch::kFloat);
  const auto weight = base.view({3, 4});
  return Value::Dict{{"weight", weight},
                     {"tied", weight},
                     {"row", weight[1]},
                     {"transposed", weight.t()},
                     {"expanded", torch::full({1}, 7.0F).expand({2, 3})},
                     {"scalar", torch::tensor(5)},
                     {"empty", torch::empty({0, 3})},
                     {"grad", torch::ones({2}).requires_grad_()}};
}

void write(const std::string& folder) {
  torch_save(plain_values(), folder + "/plain.pt");
  torch_save(tensors(), folder + "/tensors.pt");
  const torch::nn::Sequential module(torch::nn::BatchNorm1d(3), torch::nn::Linear(3, 2));
  torch_save(state_dict(*module), folder + "/module.bin");

  Value::Dict optimizers;
  for (const auto& [name, build] : test::optimizer_cases()) {
    optimizers.set(name, test::optimizer_case(build));
  }
  torch_save(optimizers, folder + "/optimizers.pt");
  Value::Dict schedulers;
  for (const auto& name : test::scheduler_names()) {
    schedulers.set(name, test::scheduler_case(name));
  }
  torch_save(schedulers, folder + "/schedulers.pt");
  torch_save(GradScaler({.init_scale = 1024.0, .growth_interval = 5}).state_dict(),
             folder + "/scaler.pt");

  const Accelerator accelerator({.cpu = true});
  set_seed(7);
  for (const auto& entry : accelerator._state_entries()) {
    if (entry.kind != StateKind::kRandomStates) continue;
    torch_save(entry.object->state_dict(), folder + "/random_states_0.pkl");
  }
}

}  // namespace

int main(int argc, char** argv) {
  return accelerate::record([&] {
    const std::vector<std::string> words(argv + 1, argv + argc);
    if (words.size() == 2 && words[0] == "write") return write(words[1]);
    if (words.size() == 3 && words[0] == "copy") return torch_save(torch_load(words[1]), words[2]);
    throw std::runtime_error("usage: interop_torch_archive write FOLDER | copy FROM TO");
  });
}
