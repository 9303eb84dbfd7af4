// Codes and scales of tensors, compared with those of bitsandbytes, and products with them.
#include <accelerate/errors.h>
#include <accelerate/quantization.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "support/has.h"
#include "support/message_of.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

using test::has;
using test::message_of;
using Json = nlohmann::json;

const Json& codes() {
  static const Json all =
      Json::parse(std::ifstream(test::reference_path("quantization/codes.json")));
  return all;
}

/// As the reference script makes it.
torch::Tensor random_case(std::int64_t i) {
  const std::vector<torch::Dtype> dtypes{torch::kFloat, torch::kHalf, torch::kBFloat16};
  torch::manual_seed(static_cast<std::uint64_t>(i));
  return torch::randn({1 + i % 7, 16 + 37 * i % 300}, torch::kDouble)
      .to(dtypes[static_cast<std::size_t>(i % 3)]);
}

std::vector<std::uint8_t> bytes_of(const torch::Tensor& tensor) {
  const auto flat = tensor.contiguous();
  const auto* begin = static_cast<const std::uint8_t*>(flat.const_data_ptr());
  return {begin, begin + flat.nbytes()};
}

/// CRC-32, bit by bit.
std::uint32_t crc(const std::vector<std::uint8_t>& bytes) {
  std::uint32_t rest = 0xFFFFFFFF;
  for (const auto byte : bytes) {
    rest ^= byte;
    for (int i = 0; i < 8; ++i) rest = (rest >> 1) ^ ((rest & 1) != 0 ? 0xEDB88320 : 0);
  }
  return ~rest;
}

std::vector<std::uint8_t> bytes_of(const std::vector<std::uint8_t>& bytes) { return bytes; }

/// Bytes of tensor `i` in a format, of which the reference has the CRC.
template <class Bytes>
testing::AssertionResult are_stored(const Bytes& came, const std::string& format, std::int64_t i,
                                    const std::string& key) {
  const auto expected = codes().at(format).at(static_cast<std::size_t>(i)).at(key);
  const auto bytes = bytes_of(came);
  if (crc(bytes) == expected) return testing::AssertionSuccess();
  std::ostringstream text;
  text << std::hex << std::setfill('0');
  for (const auto byte : bytes) text << std::setw(2) << int{byte};
  return testing::AssertionFailure()
         << key << ": " << text.str() << "\n  came; expected are bytes with the CRC-32 " << expected
         << ", which this command shows:\n"
         << "    python tests/reference/quantization/write_reference.py --show " << format << " "
         << i;
}

/// With the codes that bitsandbytes' CPU build chooses in places where it differs from its CUDA
/// kernels.
std::vector<std::uint8_t> patched(const torch::Tensor& codes, const Json& differences) {
  auto bytes = bytes_of(codes);
  for (const auto& one : differences) bytes.at(one[0]) = one[1];
  return bytes;
}

torch::Tensor tensor_of(const std::vector<std::uint8_t>& bytes, const torch::Tensor& like) {
  return torch::tensor(bytes, torch::kByte).view(like.sizes());
}

std::string text_of(const quant::QuantState& state) {
  const auto bytes =
      bytes_of(quant::as_dict(state)["quant_state.bitsandbytes__" + state.quant_type]);
  return {bytes.begin(), bytes.end()};
}

void expect_like_bitsandbytes(const std::string& name, const std::string& type, bool twice) {
  std::int64_t i = 0;
  for (const auto& expected : codes().at(name)) {
    SCOPED_TRACE(i);
    const auto tensor = random_case(i);
    auto [packed, state] =
        quant::quantize_4bit(tensor, {.compress_statistics = twice, .quant_type = type});
    const auto theirs = patched(packed, expected.at("differences"));
    EXPECT_TRUE(are_stored(theirs, name, i, "packed"));
    const auto scales =
        twice ? patched(state.absmax, expected.at("scale_differences")) : bytes_of(state.absmax);
    EXPECT_TRUE(are_stored(scales, name, i, "scales"));
    if (twice) {
      EXPECT_TRUE(are_stored(state.state2->absmax, name, i, "nested_absmax"));
    }
    if (expected.contains("text")) {
      EXPECT_EQ(text_of(state), expected.at("text"));
    }
    if (twice) state.absmax = tensor_of(scales, state.absmax);
    const auto values = quant::dequantize_4bit(tensor_of(theirs, packed), state);
    EXPECT_TRUE(are_stored(values, name, i, "values"));
    ++i;
  }
  EXPECT_EQ(i, 200);
}

