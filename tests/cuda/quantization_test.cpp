// Weights in few bits on a GPU: the codes of the CPU, and products with them.
#include <accelerate/accelerate.h>
#include <accelerate/quantization.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/on_gpu.h"
#include "support/command.h"
#include "support/has.h"
#include "support/message_of.h"
#include "support/on_processes.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

using test::has;
using test::message_of;
using test::on_gpu;

class CudaQuantization : public testing::Test {
 protected:
  void SetUp() override {
    if (!is_cuda_available()) GTEST_SKIP() << "no GPU can be used here";
    torch::manual_seed(1);
  }
  torch::NoGradGuard no_grad_;
};

const std::vector<torch::Dtype>& dtypes() {
  static const std::vector<torch::Dtype> all{torch::kFloat, torch::kHalf, torch::kBFloat16};
  return all;
}

/// Of the bytes, so that -0 is not 0.
testing::AssertionResult same(const torch::Tensor& on_gpu, const torch::Tensor& on_cpu) {
  if (!on_gpu.is_cuda()) return testing::AssertionFailure() << "the result is not on the GPU";
  const auto bytes = [](const torch::Tensor& tensor) {
    return tensor.cpu().contiguous().flatten().view(torch::kByte);
  };
  if (on_gpu.scalar_type() != on_cpu.scalar_type() || on_gpu.sizes() != on_cpu.sizes()) {
    return testing::AssertionFailure() << "shapes or dtypes differ";
  }
  if (on_cpu.numel() == 0 || torch::equal(bytes(on_gpu), bytes(on_cpu))) {
    return testing::AssertionSuccess();
  }
  const auto differ = bytes(on_gpu).ne(bytes(on_cpu)).nonzero();
  return testing::AssertionFailure()
         << differ.size(0) << " of " << on_cpu.nbytes() << " bytes differ, the first is byte "
         << differ[0].item<std::int64_t>();
}

quant::QuantState on_cpu(quant::QuantState state) {
  state.absmax = state.absmax.cpu();
  state.code = state.code.cpu();
  if (state.nested())
    state.state2 = std::make_shared<const quant::QuantState>(on_cpu(*state.state2));
  return state;
}

/// Of a weight.
struct Shape {
  std::int64_t outputs;
  std::int64_t inputs;
};

/// |found - expected| over |expected|.
double share_of_error(const torch::Tensor& found, const torch::Tensor& expected) {
  const auto exact = expected.to(torch::kDouble);
  return ((found.cpu().to(torch::kDouble) - exact).norm() / exact.norm()).item<double>();
}

// -- codes ----------------------------------------------------------------------------------------

void expect_the_codes_of_the_cpu(const torch::Tensor& values,
                                 const quant::Quantize4bitOptions& options) {
  const auto [packed, state] = quant::quantize_4bit(values, options);
  const auto [on_gpu_packed, on_gpu_state] = quant::quantize_4bit(values.cuda(), options);
  EXPECT_TRUE(same(on_gpu_packed, packed));
  EXPECT_TRUE(same(on_gpu_state.absmax, state.absmax));
  if (state.nested()) {
    EXPECT_EQ(*on_gpu_state.offset, *state.offset);
    EXPECT_TRUE(same(on_gpu_state.state2->absmax, state.state2->absmax));
  }
  for (const auto dtype : dtypes()) {
    auto from = on_gpu_state;
    from.dtype = dtype;
    EXPECT_TRUE(same(quant::dequantize_4bit(on_gpu_packed, from),
                     quant::dequantize_4bit(packed, on_cpu(from))))
        << dtype;
  }
}

TEST_F(CudaQuantization, FourBitCodesAndValuesHaveTheBytesOfTheCpu) {
  const std::vector<std::vector<std::int64_t>> shapes{{1},      {7},       {64},        {65},
                                                      {3, 333}, {16, 512}, {257, 1024}, {5, 9999}};
  for (const std::string type : {"nf4", "fp4"}) {
    for (const bool twice : {false, true}) {
      for (const std::int64_t blocksize : {32, 64, 256, 4096}) {
        for (std::size_t i = 0; i < shapes.size(); ++i) {
          SCOPED_TRACE(testing::Message() << type << twice << blocksize << " shape " << i);
          auto values = torch::randn(shapes[i]).to(dtypes()[i % 3]);
          if (i == 5) values.narrow(0, 3, 2).zero_();
          expect_the_codes_of_the_cpu(
              values, {.blocksize = blocksize, .compress_statistics = twice, .quant_type = type});
        }
      }
    }
  }
}

