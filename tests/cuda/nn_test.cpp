// Modules of nn.h on a GPU: errors of the kernels against float64, beside those of LibTorch's
// operators in the same dtype.
#include <accelerate/accelerate.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace accelerate {
namespace {

using torch::Tensor;
using Tensors = std::vector<Tensor>;
using Function = std::function<Tensor(const Tensors&)>;

#ifndef ACCELERATE_NN_TEST_DEVICE
#define ACCELERATE_NN_TEST_DEVICE at::kCUDA
#endif
constexpr auto kDevice = ACCELERATE_NN_TEST_DEVICE;

bool device_is_here() { return kDevice != at::kCUDA || torch::cuda::is_available(); }

/// Widths with and without loads of eight elements.
const std::vector<std::int64_t> kWidths = {8, 33, 768, 1001, 4096, 16392};
const std::vector<at::ScalarType> kDtypes = {at::kFloat, at::kBFloat16, at::kHalf};

/// The result of `f` and the gradients of its inputs, as float64 on the CPU.
Tensors outcome(const Function& f, const Tensors& inputs) {
  Tensors leaves;
  for (const auto& input : inputs) leaves.push_back(input.detach().clone().requires_grad_());
  const auto result = f(leaves);
  torch::manual_seed(17);
  const auto seed = torch::randn(result.sizes(), at::kFloat).to(result.device());
  auto all = torch::autograd::grad({result}, leaves, {seed.to(result.scalar_type())},
                                   /*retain_graph=*/false, /*create_graph=*/false,
                                   /*allow_unused=*/true);
  all.insert(all.begin(), result);
  for (auto& tensor : all) {
    if (tensor.defined()) tensor = tensor.detach().to(at::kDouble).cpu();
  }
  return all;
}

Tensors as_double(const Tensors& inputs) {
  Tensors result;
  for (const auto& input : inputs) result.push_back(input.to(at::kDouble));
  return result;
}

double error_of(const Tensor& found, const Tensor& exact) {
  return ((found - exact).norm() / (exact.norm() + 1e-30)).item<double>();
}

/// `ours` is at most 1.5 times as far from `exact`, computed in float64, as `theirs`; below `floor`
/// all errors are alike.
void expect_as_exact(const Function& ours, const Function& theirs, const Function& exact,
                     const Tensors& inputs) {
  const auto found = outcome(ours, inputs);
  const auto torchs = outcome(theirs, inputs);
  const auto wanted = outcome(exact, as_double(inputs));
  constexpr double kFloor = 3e-7;
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(found[i].defined(), wanted[i].defined()) << i;
    if (!found[i].defined()) continue;
    const auto error = error_of(found[i], wanted[i]);
    EXPECT_LE(error, std::max(kFloor, 1.5 * error_of(torchs[i], wanted[i])))
        << (i == 0 ? "the result" : "the gradient of input " + std::to_string(i - 1));
  }
}

Tensor random_tensor(std::vector<std::int64_t> sizes, at::ScalarType dtype) {
  return torch::randn(sizes, at::kFloat).to(dtype).to(kDevice);
}

TEST(CudaNn, NormsOfSumsAreAsExactAsLibTorchs) {
  if (!device_is_here()) GTEST_SKIP() << "no GPU";
  for (const bool is_rms : {false, true}) {
    for (const auto dtype : kDtypes) {
      for (const auto width : kWidths) {
        SCOPED_TRACE(torch::str(is_rms ? "RMS " : "layer ", dtype, " ", width));
        torch::manual_seed(1);
        nn::LayerNorm layer(torch::nn::LayerNormOptions({width}));
        nn::RMSNorm rms(width, 1e-5);
        const Function ours = [&](const Tensors& in) {
          if (is_rms) {
            rms->weight = in[2];
            const auto [y, sum] = rms->forward_add(in[0], in[1]);
            return y + 0.5 * sum;
          }
          layer->weight = in[2];
          layer->bias = in[3];
          const auto [y, sum] = layer->forward_add(in[0], in[1]);
          return y + 0.5 * sum;
        };
        const Function theirs = [&](const Tensors& in) {
          const auto sum = in[0] + in[1];
          const auto y = is_rms ? torch::rms_norm(sum, {width}, in[2], 1e-5)
                                : torch::layer_norm(sum, {width}, in[2], in[3], 1e-5);
          return y + 0.5 * sum;
        };
        expect_as_exact(ours, theirs, theirs,
                        {random_tensor({37, width}, dtype), random_tensor({37, width}, dtype),
                         random_tensor({width}, dtype), random_tensor({width}, dtype)});
      }
    }
  }
}