TEST(FourBits, OfTwoHundredTensorsAreThoseOfBitsandbytesInNf4) {
  expect_like_bitsandbytes("nf4", "nf4", false);
}
TEST(FourBits, OfTwoHundredTensorsAreThoseOfBitsandbytesInFp4) {
  expect_like_bitsandbytes("fp4", "fp4", false);
}
TEST(FourBits, WithDoubleQuantizationAreThoseOfBitsandbytes) {
  expect_like_bitsandbytes("nf4_double", "nf4", true);
  expect_like_bitsandbytes("fp4_double", "fp4", true);
}

TEST(EightBits, InBlocksAreThoseOfBitsandbytes) {
  EXPECT_EQ(crc(bytes_of(quant::create_dynamic_map())), codes().at("dynamic_map"))
      << quant::create_dynamic_map();
  std::int64_t i = 0;
  for (const auto& expected : codes().at("blockwise")) {
    SCOPED_TRACE(i);
    const auto [packed, state] = quant::quantize_blockwise(random_case(i), {.blocksize = 256});
    const auto theirs = patched(packed, expected.at("differences"));
    EXPECT_TRUE(are_stored(theirs, "blockwise", i, "codes"));
    EXPECT_TRUE(are_stored(state.absmax, "blockwise", i, "scales"));
    ++i;
  }
  EXPECT_EQ(i, 200);
}

TEST(EightBits, InRowsAreThoseOfBitsandbytes) {
  std::int64_t i = 0;
  for (const auto& expected : codes().at("int8")) {
    SCOPED_TRACE(i);
    const auto weight = quant::int8_vectorwise_quant(random_case(i), i % 2 == 0 ? 0.0 : 2.0);
    const auto theirs = patched(weight.CB, expected.at("differences"));
    EXPECT_TRUE(are_stored(theirs, "int8", i, "codes"));
    EXPECT_TRUE(are_stored(weight.SCB, "int8", i, "scales"));
    if (expected.at("outliers").is_null()) {
      EXPECT_FALSE(weight.outlier_columns.defined());
    } else {
      const auto columns = expected.at("outliers").get<std::vector<std::int64_t>>();
      EXPECT_TRUE(torch::equal(weight.outlier_columns, torch::tensor(columns, torch::kLong)));
    }
    ++i;
  }
  EXPECT_EQ(i, 200);
}

TEST(FourBits, PackTheFirstValueIntoTheHighHalfOfAByte) {
  const auto values = torch::tensor({0.0, 1.0, -1.0, 0.5, -0.5, 0.25, 2.0, -0.1}, torch::kFloat);
  EXPECT_EQ(bytes_of(quant::quantize_4bit(values, {.quant_type = "nf4"}).first),
            (std::vector<std::uint8_t>{0x7c, 0x2a, 0x49, 0xf6}));
  EXPECT_EQ(bytes_of(quant::quantize_4bit(values).first),
            (std::vector<std::uint8_t>{0x05, 0xd7, 0xf6, 0x39}));
}

TEST(FourBits, OfZerosAreCodesOfZero) {
  const auto [packed, state] = quant::quantize_4bit(torch::zeros({65}), {.quant_type = "nf4"});
  EXPECT_EQ(packed.sizes(), (std::vector<std::int64_t>{33, 1}));
  EXPECT_TRUE(packed.eq(0x77).all().item<bool>());
  EXPECT_TRUE(torch::equal(quant::dequantize_4bit(packed, state), torch::zeros({65})));
  EXPECT_TRUE(quant::quantize_4bit(torch::zeros({64})).first.eq(0).all().item<bool>());
}

TEST(FourBits, CanBeKeptInAnotherDtype) {
  const auto values = torch::randn({8, 64});
  const auto [bytes, state] = quant::quantize_4bit(values);
  const auto [words, same] = quant::quantize_4bit(values, {.quant_storage = torch::kBFloat16});
  EXPECT_EQ(words.scalar_type(), torch::kBFloat16);
  EXPECT_TRUE(
      torch::equal(quant::dequantize_4bit(words, same), quant::dequantize_4bit(bytes, state)));
}

TEST(DoubleQuantization, SubtractsTheMeanOfTheScales) {
  auto values = torch::zeros({256});
  for (int i = 0; i < 4; ++i) values[i * 64] = std::vector{1, 2, 3, 6}[static_cast<std::size_t>(i)];
  const auto state =
      quant::quantize_4bit(values, {.compress_statistics = true, .quant_type = "nf4"}).second;
  EXPECT_EQ(*state.offset, 3);
  EXPECT_EQ(bytes_of(state.absmax), (std::vector<std::uint8_t>{23, 47, 127, 255}));
  EXPECT_EQ(state.state2->absmax.item<float>(), 3);
}