TEST_F(CudaQuantization, RowsInEightBitsHaveTheBytesOfTheCpu) {
  for (const Shape& shape : {Shape{1, 33}, Shape{5, 4096}, Shape{16, 100}, Shape{40, 1000}}) {
    for (const auto dtype : dtypes()) {
      for (const double threshold : {0.0, 2.0}) {
        SCOPED_TRACE(testing::Message()
                     << shape.outputs << "x" << shape.inputs << dtype << threshold);
        auto values = torch::randn({shape.outputs, shape.inputs}).to(dtype);
        if (shape.outputs > 1) values[1].zero_();
        const auto expected = quant::int8_vectorwise_quant(values, threshold);
        const auto found = quant::int8_vectorwise_quant(values.cuda(), threshold);
        EXPECT_TRUE(same(found.CB, expected.CB));
        EXPECT_TRUE(same(found.SCB, expected.SCB));
        EXPECT_EQ(found.outlier_columns.defined(), threshold > 0);
        if (threshold > 0) {
          EXPECT_TRUE(same(found.outlier_columns, expected.outlier_columns));
        }
        EXPECT_TRUE(
            same(quant::int8_vectorwise_dequant(found), quant::int8_vectorwise_dequant(expected)));
      }
    }
  }
}

TEST_F(CudaQuantization, RefusesValuesWithoutACode) {
  for (const float value : {INFINITY, -INFINITY, NAN}) {
    auto values = torch::randn({20, 100}, torch::kCUDA);
    values[19][99] = value;
    EXPECT_TRUE(
        has(message_of<ArgumentError>([&] { static_cast<void>(quant::quantize_4bit(values)); }),
            "infinite or NaN"));
    EXPECT_TRUE(has(
        message_of<ArgumentError>([&] { static_cast<void>(quant::int8_vectorwise_quant(values)); }),
        "infinite or NaN"));
  }
}

TEST_F(CudaQuantization, TakesCodesAtAnyAddress) {
  const auto [packed, state] = quant::quantize_4bit(torch::randn({48, 128}), {.quant_type = "nf4"});
  const auto moved =
      torch::cat({torch::zeros({1, 1}, torch::kByte), packed}).cuda().narrow(0, 1, 3072);
  auto there = state;
  there.absmax = state.absmax.cuda();
  there.code = state.code.cuda();
  EXPECT_TRUE(same(quant::dequantize_4bit(moved, there), quant::dequantize_4bit(packed, state)));
  const auto x = torch::randn({2, 128}).to(torch::kBFloat16);
  EXPECT_LT(share_of_error(quant::linear_4bit(x.cuda(), moved, there),
                           quant::linear_4bit(x, packed, state)),
            5e-3);
}

// -- products -------------------------------------------------------------------------------------

/// The product in float64 with the exact values of the weight. Errors are those of weights and
/// results rounded to the dtype: 2^-9 at most each for bfloat16, 2^-12 for float16.
void expect_products_4bit(const Shape& shape, const quant::Quantize4bitOptions& options) {
  const auto [packed, state] =
      quant::quantize_4bit(torch::randn({shape.outputs, shape.inputs}, torch::kCUDA), options);
  const auto values = quant::dequantize_4bit(packed, state).cpu().to(torch::kDouble);
  for (const auto dtype : dtypes()) {
    const double tolerance = dtype == torch::kFloat ? 1e-5 : dtype == torch::kHalf ? 1e-3 : 6e-3;
    for (const std::int64_t rows : {1, 2, 3, 4, 5, 8, 9, 16, 17, 200}) {
      SCOPED_TRACE(testing::Message() << rows << " rows of " << dtype);
      const auto x = torch::randn({rows, shape.inputs}).to(dtype);
      const auto bias = torch::randn({shape.outputs}).to(dtype);
      const auto exact = torch::linear(x.to(torch::kDouble), values, bias.to(torch::kDouble));
      const auto y = quant::linear_4bit(x.cuda(), packed, state, bias.cuda());
      ASSERT_EQ(y.scalar_type(), dtype);
      EXPECT_LT(share_of_error(y, exact), tolerance);
      const auto far = (y.cpu().to(torch::kDouble) - exact).abs().max() / exact.abs().max();
      EXPECT_LT(far.item<double>(), 5 * tolerance);
      const auto plain = quant::linear_4bit(x.cuda(), packed, state);
      EXPECT_LT(share_of_error(plain, exact - bias.to(torch::kDouble)), tolerance);
      EXPECT_TRUE(torch::equal(quant::linear_4bit(x.cuda(), packed, state), plain));
    }
  }
}