TEST(CudaNn, LinearWithActivationIsAsExactAsLibTorchs) {
  if (!device_is_here()) GTEST_SKIP() << "no GPU";
  for (const auto activation : {nn::Activation::kRelu, nn::Activation::kGelu,
                                nn::Activation::kGeluTanh, nn::Activation::kSilu}) {
    for (const auto dtype : kDtypes) {
      for (const std::int64_t width : {24, 33, 1024}) {
        SCOPED_TRACE(torch::str(static_cast<int>(activation), " ", dtype, " ", width));
        torch::manual_seed(2);
        nn::Linear layer(16, width, activation);
        const Function ours = [&](const Tensors& in) {
          layer->weight = in[1];
          layer->bias = in[2];
          return layer(in[0]);
        };
        const Function theirs = [&](const Tensors& in) {
          const auto x = torch::linear(in[0], in[1], in[2]);
          if (activation == nn::Activation::kRelu) return torch::relu(x);
          if (activation == nn::Activation::kSilu) return torch::silu(x);
          return torch::gelu(x, activation == nn::Activation::kGelu ? "none" : "tanh");
        };
        expect_as_exact(ours, theirs, theirs,
                        {random_tensor({3, 50, 16}, dtype),
                         random_tensor({width, 16}, dtype) * 0.25, random_tensor({width}, dtype)});
      }
    }
  }
}

TEST(CudaNn, CrossEntropyIsAsExactAsLibTorchs) {
  if (!device_is_here()) GTEST_SKIP() << "no GPU";
  for (const auto dtype : kDtypes) {
    for (const std::int64_t classes : {5, 1000, 50257}) {
      for (const double smoothing : {0.0, 0.1}) {
        for (const bool each : {false, true}) {
          SCOPED_TRACE(torch::str(dtype, " ", classes, " ", smoothing, " ", each));
          torch::manual_seed(3);
          auto target = torch::randint(classes, {19}, at::kLong);
          target[4] = -100;
          target = target.to(kDevice);
          auto options = nn::CrossEntropyOptions().label_smoothing(smoothing);
          if (each) options.reduction(torch::kNone);
          const Function ours = [&](const Tensors& in) {
            return nn::cross_entropy(in[0], target, options);
          };
          const Function theirs = [&](const Tensors& in) {
            return torch::nn::functional::cross_entropy(in[0], target, options);
          };
          expect_as_exact(ours, theirs, theirs, {random_tensor({19, classes}, dtype) * 3});
        }
      }
    }
  }
}

TEST(CudaNn, CrossEntropyWritesTheGradientOverLogitsOfAModel) {
  if (!device_is_here()) GTEST_SKIP() << "no GPU";
  torch::manual_seed(4);
  const auto x = random_tensor({2, 9, 16}, at::kBFloat16),
             weight = random_tensor({1003, 16}, at::kBFloat16);
  const auto target = torch::randint(1003, {18}, at::kLong).to(kDevice);
  const Function ours = [&](const Tensors& in) {
    return nn::cross_entropy(torch::linear(in[0], in[1]).flatten(0, 1), target);
  };
  const Function theirs = [&](const Tensors& in) {
    return torch::nn::functional::cross_entropy(torch::linear(in[0], in[1]).flatten(0, 1), target);
  };
  expect_as_exact(ours, theirs, theirs, {x, weight});
}

TEST(CudaNn, SwiGluAndAttentionAreAsExactAsLibTorchs) {
  if (!device_is_here()) GTEST_SKIP() << "no GPU";
  for (const auto dtype : kDtypes) {
    for (const std::int64_t width : {24, 33}) {
      SCOPED_TRACE(torch::str(dtype, " ", width));
      torch::manual_seed(5);
      nn::SwiGLU mlp(16, width);
      const Function ours = [&](const Tensors& in) {
        mlp->gate_proj->weight = in[1];
        mlp->up_proj->weight = in[2];
        mlp->down_proj->weight = in[3];
        return mlp(in[0]);
      };
      const Function theirs = [](const Tensors& in) {
        return torch::linear(torch::silu(torch::linear(in[0], in[1])) * torch::linear(in[0], in[2]),
                             in[3]);
      };
      expect_as_exact(
          ours, theirs, theirs,
          {random_tensor({50, 16}, dtype), random_tensor({width, 16}, dtype) * 0.25,
           random_tensor({width, 16}, dtype) * 0.25, random_tensor({16, width}, dtype) * 0.25});
    }
    nn::RotaryEmbedding rotary(nn::RotaryEmbeddingOptions{.dim = 32, .max_positions = 64});
    const auto positions = torch::randint(64, {2, 7}, at::kLong).to(kDevice);
    const Function rotated = [&](const Tensors& in) {
      const auto [q, k] = rotary(in[0].transpose(1, 2), in[1].transpose(1, 2), positions);
      return torch::cat({q, k}, 1);
    };
    const Function rounded = [&](const Tensors& in) {
      return rotated(as_double(in)).to(in[0].scalar_type());
    };
    expect_as_exact(rotated, rounded, rotated,
                    {random_tensor({2, 7, 4, 32}, dtype), random_tensor({2, 7, 2, 32}, dtype)});
  }
}

