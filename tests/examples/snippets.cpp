// Code of guides that belongs to no example program, so that it compiles (`make lint` compares).
#include <accelerate/accelerate.h>

namespace docs {

struct Arguments {};
Arguments parse(int argc, char** argv);
void train(const Arguments& arguments);

void options_of_a_call() {
  accelerate::Accelerator accelerator({.gradient_accumulation_steps = 4});
  accelerator.print("ready");
}

accelerate::AcceleratorOptions options_as_a_variable() {
  const accelerate::AcceleratorOptions options{.gradient_accumulation_steps = 4};
  return options;
}

torch::Tensor two_lines_one_collective(const accelerate::PartialState& state,
                                       const torch::Tensor& loss) {
  auto named = accelerate::name_collectives("loss");
  auto all = state.is_main_process() ? accelerate::gather(loss) : accelerate::gather(loss.detach());
  return all;
}

struct BigNetImpl : torch::nn::Module {
  explicit BigNetImpl(int width)
      : encoder(register_module("encoder", torch::nn::Linear(width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) { return encoder(x); }
  torch::nn::Linear encoder;
};
TORCH_MODULE(BigNet);

double plan_a_big_model(BigNet& net) {
  auto sizes = accelerate::compute_module_sizes(*net, {.dtype = torch::kFloat16});
  auto bytes = sizes.get("encoder", 0.0);  // of a module with all inside; "" is the model
  auto [total, largest] = accelerate::calculate_maximum_sizes(*net);

  auto budget = accelerate::get_balanced_memory(*net, {.no_split_module_classes = {"Block"}});
  auto map = accelerate::infer_auto_device_map(
      *net, {.max_memory = budget, .no_split_module_classes = {"Block"}});

  accelerate::load_checkpoint_in_model(*net, "model",
                                       {.device_map = map, .offload_folder = "spill"});
  return bytes + total + largest.size;
}

torch::Tensor keep_weights_in_a_folder(const BigNet& net) {
  accelerate::offload_state_dict("spill", accelerate::state_dict(*net));
  accelerate::OffloadedWeightsLoader weights({.save_folder = "spill"});
  auto weight = weights.at("encoder.weight");  // pages of the file, read when they are touched
  return weight;
}

torch::Tensor run_a_big_model(int config, const torch::Tensor& x) {
  auto net = accelerate::init_empty_weights([&] { return BigNet(config); });  // seconds, no memory
  auto model = accelerate::load_checkpoint_and_dispatch(
      net, "checkpoint", {.device_map = "auto", .offload_folder = "spill"});
  auto y = model(x);  // x may be on the CPU; y comes back to the device of x
  return y;
}

struct Sample {
  torch::Tensor ids, labels;
};
struct Sequences {
  [[nodiscard]] std::int64_t size() const { return 100; }
  [[nodiscard]] Sample get(std::size_t index) const;
};

auto sequences_of_few_lengths(const Sequences& dataset) {
  const auto collate = [](std::vector<Sample> samples) {
    std::vector<torch::Tensor> ids, labels;
    for (auto& sample : samples) {
      ids.push_back(sample.ids);
      labels.push_back(sample.labels);
    }
    return std::pair{accelerate::pad_to_multiple_of(ids, 64),
                     accelerate::pad_to_multiple_of(labels, 64, {.value = -100})};
  };
  auto data = accelerate::make_data_loader(dataset, {.batch_size = 16}, collate);
  return data;
}

// A function of this name beside `::main` is allowed, and the guide shows the one of a program.
namespace program {
int main(int argc, char** argv) {
  return accelerate::record([&] { train(parse(argc, argv)); });
}
}  // namespace program

}  // namespace docs
