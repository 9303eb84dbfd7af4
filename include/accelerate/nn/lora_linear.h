// accelerate/nn/lora_linear.h - low-rank adapters: train little beside weights that do not change.
//
//     struct BlockImpl : torch::nn::Module {
//       BlockImpl() { up = register_module("up", accelerate::nn::LoraLinear(64, 256)); }
//       ...
//     };
//     auto parameters = accelerate::nn::mark_only_lora_as_trainable(*net);
//     torch::optim::AdamW optimizer(parameters, 1e-3);
//     accelerate::save(accelerate::nn::lora_state_dict(*net), "adapters.safetensors", ...);
//
// Part of accelerate/nn.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/state_dict.h"

namespace accelerate::nn {

/// By the words of PEFT.
struct LoraOptions {
  /// The rank of the adapter.
  std::int64_t r = 8;
  /// The adapter is multiplied by lora_alpha / r.
  double lora_alpha = 16;
  /// For the input of the adapter.
  double lora_dropout = 0;
  bool bias = true;

  bool operator==(const LoraOptions&) const = default;
};

/// The tensor of an adapter, "lora_A.weight" and "lora_B.weight" in state dictionaries as in PEFT.
/// It is no Linear layer: it is not quantized.
struct ACCELERATE_API LoraFactorImpl : torch::nn::Module {
  LoraFactorImpl(std::int64_t rows, std::int64_t columns);
  at::Tensor weight;
};
TORCH_MODULE(LoraFactor);

/// A `torch::nn::Linear` with an adapter: W x + b + (lora_alpha / r) B A x. The weight has the name
/// that it has in a plain layer, so that files of a model without adapters fit; it may be
/// quantized. Weight and bias need no gradients. The adapter begins as zero; it is float32, also
/// where `load_and_quantize_model` makes other parameters `torch_dtype`.
class ACCELERATE_API LoraLinearImpl : public torch::nn::LinearImpl {
 public:
  /// Throws `ArgumentError` for a rank below 1 and a dropout outside of [0, 1).
  LoraLinearImpl(std::int64_t in_features, std::int64_t out_features,
                 const LoraOptions& options = {});
  ~LoraLinearImpl() override;

  [[nodiscard]] at::Tensor forward(const at::Tensor& input);
  /// The adapter becomes zero again: A random, B zero. On the CPU if it was on the meta device.
  void reset_adapter();
  /// A weight in few bits becomes an ordinary one.
  [[nodiscard]] std::shared_ptr<torch::nn::Module> clone(
      const std::optional<c10::Device>& device = std::nullopt) const override;

  LoraFactor lora_A{nullptr};
  LoraFactor lora_B{nullptr};

 private:
  void find_factors();

  LoraOptions lora_;
};
TORCH_MODULE(LoraLinear);

/// The parameters of all adapters below `model` need gradients, no other parameter does. Returns
/// them, for an optimizer. Adapters on the meta device are reset: call it before
/// `load_and_quantize_model` for a model of `init_empty_weights`. Throws `ArgumentError` if the
/// model has no adapter.
ACCELERATE_API std::vector<at::Tensor> mark_only_lora_as_trainable(torch::nn::Module& model);

/// The adapters alone, by their names in the model; `load_state_dict` takes them with
/// `strict = false`.
[[nodiscard]] ACCELERATE_API StateDict lora_state_dict(const torch::nn::Module& model);

}  // namespace accelerate::nn