TEST(Int8Linear, TakesColumnsWithOutliersInTheDtypeOfTheInput) {
  const auto x = torch::tensor({{1.0, -2.0, 0.5, 8.0}, {3.0, 0.25, -1.0, 4.0}}, torch::kFloat);
  const auto weight =
      quant::int8_vectorwise_quant(torch::tensor({{0.5, -1.0, 0.25, 2.0}}, torch::kFloat));
  EXPECT_EQ(bytes_of(weight.CB), (std::vector<std::uint8_t>{32, 192, 16, 127}));
  EXPECT_TRUE(torch::allclose(quant::int8_vectorwise_dequant(weight),
                              torch::tensor({{64.0F, -128.0F, 32.0F, 254.0F}}) / 127, 1e-6));
  const auto a = quant::int8_vectorwise_quant(x, 6);
  EXPECT_TRUE(torch::equal(a.outlier_columns, torch::tensor({3}, torch::kLong)));
  EXPECT_TRUE(torch::equal(a.SCB, torch::tensor({2.0F, 4.0F})));
  EXPECT_TRUE(torch::equal(
      a.CB, torch::tensor({{64, -127, 32, 0}, {95, 8, -32, 0}}, torch::kInt).to(torch::kChar)));
  EXPECT_NEAR(quant::int8_linear(x, weight, {}, 6)[0][0].item<float>(), 18.6506, 1e-3);
}

TEST(Int8Linear, MultipliesCodesExactlyForFewAndForManyRows) {
  torch::manual_seed(1);
  const auto weight = quant::int8_vectorwise_quant(torch::randn({70, 3000}));
  const auto x = torch::randn({20, 3000}).to(torch::kHalf);
  const auto many = quant::int8_linear(x, weight);
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(torch::equal(quant::int8_linear(x.narrow(0, i, 1), weight), many.narrow(0, i, 1)));
  }
}

/// The product with the values of the weight.
TEST(Linear4bit, IsTheProductWithTheValuesForAnyNumberOfRows) {
  torch::manual_seed(2);
  for (const std::string type : {"nf4", "fp4"}) {
    for (const std::int64_t inputs : {128, 96, 33}) {
      for (const bool twice : {false, true}) {
        const auto weight = torch::randn({300, inputs});
        const auto bias = torch::randn({300});
        const auto [packed, state] =
            quant::quantize_4bit(weight, {.compress_statistics = twice, .quant_type = type});
        const auto values = quant::dequantize_4bit(packed, state);
        for (const std::int64_t rows : {1, 2, 3, 4, 7, 40}) {
          const auto x = torch::randn({rows, inputs});
          const auto y = quant::linear_4bit(x, packed, state, bias);
          EXPECT_TRUE(torch::allclose(y, torch::linear(x, values, bias), 1e-4, 1e-4))
              << type << inputs << twice << rows;
        }
      }
    }
  }
}

TEST(Linear4bit, GivesGradientsToTheInputAndTheBias) {
  torch::manual_seed(3);
  const auto [packed, state] = quant::quantize_4bit(torch::randn({20, 64}), {.quant_type = "nf4"});
  const auto values = quant::dequantize_4bit(packed, state);
  const auto gradients = [&](const auto& product) {
    torch::manual_seed(4);
    const auto x = torch::randn({2, 3, 64}, torch::requires_grad());
    const auto bias = torch::randn({20}, torch::requires_grad());
    product(x, bias).square().sum().backward();
    return std::pair(x.grad(), bias.grad());
  };
  const auto [x, bias] = gradients(
      [&](const auto& a, const auto& b) { return quant::linear_4bit(a, packed, state, b); });
  const auto [x2, bias2] =
      gradients([&](const auto& a, const auto& b) { return torch::linear(a, values, b); });
  EXPECT_TRUE(torch::allclose(x, x2, 1e-4, 1e-4));
  EXPECT_TRUE(torch::allclose(bias, bias2, 1e-4, 1e-4));
}

