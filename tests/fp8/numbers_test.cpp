// Numbers in 8 bits: casts, products and scales, compared with torchao and worked examples.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "core/text.h"
#include "fp8/delayed_scaling.h"
#include "fp8/scaled_product.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

using detail::fp8::DelayedScaling;
using detail::fp8::kE4m3;
using detail::fp8::kE5m2;
using detail::fp8::scale_for;
using detail::fp8::scaled;
using test::reference_path;

StateDict stored(const std::string& name) {
  return safetensors::load_file(reference_path("fp8/" + name + ".safetensors"));
}

bool same_bits(const torch::Tensor& a, const torch::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         a.reshape({-1}).view(torch::kUInt8).equal(b.reshape({-1}).view(torch::kUInt8));
}

TEST(Fp8Numbers, AWorkedExampleComesBackExactly) {
  const auto x = torch::tensor({0.5F, -2.0F, 7.0F});
  const auto scale = scale_for(detail::fp8::amax_of(x), kE4m3, false);
  EXPECT_EQ(scale.item<float>(), 64);
  const auto q = scaled(x, scale, kE4m3);
  EXPECT_TRUE(q.values.to(torch::kFloat).equal(torch::tensor({32.0F, -128.0F, 448.0F})));
  EXPECT_TRUE((q.values.to(torch::kFloat) / q.scale).equal(x));
}

TEST(Fp8Numbers, CastsHaveTheBitsOfTorchao) {
  const auto file = stored("casts");
  const auto& numbers = file["numbers"];
  for (const auto& [name, dtype] : {std::pair("e4m3", kE4m3), std::pair("e5m2", kE5m2)}) {
    const std::string format(name);
    const auto scale = scale_for(detail::fp8::amax_of(numbers), dtype, false);
    EXPECT_TRUE(same_bits(scale, file[format + ".scale"])) << format;
    EXPECT_TRUE(same_bits(scaled(numbers, scale, dtype).values.view(torch::kUInt8),
                          file[format + ".values"]))
        << format;
    for (const bool power_of_2 : {false, true}) {
      const auto rows = scale_for(detail::fp8::amax_of(numbers, 1), dtype, power_of_2);
      EXPECT_TRUE(same_bits(rows, file[format + ".rows." + std::to_string(int(power_of_2))]));
    }
  }
}

TEST(Fp8Numbers, WhatIsBeyondTheLargestNumberIsClampedAsInTorchao) {
  const auto file = stored("casts");
  const auto one = torch::ones({});
  EXPECT_TRUE(same_bits(scaled(file["numbers"], one, kE4m3).values.view(torch::kUInt8),
                        file["e4m3.unscaled"]));
  EXPECT_TRUE(same_bits(scaled(file["numbers"], one, kE5m2).values.view(torch::kUInt8),
                        file["e5m2.unscaled"]));
  EXPECT_EQ(scaled(torch::tensor({1e9F}), one, kE4m3).values.to(torch::kFloat).item<float>(), 448);
}

TEST(Fp8Numbers, OfZerosHaveAScaleToo) {
  const auto zeros = torch::zeros({4});
  const auto scale = scale_for(detail::fp8::amax_of(zeros), kE4m3, false);
  EXPECT_TRUE(scale.isfinite().item<bool>());
  EXPECT_TRUE(scaled(zeros, scale, kE4m3).values.to(torch::kFloat).equal(zeros));
}

/// One layer, one of whose tensors gets maxima.
struct OneLayer {
  explicit OneLayer(const TERecipeKwargs& kwargs) : scaling(resolved(kwargs)) {
    scaling.add_layer("layer");
    scaling.allocate(torch::kCPU);
  }
  float after(float amax) {
    scaling.record(0, DelayedScaling::kInput, torch::tensor(amax));
    scaling.update(DelayedScaling::kForward);
    return scaling.scales()[DelayedScaling::kInput].item<float>();
  }
  DelayedScaling scaling;
};

TEST(DelayedScales, AWorkedExampleFollowsTheWindow) {
  OneLayer layer({.amax_history_len = 2, .amax_compute_algo = AmaxComputeAlgorithm::kMax});
  std::vector<float> scales;
  for (const float amax : {7.0F, 14.0F, 3.5F, 3.5F}) scales.push_back(layer.after(amax));
  EXPECT_EQ(scales, (std::vector<float>{64, 32, 32, 128}));
}

TEST(DelayedScales, AreThoseOfALoopOverTheWindow) {
  const auto file = stored("delayed");
  const auto maxima = file["maxima"];
  for (const std::int64_t window : {1, 2, 4, 16}) {
    for (const std::int64_t margin : {0, 2}) {
      for (const auto algorithm : {AmaxComputeAlgorithm::kMax, AmaxComputeAlgorithm::kMostRecent}) {
        OneLayer layer(
            {.margin = margin, .amax_history_len = window, .amax_compute_algo = algorithm});
        const auto name = detail::str(window, ".", margin, ".", algorithm);
        std::vector<float> scales;
        for (std::int64_t i = 0; i < maxima.numel(); ++i) {
          scales.push_back(layer.after(maxima[i].item<float>()));
        }
        EXPECT_TRUE(torch::tensor(scales).equal(file[name])) << name;
      }
    }
  }
}