TEST(CudaNn, NormsUnderAutocastKeepFloat32ParametersAndStatistics) {
  if (!device_is_here()) GTEST_SKIP() << "no GPU";
  torch::manual_seed(6);
  nn::LayerNorm layer(torch::nn::LayerNormOptions({768}));
  const Function ours = [&](const Tensors& in) {
    const AutocastScope scope(kDevice, at::kBFloat16);
    layer->weight = in[2];
    layer->bias = in[3];
    const auto [y, sum] = layer->forward_add(in[0], in[1]);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    EXPECT_EQ(sum.scalar_type(), at::kFloat) << "of bfloat16 and float32";
    return y;
  };
  const Function theirs = [](const Tensors& in) {
    return torch::layer_norm((in[0] + in[1]), {768}, in[2], in[3]).to(at::kBFloat16);
  };
  const Function exact = [](const Tensors& in) {
    return torch::layer_norm(in[0] + in[1], {768}, in[2], in[3]);
  };
  expect_as_exact(ours, theirs, exact,
                  {random_tensor({64, 768}, at::kBFloat16), random_tensor({64, 768}, at::kFloat),
                   random_tensor({768}, at::kFloat), random_tensor({768}, at::kFloat)});
}

TEST(CudaNn, SecondDerivativesAreThoseOfTheOperators) {
  if (!device_is_here()) GTEST_SKIP() << "no GPU";
  torch::manual_seed(7);
  const auto x = random_tensor({5, 33}, at::kFloat).requires_grad_();
  nn::LayerNorm layer(torch::nn::LayerNormOptions({33}));
  layer->to(kDevice);
  const auto second = [&](const Tensor& y) {
    const auto first = torch::autograd::grad({y.pow(3).sum()}, {x}, {}, true, true)[0];
    return torch::autograd::grad({first.sin().sum()}, {x})[0];
  };
  const auto expected = second(torch::layer_norm(x, {33}, layer->weight, layer->bias));
  EXPECT_TRUE(torch::allclose(second(layer(x)), expected, 1e-3, 1e-4));
}

TEST(CudaNn, SecondDerivativesHaveTheCurvatureOfTheBias) {
  if (!device_is_here()) GTEST_SKIP() << "no GPU";
  for (const auto activation : {nn::Activation::kGelu, nn::Activation::kSilu}) {
    torch::manual_seed(10);
    nn::Linear layer(16, 33, activation);
    layer->to(kDevice);
    const auto x = random_tensor({5, 16}, at::kFloat).requires_grad_();
    const auto second = [&](const Tensor& y) {
      const auto first = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];
      return torch::autograd::grad({first.pow(2).sum()}, {layer->weight, layer->bias});
    };
    const auto sums = torch::linear(x, layer->weight, layer->bias);
    const auto expected =
        second(activation == nn::Activation::kGelu ? torch::gelu(sums) : torch::silu(sums));
    const auto found = second(layer(x));
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(torch::allclose(found[i], expected[i], 1e-3, 1e-4)) << i;
    }
  }
}

TEST(CudaNn, RotationsTakePositionsOfTheCpu) {
  if (!device_is_here()) GTEST_SKIP() << "no GPU";
  nn::RotaryEmbedding rotary(nn::RotaryEmbeddingOptions{.dim = 32, .max_positions = 64});
  const auto q = random_tensor({2, 4, 7, 32}, at::kFloat);
  const auto positions = torch::randint(64, {7}, at::kLong);
  const auto expected = rotary(q, q, positions.to(kDevice)), found = rotary(q, q, positions);
  EXPECT_TRUE(torch::equal(found.first, expected.first));
  EXPECT_TRUE(torch::equal(found.second, expected.second));
}

