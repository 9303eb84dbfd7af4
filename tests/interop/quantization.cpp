// interop_quantization FORMAT FOLDER: quantizes plain.safetensors into ours.safetensors, reads and
// writes theirs.safetensors again, and computes with both. For quantization.py.
#include <accelerate/accelerate.h>
#include <torch/torch.h>

#include <filesystem>
#include <string>

using namespace accelerate;

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() { fc = register_module("fc", torch::nn::Linear(192, 320)); }
  torch::Tensor forward(const torch::Tensor& x) { return fc(x); }
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(Net);

BnbQuantizationConfig config_of(const std::string& format) {
  BnbQuantizationConfig config{.torch_dtype = FloatType::kFp32, .skip_modules = {{}}};
  config.load_in_8bit = format == "int8";
  config.load_in_4bit = !config.load_in_8bit;
  config.bnb_4bit_quant_type = format.starts_with("nf4") ? "nf4" : "fp4";
  config.bnb_4bit_use_double_quant = format.ends_with("_double");
  config.bnb_4bit_compute_dtype = FloatType::kFp32;
  return config;
}

torch::Tensor run(const std::string& format, const std::filesystem::path& folder,
                  const std::string& from, const std::string& to, const torch::Tensor& x) {
  const auto net = init_empty_weights([] { return Net(); });
  const auto model = load_and_quantize_model(
      net, config_of(format), {.weights_location = folder / (from + ".safetensors")});
  save(state_dict(*net), folder / (to + ".safetensors"), {.safe_serialization = true});
  return model(x);
}

}  // namespace

int main(int, char** argv) {
  return record([&] {
    const torch::NoGradGuard no_grad;
    const std::string format = argv[1];
    const std::filesystem::path folder = argv[2];
    const auto x = load_state_dict(folder / "x.safetensors")["x"];
    StateDict outputs;
    outputs.insert("ours", run(format, folder, "plain", "ours", x));
    outputs.insert("theirs", run(format, folder, "theirs", "theirs_again", x));
    save(outputs, folder / "outputs.safetensors", {.safe_serialization = true});
  });
}