TEST(DelayedScales, AnIntervalIsTheStepsBetweenTwoComputations) {
  OneLayer layer({.interval = 2, .amax_compute_algo = AmaxComputeAlgorithm::kMostRecent});
  std::vector<float> scales;
  for (const float amax : {7.0F, 14.0F, 28.0F, 7.0F}) scales.push_back(layer.after(amax));
  EXPECT_EQ(scales, (std::vector<float>{64, 64, 16, 16}));
}

TEST(DelayedScales, HaveAnIntervalForEachPhaseThatIsResumed) {
  const TERecipeKwargs kwargs{.interval = 2,
                              .amax_compute_algo = AmaxComputeAlgorithm::kMostRecent};
  OneLayer layer(kwargs);
  layer.after(7.0F);
  layer.scaling.update(DelayedScaling::kBackward);
  OneLayer other(kwargs);
  other.scaling.load_state_dict(layer.scaling.state_dict());
  EXPECT_EQ(other.after(14.0F), 64);
  EXPECT_EQ(other.after(14.0F), 32);
  // Older files have one counter for both phases.
  OneLayer old(kwargs);
  old.scaling.load_state_dict(Value(
      Value::Dict{{"updates", Value(1)}, {"layers", layer.scaling.state_dict().at("layers")}}));
  EXPECT_EQ(old.after(14.0F), 64);
  EXPECT_EQ(old.after(14.0F), 32);
}

TEST(DelayedScales, ReturnFromTheirStateWithTheBitsThatTheyHad) {
  const TERecipeKwargs kwargs{.amax_history_len = 4,
                              .amax_compute_algo = AmaxComputeAlgorithm::kMax};
  OneLayer layer(kwargs);
  for (const float amax : {7.0F, 14.0F, 3.5F}) layer.after(amax);
  OneLayer other(kwargs);
  other.scaling.load_state_dict(layer.scaling.state_dict());
  for (const float amax : {1.0F, 2.0F, 3.0F}) EXPECT_EQ(other.after(amax), layer.after(amax));

  // A shorter window keeps the newest maxima.
  OneLayer shorter({.amax_history_len = 2, .amax_compute_algo = AmaxComputeAlgorithm::kMax});
  shorter.scaling.load_state_dict(layer.scaling.state_dict());
  EXPECT_EQ(shorter.after(1.0F), 448.0F / 3);
}

/// A layer of torchao and what it computed.
struct Case {
  torch::Tensor x, weight, bias, gradient, result, x_gradient, weight_gradient, bias_gradient;
};

Case case_of(const StateDict& file, const std::string& name) {
  const auto at = [&](const char* key) { return file[name + "." + key]; };
  return {at("x"),          at("weight"),          at("bias"),         at("gradient"), at("result"),
          at("x_gradient"), at("weight_gradient"), at("bias_gradient")};
}

struct PairImpl : torch::nn::Module {
  PairImpl() : layer(register_module("layer", nn::Linear(32, 16))) {}
  nn::Linear layer;
};
TORCH_MODULE(Pair);

/// Products of the same operands: processors add in another order. float32 differs by a millionth
/// of the largest number in the row, bfloat16 by its last bit besides.
bool is_product(const torch::Tensor& a, const torch::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const auto expected = b.to(torch::kDouble);
  const double last_bit = b.scalar_type() == torch::kBFloat16 ? 0x1p-7 : 0;
  const auto allowed = expected.abs() * last_bit + 1e-6 * expected.abs().amax(-1, true);
  return ((a.to(torch::kDouble) - expected).abs() <= allowed).all().item<bool>();
}

TEST(Fp8Layers, ComputeLikeTorchaoForwardAndBackward) {
  torch::set_num_threads(1);
  const auto file = stored("layers");
  for (const std::string recipe :
       {"tensorwise", "rowwise", "rowwise_with_gw_hp", "tensorwise_power_of_2"}) {
    for (const std::string kind : {"float32", "bfloat16", "three_dimensions"}) {
      const auto name = recipe + "." + kind;
      const auto one = case_of(file, name);
      Pair net;
      {
        const torch::NoGradGuard no_grad;
        net->layer->weight.copy_(one.weight);
        net->layer->bias.copy_(one.bias);
      }
      Float8LinearConfig config{.recipe = recipe};
      if (recipe == "tensorwise_power_of_2") {
        config = {.recipe = "tensorwise", .round_scales_to_power_of_2 = true};
      }
      convert_model_to_fp8_ao(*net, config, [](const auto&, const auto&) { return true; });
      const auto x = one.x.clone().requires_grad_();
      const auto result = net->layer(x);
      EXPECT_TRUE(is_product(result, one.result)) << name;
      result.backward(one.gradient);
      EXPECT_TRUE(is_product(x.grad(), one.x_gradient)) << name;
      EXPECT_TRUE(is_product(net->layer->weight.grad(), one.weight_gradient)) << name;
      EXPECT_TRUE(torch::allclose(net->layer->bias.grad(), one.bias_gradient, 1e-2)) << name;
    }
  }
}

}  // namespace
}  // namespace accelerate
