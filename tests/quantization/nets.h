// tests/quantization/nets.h - models of the tests of quantization, and their configurations.
#pragma once

#include <accelerate/accelerate.h>
#include <torch/torch.h>

#include <string>

#include "support/reference_path.h"

namespace accelerate::test {

/// The layer of the reference files: 128 to 48.
struct OneLayerImpl : torch::nn::Module {
  OneLayerImpl() { fc = register_module("fc", torch::nn::Linear(128, 48)); }
  torch::Tensor forward(const torch::Tensor& x) { return fc->forward(x); }
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(OneLayer);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(16, 64));
    first = register_module("first", torch::nn::Linear(64, 128));
    second =
        register_module("second", torch::nn::Linear(torch::nn::LinearOptions(128, 64).bias(false)));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({64})));
    head = register_module("head", torch::nn::Linear(64, 16));
  }
  torch::Tensor forward(const torch::Tensor& ids) {
    const auto x = torch::relu(first->forward(embedding->forward(ids).to(first->weight.dtype())));
    return head->forward(norm->forward(second->forward(x).to(norm->weight.dtype())));
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear first{nullptr}, second{nullptr}, head{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Net);

inline Net seeded_net() {
  torch::manual_seed(5);
  return {};
}
inline torch::Tensor ids() { return torch::arange(12).view({3, 4}); }

inline BnbQuantizationConfig four_bits(const std::string& type = "nf4") {
  return {.load_in_4bit = true,
          .bnb_4bit_quant_type = type,
          .bnb_4bit_compute_dtype = FloatType::kFp32};
}
inline BnbQuantizationConfig eight_bits() {
  return {.load_in_8bit = true, .torch_dtype = FloatType::kFp32};
}

inline StateDict reference(const std::string& file) {
  return load_state_dict(reference_path("quantization/" + file));
}

struct AdaptedImpl : torch::nn::Module {
  AdaptedImpl() {
    first = register_module("first", nn::LoraLinear(64, 128, nn::LoraOptions{.r = 4}));
    head = register_module("head", torch::nn::Linear(128, 4));
  }
  torch::Tensor forward(const torch::Tensor& x) { return head(torch::relu(first(x))); }
  nn::LoraLinear first{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Adapted);

}  // namespace accelerate::test