TEST_F(CudaQuantization, ProductsWithFourBitsAreThoseWithTheValues) {
  // Of the last, shared memory does not hold several inputs.
  const std::vector<Shape> shapes{{48, 128},    {33, 640},    {7, 64},
                                  {1000, 4096}, {130, 11008}, {40, 32768}};
  for (const auto& shape : shapes) {
    for (const bool twice : {false, true}) {
      SCOPED_TRACE(testing::Message() << shape.outputs << "x" << shape.inputs << twice);
      expect_products_4bit(shape, {.compress_statistics = twice, .quant_type = "nf4"});
    }
  }
  expect_products_4bit({4096, 512}, {.quant_type = "fp4"});
  expect_products_4bit({100, 512}, {.blocksize = 256, .quant_type = "nf4"});
}

TEST_F(CudaQuantization, ShapesThatNoKernelTakesAreMultipliedByLibTorch) {
  expect_products_4bit({50, 96}, {.quant_type = "nf4"});
  expect_products_4bit({50, 33}, {.quant_type = "nf4"});
  expect_products_4bit({64, 64}, {.blocksize = 32, .quant_type = "nf4"});
}

TEST_F(CudaQuantization, WeightsLargerThanTheMemoryForExpandingAreMultipliedInParts) {
  // 300 MB in float32.
  const auto [packed, state] =
      quant::quantize_4bit(torch::randn({9000, 8192}, torch::kCUDA), {.quant_type = "nf4"});
  const auto x = torch::randn({20, 8192}, torch::kCUDA);
  const auto bias = torch::randn({9000}, torch::kCUDA);
  const auto values = quant::dequantize_4bit(packed, state);
  EXPECT_TRUE(torch::allclose(quant::linear_4bit(x, packed, state, bias),
                              torch::linear(x, values, bias), 1e-4, 1e-3));
}

TEST_F(CudaQuantization, InputsGetGradients) {
  const torch::AutoGradMode with_gradients(true);
  const auto [packed, state] =
      quant::quantize_4bit(torch::randn({48, 128}, torch::kCUDA), {.quant_type = "nf4"});
  const auto int8 = quant::int8_vectorwise_quant(torch::randn({48, 128}, torch::kCUDA));
  const auto g = torch::randn({3, 48}, torch::kCUDA).to(torch::kBFloat16);
  const auto gradient = [&](const auto& product) {
    const auto x = torch::randn({3, 128}, torch::kCUDA).to(torch::kBFloat16).requires_grad_();
    (product(x) * g).sum().backward();
    return x.grad();
  };
  const auto expected = [&](const torch::Tensor& values) {
    return g.cpu().to(torch::kDouble).matmul(values.cpu().to(torch::kDouble));
  };
  EXPECT_LT(
      share_of_error(gradient([&](const auto& x) { return quant::linear_4bit(x, packed, state); }),
                     expected(quant::dequantize_4bit(packed, state))),
      5e-3);
  EXPECT_LT(share_of_error(gradient([&](const auto& x) { return quant::int8_linear(x, int8); }),
                           expected(quant::int8_vectorwise_dequant(int8))),
            5e-3);
}

quant::Int8Weight on_cpu(const quant::Int8Weight& weight) {
  return {.CB = weight.CB.cpu(), .SCB = weight.SCB.cpu()};
}

/// nullopt, in the dtype of the input, or in float16, which is added before the result is rounded.
std::vector<std::optional<torch::Tensor>> biases(std::int64_t outputs, torch::Dtype dtype) {
  const auto bias = torch::randn({outputs});
  return {std::nullopt, bias.to(dtype), bias.to(torch::kHalf)};
}

