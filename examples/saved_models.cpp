// A model in files: saved in shards, loaded again, and weights whose names and layouts are those of
// another program. Writes into the folder saved_weights, and removes it at the end.
//
//     accelerate launch --cpu --num_processes 2 build/dev/examples/saved_models
//
// Last line: "result: 4 rules, 14 matches, 0 names missing, outputs equal"
// One process: "result: 4 rules, 14 matches, 0 names missing, outputs equal"
#include <accelerate/accelerate.h>

#include <filesystem>
#include <iostream>
#include <string>
#include <system_error>

namespace {

// Attention with a projection each for queries, keys and values.
struct AttentionImpl : torch::nn::Module {
  torch::nn::Linear q = register_module("q", torch::nn::Linear(8, 8));
  torch::nn::Linear k = register_module("k", torch::nn::Linear(8, 8));
  torch::nn::Linear v = register_module("v", torch::nn::Linear(8, 8));

  torch::Tensor forward(const torch::Tensor& x) {  // [batch, tokens, 8]
    return torch::scaled_dot_product_attention(q(x), k(x), v(x));
  }
};
TORCH_MODULE(Attention);

struct NetImpl : torch::nn::Module {
  torch::nn::ModuleList blocks =
      register_module("blocks", torch::nn::ModuleList(Attention(), Attention()));

  torch::Tensor forward(torch::Tensor x) {
    for (const auto& block : *blocks) x = x + block->as<AttentionImpl>()->forward(x);
    return x;
  }
};
TORCH_MODULE(Net);

// The weights as GPT-2 of transformers has them: one fused and transposed matrix per block.
accelerate::StateDict as_gpt2_has_them(const Net& net) {
  accelerate::StateDict state;
  const auto own = accelerate::state_dict(*net);
  for (const std::string block : {"0", "1"}) {
    const auto fused = [&](const std::string& kind) {
      const auto from = "blocks." + block + ".";
      return torch::cat(
          {own[from + "q." + kind], own[from + "k." + kind], own[from + "v." + kind]});
    };
    state.insert("transformer.h." + block + ".c_attn.weight", fused("weight").t().contiguous());
    state.insert("transformer.h." + block + ".c_attn.bias", fused("bias"));
  }
  return state;
}

void run() {
  const accelerate::Accelerator accelerator({.cpu = true});
  accelerate::set_seed(42);
  Net model;
  const auto folder =
      std::filesystem::path("saved_weights") / std::to_string(accelerator.num_processes());

  Net net;
  // All processes call it.
  accelerator.save_model(model, folder / "out", {.max_shard_size = "1KB"});
  // A folder, a file or an index.
  auto report = accelerate::load_checkpoint_in_model(*net, folder / "out");
  for (const auto& name : report.missing_keys) std::cout << name << " keeps its value\n";

  accelerator.save(as_gpt2_has_them(model), folder / "gpt2.safetensors",
                   {.safe_serialization = true});
  accelerator.wait_for_everyone();
  Net other;
  accelerate::KeyMapping mapping;
  mapping.strip_prefix("transformer.")
      .replace(R"(^h\.(\d+)\.)", R"(blocks.\1.)")
      .transpose(R"(.*\.c_attn\.weight)")
      .split(R"((.*)\.c_attn\.(weight|bias))", {R"(\1.q.\2)", R"(\1.k.\2)", R"(\1.v.\2)"});
  report = accelerate::load_checkpoint_in_model(*other, folder / "gpt2.safetensors",
                                                {.strict = true, .key_mapping = mapping});
  accelerator.print(report.key_mapping.to_string());

  std::int64_t matches = 0;
  for (const auto& rule : report.key_mapping.rules) matches += rule.matched;
  const auto x = torch::randn({2, 5, 8});
  const auto expected = model->forward(x);
  const bool equal =
      torch::equal(net->forward(x), expected) && torch::equal(other->forward(x), expected);
  accelerator.wait_for_everyone();
  if (accelerator.is_main_process()) {
    std::filesystem::remove_all(folder);
    std::error_code other_runs;
    std::filesystem::remove("saved_weights", other_runs);
  }
  accelerator.print("result:", report.key_mapping.rules.size(), "rules,", matches, "matches,",
                    report.missing_keys.size(), "names missing, outputs",
                    equal ? "equal" : "differ");
}

}  // namespace

int main() { return accelerate::record(run); }