TEST(Linear4bit, ComputesInAnotherDtypeAndReturnsThatOfTheInput) {
  const auto [packed, state] = quant::quantize_4bit(torch::randn({8, 64}));
  const auto y = quant::linear_4bit(torch::randn({5, 64}), packed, state, {}, torch::kBFloat16);
  EXPECT_EQ(y.scalar_type(), torch::kFloat);
  EXPECT_TRUE(torch::equal(y, y.to(torch::kBFloat16).to(torch::kFloat)));
}

TEST(QuantState, IsReadBackFromTheTensorsOfAFile) {
  for (const bool twice : {false, true}) {
    const auto [packed, state] =
        quant::quantize_4bit(torch::randn({16, 64}).to(torch::kBFloat16),
                             {.compress_statistics = twice, .quant_type = "nf4"});
    const auto read = quant::from_dict(quant::as_dict(state), packed, "fc.weight");
    EXPECT_EQ(text_of(read), text_of(state));
    EXPECT_TRUE(
        torch::equal(quant::dequantize_4bit(packed, read), quant::dequantize_4bit(packed, state)));
  }
}

TEST(QuantState, NamesWhatIsWrongWithTheTensorsOfAFile) {
  const auto [packed, state] = quant::quantize_4bit(torch::randn({16, 64}), {.quant_type = "nf4"});
  const auto bytes = packed;
  const auto error = [&](const std::function<void(StateDict&)>& spoil) {
    auto members = quant::as_dict(state);
    spoil(members);
    return message_of<FormatError>(
        [&] { static_cast<void>(quant::from_dict(members, bytes, "fc.weight")); });
  };
  const auto text = [](const std::string& json) {
    return torch::tensor(std::vector<std::uint8_t>(json.begin(), json.end()), torch::kByte);
  };
  const std::string key = "quant_state.bitsandbytes__nf4";
  EXPECT_TRUE(has(error([](auto& m) { m.erase("absmax"); }),
                  "The quantized weight 'fc.weight' cannot be read: its file has no "
                  "'fc.weight.absmax'."));
  EXPECT_TRUE(has(error([](auto& m) { m["absmax"] = m["absmax"].slice(0, 1); }),
                  "'fc.weight.absmax' is of shape [15] and dtype float32, and 16 elements of "
                  "float32 are expected"));
  EXPECT_TRUE(has(error([](auto& m) { m.insert("surplus", torch::zeros({1})); }),
                  "its file has the unknown member 'fc.weight.surplus'"));
  EXPECT_TRUE(has(error([&](auto& m) { m.erase(key); }), "no quant_state.bitsandbytes__nf4"));
  EXPECT_TRUE(has(error([&](auto& m) { m[key] = text(R"({"quant_type": "nf4", "extra": 1})"); }),
                  "its quant_state has no blocksize"));
  EXPECT_TRUE(has(error([&](auto& m) {
                    m[key] = text(R"({"quant_type": "nf4", "blocksize": 64, "dtype": "float32", )"
                                  R"("shape": [16, 64], "extra": 1})");
                  }),
                  "its quant_state has the unknown member 'extra'"));
  EXPECT_TRUE(has(error([&](auto& m) {
                    m[key] = text(R"({"quant_type": "nf4", "blocksize": 64, "dtype": "float32", )"
                                  R"("shape": [16, 640]})");
                  }),
                  "'fc.weight' is of shape [512] and dtype uint8, and 5120 elements of uint8"));
}

TEST(Quantization, RefusesValuesWithoutACode) {
  auto values = torch::randn({2, 64});
  values[1][3] = NAN;
  EXPECT_TRUE(
      has(message_of<ArgumentError>([&] { static_cast<void>(quant::quantize_4bit(values)); }),
          "the tensor has values that are infinite or NaN"));
  EXPECT_TRUE(
      has(message_of<ArgumentError>([&] { static_cast<void>(quant::quantize_blockwise(values)); }),
          "NaN"));
  EXPECT_TRUE(has(
      message_of<ArgumentError>([&] { static_cast<void>(quant::int8_vectorwise_quant(values)); }),
      "NaN"));
  EXPECT_TRUE(has(message_of<ArgumentError>([&] {
                    static_cast<void>(quant::quantize_4bit(torch::zeros({4}), {.blocksize = 65}));
                  }),
                  "blocksize is 65. Choose a power of two from 32 to 4096."));
  EXPECT_TRUE(has(message_of<ArgumentError>([&] {
                    static_cast<void>(
                        quant::quantize_4bit(torch::zeros({4}), {.quant_type = "nf5"}));
                  }),
                  "quant_type is 'nf5'. Choose one of: fp4, nf4."));
}

}  // namespace
}  // namespace accelerate