TEST_F(CudaQuantization, ProductsWithEightBitsHaveTheBytesOfTheCpu) {
  // The second is one that at::_int_mm does not take, the third has less than a whole step.
  for (const Shape& shape : {Shape{40, 1024}, Shape{37, 208}, Shape{24, 16}, Shape{1000, 4096}}) {
    const auto weight = quant::int8_vectorwise_quant(torch::randn({shape.outputs, shape.inputs}));
    const quant::Int8Weight there{.CB = weight.CB.cuda(), .SCB = weight.SCB.cuda()};
    for (const auto dtype : dtypes()) {
      for (const std::int64_t rows : {1, 3, 8, 9, 16, 17, 50}) {
        const auto x = torch::randn({rows, shape.inputs}).to(dtype);
        for (const auto& bias : biases(shape.outputs, dtype)) {
          const auto moved = bias ? std::optional(bias->cuda()) : std::nullopt;
          EXPECT_TRUE(
              same(quant::int8_linear(x.cuda(), there, moved), quant::int8_linear(x, weight, bias)))
              << rows << dtype << shape.outputs << "x" << shape.inputs;
        }
      }
    }
  }
}

TEST_F(CudaQuantization, ColumnsWithOutliersAreComputedInTheDtypeOfTheInput) {
  for (const Shape& shape : {Shape{40, 1024}, Shape{37, 208}, Shape{50, 33}}) {
    const auto weight =
        quant::int8_vectorwise_quant(torch::randn({shape.outputs, shape.inputs}, torch::kCUDA));
    for (const auto dtype : dtypes()) {
      const double tolerance = dtype == torch::kBFloat16 ? 8e-3 : 1e-3;
      for (const std::int64_t rows : {1, 8, 16, 17, 200}) {
        SCOPED_TRACE(testing::Message() << rows << dtype << shape.inputs);
        auto x = torch::randn({rows, shape.inputs});
        x.select(1, 3).mul_(20);
        x[0][shape.inputs - 1] = -9;
        x = x.to(dtype);
        const auto bias = torch::randn({shape.outputs}).to(dtype);
        const auto y = quant::int8_linear(x.cuda(), weight, bias.cuda(), 6);
        EXPECT_LT(share_of_error(y, quant::int8_linear(x, on_cpu(weight), bias, 6)), tolerance);
        // Columns of outliers are not rounded to 8 bits: the error is that of the others.
        const auto exact = torch::linear(
            x.to(torch::kDouble), quant::int8_vectorwise_dequant(weight).cpu().to(torch::kDouble),
            bias.to(torch::kDouble));
        EXPECT_LT(share_of_error(y, exact), 0.02);
      }
    }
  }
}

TEST_F(CudaQuantization, ARowThatIsNotFiniteGivesARowThatIsNot) {
  const auto weight = quant::int8_vectorwise_quant(torch::randn({40, 128}, torch::kCUDA));
  for (const std::int64_t rows : {2, 20}) {
    auto x = torch::randn({rows, 128}, torch::kCUDA);
    const auto expected = quant::int8_linear(x, weight);
    x[1][7] = NAN;
    const auto y = quant::int8_linear(x, weight);
    EXPECT_TRUE(y[1].isnan().all().item<bool>());
    EXPECT_TRUE(torch::equal(y[0], expected[0]));
  }
}

TEST_F(CudaQuantization, ProductsAreRecordedInCapturedSteps) {
  AcceleratorState::_reset_state(/*reset_partial_state=*/true);
  Accelerator accelerator;
  const auto weight = torch::randn({100, 256}, torch::kCUDA);
  const auto [packed, state] =
      quant::quantize_4bit(weight, {.compress_statistics = true, .quant_type = "nf4"});
  const auto int8 = quant::int8_vectorwise_quant(weight);
  const auto products = [&, &packed = packed, &state = state](torch::Tensor& x) {
    return torch::cat({quant::linear_4bit(x, packed, state), quant::int8_linear(x, int8, {}, 6)});
  };
  for (const std::int64_t rows : {1, 12, 40}) {
    auto step = accelerator.capture(products, {.warmup = 1});
    for (int i = 0; i < 4; ++i) {
      auto x = torch::randn({rows, 256}, torch::kCUDA).to(torch::kBFloat16);
      x.select(1, i).mul_(30);
      EXPECT_TRUE(torch::allclose(step(x), products(x), 1e-2, 1e-2)) << rows;
    }
    EXPECT_EQ(step.num_graphs(), 1);
  }
}