struct DecoderBlockImpl : torch::nn::Module {
  explicit DecoderBlockImpl(std::int64_t width) {
    norm1 = register_module("norm1", nn::RMSNorm(width, 1e-6));
    attend = register_module(
        "attend",
        nn::CausalSelfAttention(nn::CausalSelfAttentionOptions{
            .embed_dim = width, .num_heads = 4, .num_kv_heads = 2, .rotary_base = 10000}));
    norm2 = register_module("norm2", nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up = register_module("up", nn::Linear(width, 4 * width, nn::Activation::kGeluTanh));
    down = register_module("down", nn::Linear(4 * width, width));
    mlp = register_module("mlp", nn::SwiGLU(width, 2 * width));
  }
  Tensor forward(const Tensor& x) {
    const auto [y, sum] = norm2->forward_add(attend(norm1(x)), x);
    return sum + down(up(y)) + mlp(y);
  }
  nn::RMSNorm norm1{nullptr};
  nn::CausalSelfAttention attend{nullptr};
  nn::LayerNorm norm2{nullptr};
  nn::Linear up{nullptr}, down{nullptr};
  nn::SwiGLU mlp{nullptr};
};
TORCH_MODULE(DecoderBlock);

struct DecoderImpl : torch::nn::Module {
  DecoderImpl() {
    tokens = register_module("tokens", torch::nn::Embedding(100, 128));
    block = register_module("block", DecoderBlock(128));
    head = register_module("head", nn::Linear(128, 100));
  }
  Tensor forward(const Tensor& ids) {
    const auto logits = head(block(tokens(ids.slice(1, 0, -1))));
    return nn::cross_entropy(logits.flatten(0, 1), ids.slice(1, 1).flatten().contiguous());
  }
  torch::nn::Embedding tokens{nullptr};
  DecoderBlock block{nullptr};
  nn::Linear head{nullptr};
};
TORCH_MODULE(Decoder);

std::vector<double> losses_of(PrecisionType precision, bool captured) {
  AcceleratorState::_reset_state(/*reset_partial_state=*/true);
  GradientState::_reset_state();
  Accelerator accelerator({.mixed_precision = precision});
  torch::manual_seed(8);
  Decoder decoder;
  // A recorded step has the learning rate as a float32 tensor: let the eager one have it too.
  auto adamw = AdamW(decoder->parameters(), {.lr = 3e-3, .capturable = !captured});
  const auto ids = torch::randint(100, {160, 33}, at::kLong);
  auto data = make_data_loader(std::pair{ids, ids}, {.batch_size = 4});
  auto [model, optimizer, loader] = accelerator.prepare(decoder, std::move(adamw), std::move(data));
  using Batch = std::pair<Tensor, Tensor>;
  const auto body = [&, &model = model, &optimizer = optimizer](Batch& batch) {
    const auto loss = model(batch.first);
    accelerator.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    return loss;
  };
  auto step = accelerator.capture(body);
  std::vector<double> losses;
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (auto& batch : loader) {
      losses.push_back((captured ? step(batch) : body(batch)).template item<double>());
    }
  }
  return losses;
}

TEST(CudaNn, CapturedStepsHaveTheLossesOfEagerOnes) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  for (const auto precision : {PrecisionType::kNo, PrecisionType::kBf16, PrecisionType::kFp16}) {
    const auto expected = losses_of(precision, /*captured=*/false);
    const auto found = losses_of(precision, /*captured=*/true);
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_NEAR(found[i], expected[i], 1e-6 * expected[i]) << to_string(precision) << " " << i;
    }
    EXPECT_LT(expected.back(), expected.front());
  }
}

TEST(CudaNn, EagerStepsRepeatBitForBit) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  torch::manual_seed(9);
  DecoderBlock block(128);
  block->to(at::kCUDA);
  const auto x = random_tensor({4, 32, 128}, at::kFloat);
  const auto run = [&] {
    block->zero_grad();
    block->norm2->forward_add(x, block->up(x).slice(-1, 0, 128)).first.sin().sum().backward();
    return Tensors{block->norm2->weight.grad().clone(), block->norm2->bias.grad().clone(),
                   block->up->bias.grad().clone()};
  };
  const auto first = run(), second = run();
  for (std::size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(torch::equal(first[i], second[i]));
}

}  // namespace
}  // namespace accelerate