// -- models ---------------------------------------------------------------------------------------

struct CudaNetImpl : torch::nn::Module {
  CudaNetImpl() {
    first = register_module("first", torch::nn::Linear(256, 512));
    second = register_module("second", torch::nn::Linear(512, 256));
    head = register_module("head", torch::nn::Linear(256, 16));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return head->forward(second->forward(torch::relu(first->forward(x))));
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, head{nullptr};
};
TORCH_MODULE(CudaNet);

void expect_the_model_of_the_cpu(const BnbQuantizationConfig& config, double tolerance) {
  const test::Folder folder;
  save_model(state_dict(*CudaNet()), folder.path());
  const auto loaded = [&](const DeviceMap& map) {
    auto net = init_empty_weights([] { return CudaNet(); });
    return load_and_quantize_model(net, config,
                                   {.weights_location = folder.path(), .device_map = map});
  };
  const auto here = loaded({{"", "cpu"}});
  const auto there = loaded({{"", MapDevice(0)}});
  const auto expected = state_dict(*here.holder());
  for (const auto& part : state_dict(*there.holder())) {
    EXPECT_TRUE(torch::equal(part.value().cpu(), expected[part.key()])) << part.key();
  }
  for (const std::int64_t rows : {1, 12, 100}) {
    const auto x = torch::randn({rows, 256}).to(torch::kBFloat16);
    const auto y = there(x.cuda());
    EXPECT_TRUE(y.is_cuda());
    EXPECT_LT(share_of_error(y, here(x)), tolerance) << rows;
  }
}

TEST_F(CudaQuantization, ModelsComputeWhatTheyDoOnTheCpu) {
  const BnbQuantizationConfig nf4{.load_in_4bit = true,
                                  .bnb_4bit_quant_type = "nf4",
                                  .bnb_4bit_use_double_quant = true,
                                  .bnb_4bit_compute_dtype = FloatType::kBf16,
                                  .torch_dtype = FloatType::kBf16};
  expect_the_model_of_the_cpu(nf4, 0.02);
  const BnbQuantizationConfig int8{.load_in_8bit = true, .torch_dtype = FloatType::kBf16};
  expect_the_model_of_the_cpu(int8, 0.02);
}

// -- models that are offloaded, trained and saved ------------------------------------------------

/// 4 bits, with both kinds of scales, and 8 bits.
std::vector<BnbQuantizationConfig> in_bfloat16() {
  BnbQuantizationConfig nf4{.load_in_4bit = true,
                            .bnb_4bit_quant_type = "nf4",
                            .bnb_4bit_compute_dtype = FloatType::kBf16,
                            .torch_dtype = FloatType::kBf16};
  auto twice = nf4;
  twice.bnb_4bit_use_double_quant = true;
  return {nf4, twice, {.load_in_8bit = true, .torch_dtype = FloatType::kBf16}};
}

std::string name_of(const BnbQuantizationConfig& config) {
  if (config.load_in_8bit) return "8 bits";
  return config.bnb_4bit_use_double_quant ? "4 bits, scales in 8 bits" : "4 bits";
}

TEST_F(CudaQuantization, OffloadedCodesComputeWhatResidentOnesDo) {
  const torch::Device gpu(torch::kCUDA, 0);
  for (const auto& config : in_bfloat16()) {
    const test::Folder folder;
    CudaNet net;
    static_cast<void>(load_and_quantize_model(net, config));
    const auto x = torch::randn({12, 256}, gpu).to(torch::kBFloat16);
    const auto expected = net->forward(x);
    const auto wide = net->first(x.to(torch::kFloat));  // the bias is converted
    {
      const auto model = cpu_offload(net, {.execution_device = gpu});
      EXPECT_TRUE(net->first->weight.is_cuda());
      for (int i = 0; i < 2; ++i) EXPECT_TRUE(torch::equal(model(x), expected));
      EXPECT_TRUE(torch::equal(net->first(x.to(torch::kFloat)), wide));
      EXPECT_GT(model.stats().fills, 0);
    }
    const auto model = disk_offload(net, folder.path(), {.execution_device = gpu});
    EXPECT_TRUE(torch::equal(model(x), expected));
  }
}

TEST_F(CudaQuantization, LayersOfAMapAreQuantizedAndOffloadedInEightBits) {
  const test::Folder folder;
  save_model(state_dict(*CudaNet()), folder.path());
  const BnbQuantizationConfig config{.load_in_8bit = true, .torch_dtype = FloatType::kBf16};
  const auto output = [&](const DeviceMap& map, const torch::Tensor& x) {
    auto net = init_empty_weights([] { return CudaNet(); });
    const auto model = load_and_quantize_model(
        net, config,
        {.weights_location = folder.path(), .device_map = map, .offload_folder = folder / "spill"});
    EXPECT_EQ(state_dict(*net)["second.weight"].scalar_type(), torch::kChar);
    return model(x).cuda();
  };
  const auto x = torch::randn({12, 256}, torch::kCUDA).to(torch::kBFloat16);
  const MapDevice gpu(0);
  const auto expected = output({{"", gpu}}, x);
  for (const MapDevice& place : {MapDevice("cpu"), MapDevice("disk")}) {
    EXPECT_TRUE(
        torch::equal(output({{"first", gpu}, {"second", place}, {"head", gpu}}, x), expected));
  }
}

struct CudaAdaptedImpl : torch::nn::Module {
  CudaAdaptedImpl() {
    first = register_module("first", nn::LoraLinear(256, 512, nn::LoraOptions{.r = 8}));
    head = register_module("head", torch::nn::Linear(512, 16));
  }
  torch::Tensor forward(const torch::Tensor& x) { return head(torch::relu(first(x))); }
  nn::LoraLinear first{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(CudaAdapted);

TEST_F(CudaQuantization, AdaptersAreTrainedInFloat32) {
  const torch::AutoGradMode with_gradients(true);
  for (const auto& config : in_bfloat16()) {
    SCOPED_TRACE(name_of(config));
    AcceleratorState::_reset_state(/*reset_partial_state=*/true);
    Accelerator accelerator;
    CudaAdapted net;
    const auto trained = nn::mark_only_lora_as_trainable(*net);
    const auto quantized = load_and_quantize_model(net, config);
    const auto codes = state_dict(*net)["first.weight"].clone();
    auto [model, optimizer] = accelerator.prepare(quantized, AdamW(trained, {.lr = 1e-2}));
    const auto x = torch::randn({32, 256}, torch::kCUDA).to(torch::kBFloat16);
    std::vector<double> losses;
    for (int step = 0; step < 10; ++step) {
      const auto loss = (model(x).to(torch::kFloat) - 1).square().mean();
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
      losses.push_back(loss.item<double>());
    }
    EXPECT_LT(losses.back(), losses.front());
    for (const auto& one : trained) {
      EXPECT_TRUE(one.is_cuda());
      EXPECT_EQ(one.scalar_type(), torch::kFloat);
    }
    EXPECT_TRUE(torch::equal(state_dict(*net)["first.weight"], codes));
  }
  AcceleratorState::_reset_state(/*reset_partial_state=*/true);
}

TEST_F(CudaQuantization, TheStateOfARunIsSavedAndLoadedAgain) {
  const torch::AutoGradMode with_gradients(true);
  const auto x = torch::randn({4, 256}, torch::kCUDA).to(torch::kBFloat16);
  for (const auto& config : in_bfloat16()) {
    SCOPED_TRACE(name_of(config));
    const test::Folder folder;
    const auto run = [&](std::uint64_t seed, const auto& use) {
      AcceleratorState::_reset_state(/*reset_partial_state=*/true);
      torch::manual_seed(seed);
      CudaNet net;
      Accelerator accelerator;
      auto [model, optimizer] = accelerator.prepare(load_and_quantize_model(net, config),
                                                    AdamW(net->head->parameters(), {.lr = 0.1}));
      use(accelerator, model);
      return model(x).detach();
    };
    const auto expected = run(1, [&](auto& accelerator, auto& model) {
      static_cast<void>(accelerator.save_state(folder / "state"));
      accelerator.save_model(model, folder / "model");
    });
    EXPECT_FALSE(torch::equal(run(2, [](auto&, auto&) {}), expected));
    const auto loaded =
        run(3, [&](auto& accelerator, auto&) { accelerator.load_state(folder / "state"); });
    EXPECT_TRUE(torch::equal(loaded, expected)) << share_of_error(loaded, expected.cpu());
    auto empty = init_empty_weights([] { return CudaNet(); });
    const auto again =
        load_and_quantize_model(empty, config, {.weights_location = folder / "model"});
    EXPECT_TRUE(torch::equal(again(x), expected)) << share_of_error(again(x), expected.cpu());
  }
  AcceleratorState::_reset_state(/*reset_partial_state=*/true);
}

struct StoredLayerImpl : torch::nn::Module {
  StoredLayerImpl() { fc = register_module("fc", torch::nn::Linear(128, 48)); }
  torch::Tensor forward(const torch::Tensor& x) { return fc->forward(x); }
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(StoredLayer);

TEST_F(CudaQuantization, FilesOfBitsandbytesComputeWhatItsLayersDo) {
  const auto expected = load_state_dict(test::reference_path("quantization/outputs.pt"));
  for (const std::string name : {"nf4", "fp4", "nf4_double", "int8"}) {
    const auto file = test::reference_path("quantization/" + name + ".safetensors");
    BnbQuantizationConfig config{.torch_dtype = FloatType::kFp32};
    config.skip_modules.emplace();
    if (name == "int8") {
      config.load_in_8bit = true;
    } else {
      config.load_in_4bit = true;
      config.bnb_4bit_quant_type = name.substr(0, 3);
      config.bnb_4bit_compute_dtype = FloatType::kFp32;
    }
    auto net = init_empty_weights([] { return StoredLayer(); });
    const auto model = load_and_quantize_model(net, config, {.weights_location = file});
    const auto own = state_dict(*net);
    for (const auto& part : load_state_dict(file)) {
      EXPECT_TRUE(torch::equal(own[part.key()].cpu(), part.value())) << name << " " << part.key();
    }
    const double tolerance = name == "int8" ? 3e-3 : 1e-3;
    const auto x = expected["inputs"];
    const auto y = model((name == "int8" ? x.to(torch::kHalf).to(torch::kFloat) : x).cuda());
    EXPECT_TRUE(y.is_cuda());
    EXPECT_TRUE(torch::allclose(y.cpu(), expected[name], tolerance, tolerance)) << name;
  }
}

// -- compiled kernels -----------------------------------------------------------------------------

/// A process that compiles a kernel, or finds it.
void quantize_in_a_process(const std::string& cache) {
  auto options = on_gpu();
  options.environment.emplace_back("XDG_CACHE_HOME", cache);
  on_processes(1, options, [](PartialState& state) {
    const auto values = torch::linspace(-1, 1, 1000);
    EXPECT_TRUE(torch::equal(quant::quantize_4bit(values.to(state.device())).first.cpu(),
                             quant::quantize_4bit(values).first));
  });
}

TEST_F(CudaQuantization, CompiledKernelsAreKeptAndTornFilesAreReplaced) {
  const test::Folder folder;
  quantize_in_a_process(folder.path());
  if (in_child_process()) {  // which has another folder, and runs one of the calls
    for (int i = 0; i < 3; ++i) quantize_in_a_process(folder.path());
    return;
  }
  const auto kernels = folder.path() / "accelerate" / "kernels";
  std::vector<std::filesystem::path> files(std::filesystem::directory_iterator(kernels), {});
  ASSERT_EQ(files.size(), 1U);
  const auto size = std::filesystem::file_size(files[0]);
  const auto written = std::filesystem::last_write_time(files[0]);
  quantize_in_a_process(folder.path());
  EXPECT_EQ(std::filesystem::last_write_time(files[0]), written);
  std::filesystem::resize_file(files[0], size / 2);
  quantize_in_a_process(folder.path());
  EXPECT_EQ(std::filesystem::file_size(files[0]), size);
  {
    std::fstream file(files[0], std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(static_cast<std::streamoff>(size / 2));
    file << "torn";
  }
  quantize_in_a_process(folder.path());
}

TEST_F(CudaQuantization, KernelsNeedNoFolderOfTheirOwn) { quantize_in_a_process("/dev/null"); }

}  // namespace
}  // namespace accelerate
