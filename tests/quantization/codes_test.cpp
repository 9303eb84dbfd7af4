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

TEST(QuantState, IsReadWithoutTheCodesAndWithTheNameOfTheWeight) {
  for (const bool twice : {false, true}) {
    const auto [packed, state] = quant::quantize_4bit(
        torch::randn({16, 65}), quant::Quant4Options{.compress_statistics = twice});
    quant::TensorDict named;
    for (const auto& part : quant::as_dict(state)) {
      named.insert("fc.weight." + part.key(), part.value());
    }
    for (const auto& read :
         {quant::from_dict(named, torch::kCPU), quant::from_dict(quant::as_dict(state))}) {
      EXPECT_EQ(text_of(read), text_of(state));
      EXPECT_TRUE(torch::equal(quant::dequantize_4bit(packed, read),
                               quant::dequantize_4bit(packed, state)));
    }
    named.erase("fc.weight.absmax");
    EXPECT_TRUE(has(
        message_of<FormatError>([&] { static_cast<void>(quant::from_dict(named, torch::kCPU)); }),
        "The quantized weight 'fc.weight' cannot be read: its file has no 'fc.weight.absmax'."));
  }
}

TEST(QuantState, IsRefusedForValuesThatNoKernelTakes) {
  const auto state = quant::quantize_4bit(torch::randn({256, 65}),
                                          {.compress_statistics = true, .quant_type = "nf4"})
                         .second;
  const auto plain = quant::quantize_4bit(torch::randn({16, 64}), {.quant_type = "fp4"}).second;
  const auto error = [](const quant::QuantState& from, const std::string& key, double value) {
    auto members = quant::as_dict(from);
    members[key] = members[key].clone().index_fill_(0, torch::zeros({1}, torch::kLong), value);
    return message_of<FormatError>([&] { static_cast<void>(quant::from_dict(members)); });
  };
  EXPECT_TRUE(has(error(plain, "absmax", NAN), "'weight.absmax' has values that are infinite or"));
  EXPECT_TRUE(has(error(state, "nested_absmax", INFINITY), "'weight.nested_absmax' has values"));
  EXPECT_TRUE(has(error(state, "nested_quant_map", NAN), "'weight.nested_quant_map' has values"));
  EXPECT_TRUE(has(error(state, "quant_map", 0.5), "'weight.quant_map' has not the values of nf4"));
  EXPECT_TRUE(has(error(plain, "quant_map", NAN), "'weight.quant_map' has not the values of fp4"));
}

TEST(QuantState, ThatDoesNotFitItsCodesIsRefusedByEveryFunction) {
  const auto [packed, state] = quant::quantize_4bit(torch::randn({8, 64}), {.quant_type = "nf4"});
  const auto twice =
      quant::quantize_4bit(torch::randn({8, 64}), {.compress_statistics = true}).second;
  const auto x = torch::randn({2, 64});
  const auto expect_refused = [&](const torch::Tensor& codes, const auto& like, const auto& spoil,
                                  const std::string& text) {
    auto spoilt = like;
    spoil(spoilt);
    EXPECT_TRUE(has(
        message_of<ArgumentError>([&] { static_cast<void>(quant::linear_4bit(x, codes, spoilt)); }),
        "linear_4bit: " + text));
    EXPECT_TRUE(has(message_of<ArgumentError>(
                        [&] { static_cast<void>(quant::dequantize_4bit(codes, spoilt)); }),
                    "dequantize_4bit: " + text));
  };
  const auto nothing = [](auto&) {};
  expect_refused(packed.slice(0, 1), state, nothing,
                 "255 bytes of codes do not make a tensor of shape [8, 64].");
  expect_refused(torch::Tensor(), state, nothing, "0 bytes of codes");
  expect_refused(
      packed, state, [](auto& s) { s.absmax = s.absmax.slice(0, 1); },
      "absmax is Float of shape [7] on cpu, and 8 elements of Float on cpu are");
  expect_refused(
      packed, state, [](auto& s) { s.absmax = s.absmax.to(torch::kDouble); },
      "absmax is Double of shape [8]");
  expect_refused(packed, state, [](auto& s) { s.blocksize = 0; }, "blocksize is 0.");
  expect_refused(packed, state, [](auto& s) { s.shape = {-8, -64}; }, "the shape of the state is");
  expect_refused(
      packed, state, [](auto& s) { s.code = torch::Tensor(); },
      "the map of its codes is undefined");
  expect_refused(packed, twice, [](auto& s) { s.offset = {}; }, "the state has a state2 and no");
  expect_refused(
      packed, twice, [](auto& s) { s.absmax = s.absmax.to(torch::kFloat); },
      "absmax is Float of shape [8]");
}

TEST(Linear4bit, TakesTensorsInAnyLayout) {
  const auto [packed, state] = quant::quantize_4bit(torch::randn({8, 64}), {.quant_type = "nf4"});
  auto spread = state;
  spread.absmax = torch::stack({state.absmax, torch::zeros({8})}, 1).select(1, 0);
  const auto codes = torch::stack({packed, packed + 1}, 1).select(1, 0);
  for (const std::int64_t rows : {2, 40}) {
    const auto x = torch::randn({rows, 64});
    EXPECT_TRUE(
        torch::equal(quant::linear_4bit(x, codes, spread), quant::linear_4bit(x, packed, state)));
  }
  EXPECT_TRUE(
      torch::equal(quant::dequantize_4bit(codes, spread), quant::dequantize_4bit(packed, state)));
}

TEST(Int8Linear, TakesTensorsInAnyLayoutAndRefusesThoseThatDoNotFit) {
  const auto weight = quant::int8_vectorwise_quant(torch::randn({8, 64}));
  const quant::Int8Weight columns{
      .CB = weight.CB.t().contiguous().t(),
      .SCB = torch::stack({weight.SCB, weight.SCB + 1}, 1).select(1, 0)};
  const auto x = torch::randn({2, 64});
  EXPECT_TRUE(torch::equal(quant::int8_linear(x, columns), quant::int8_linear(x, weight)));
  const auto error = [&](const quant::Int8Weight& spoilt) {
    EXPECT_THROW(static_cast<void>(quant::int8_vectorwise_dequant(spoilt)), ArgumentError);
    return message_of<ArgumentError>([&] { static_cast<void>(quant::int8_linear(x, spoilt)); });
  };
  EXPECT_TRUE(has(error({}), "int8_linear: CB is undefined, and a matrix of Char is expected."));
  EXPECT_TRUE(has(error({.CB = weight.CB.to(torch::kByte), .SCB = weight.SCB}), "CB is Byte"));
  EXPECT_TRUE(has(error({.CB = weight.CB, .SCB = weight.SCB.slice(0, 1)}),
                  "SCB is Float of shape [7] on cpu, and 8 elements of Float on cpu are expected"));
  EXPECT_TRUE(has(
      message_of<ArgumentError>([&] { static_cast<void>(quant::int8_linear(x, weight, {}, -1)); }),
      "int8_linear: threshold is -1, and 0 or more is expected."));
  EXPECT_THROW(static_cast<void>(quant::int8_linear(x, weight, {}, NAN)), ArgumentError);
}

TEST(Products, TakeABiasForEachOutput) {
  const auto matrix = torch::randn({8, 64});
  const auto [packed, state] = quant::quantize_4bit(matrix);
  const auto weight = quant::int8_vectorwise_quant(matrix);
  const auto x = torch::randn({2, 64});
  EXPECT_TRUE(has(message_of<ArgumentError>([&] {
                    static_cast<void>(quant::linear_4bit(x, packed, state, torch::ones({1})));
                  }),
                  "linear_4bit: the bias has the shape [1], and the weight has 8 outputs."));
  EXPECT_TRUE(has(message_of<ArgumentError>([&] {
                    static_cast<void>(quant::int8_linear(x, weight, torch::ones({2, 8})));
                  }),
                  "int8_linear: the bias has the shape [2, 8]"));
}

TEST(Products, WithoutInputsOrOutputsAreTheBiasOrEmpty) {
  for (const auto& [outputs, inputs] : {std::pair{8, 0}, std::pair{0, 64}}) {
    const auto matrix = torch::zeros({outputs, inputs});
    const auto [packed, state] = quant::quantize_4bit(matrix, {.compress_statistics = true});
    const auto weight = quant::int8_vectorwise_quant(matrix);
    const auto bias = torch::randn({outputs});
    for (const std::int64_t rows : {2, 40}) {
      const auto expected = bias.expand({rows, outputs});
      for (const int product : {4, 8}) {
        const auto x = torch::randn({rows, inputs}, torch::requires_grad());
        const auto y = product == 4 ? quant::linear_4bit(x, packed, state, bias)
                                    : quant::int8_linear(x, weight, bias);
        EXPECT_TRUE(torch::equal(y, expected));
        y.sum().backward();
        EXPECT_TRUE(torch::equal(x.grad(), torch::zeros({rows, inputs})));
      }
    }
  }
}

TEST(Products, OfRowsThatAreNotFiniteAreNotFinite) {
  const auto weight = quant::int8_vectorwise_quant(torch::randn({8, 64}));
  auto x = torch::randn({2, 64});
  x[1][5] = INFINITY;
  const auto y = quant::int8_linear(x, weight);
  EXPECT_TRUE(y[0].isfinite().all().item<bool>());
  EXPECT_FALSE(y[1].isfinite().any().item<bool>());
}

/// Runs with that many threads, then with the number of before.
template <class F>
auto with_threads(int threads, const F& f) {
  const auto before = torch::get_num_threads();
  torch::set_num_threads(threads);
  auto result = f();
  torch::set_num_threads(before);
  return result;
}

TEST(DoubleQuantization, DoesNotDependOnTheNumberOfThreads) {
  torch::manual_seed(8);
  // ATen adds up on several threads from 32768 scales on.
  const auto weight = torch::randn({2048, 2048}).pow(3);
  const auto four = [&] { return quant::quantize_4bit(weight, {.compress_statistics = true}); };
  const auto eight = [&] {
    return quant::quantize_blockwise(weight, {.blocksize = 64, .nested = true});
  };
  for (const auto& [one, two] : {std::pair{with_threads(1, four), with_threads(2, four)},
                                 std::pair{with_threads(1, eight), with_threads(2, eight)}}) {
    EXPECT_EQ(*one.second.offset, *two.second.offset);
    EXPECT_TRUE(torch::equal(one.first, two.first));
    EXPECT_TRUE(torch::equal(one.second.absmax, two.second.absmax));
  }
}

/// The codes of nearest entries of a sorted map; random values have no midpoints.
torch::Tensor nearest(const torch::Tensor& values, const torch::Tensor& map) {
  return (values.unsqueeze(1) - map.unsqueeze(0)).abs().argmin(1);
}

TEST(DoubleQuantization, ScalesEach256ScalesByThemselves) {
  torch::manual_seed(9);
  const auto weight = torch::randn({300, 128}) * torch::linspace(0.1, 3, 300).unsqueeze(1);
  const auto [packed, plain] = quant::quantize_4bit(weight, {.quant_type = "nf4"});
  const auto [same, state] =
      quant::quantize_4bit(weight, {.compress_statistics = true, .quant_type = "nf4"});
  EXPECT_TRUE(torch::equal(same, packed));
  const auto rest = plain.absmax - *state.offset;
  ASSERT_EQ(rest.numel(), 600);
  ASSERT_EQ(state.state2->absmax.numel(), 3);
  for (std::int64_t block = 0; block < 3; ++block) {
    const auto part = rest.slice(0, 256 * block, 256 * (block + 1));
    const auto scale = part.abs().max();
    EXPECT_EQ(state.state2->absmax[block].item<float>(), scale.item<float>());
    const auto codes = nearest(part * scale.reciprocal(), quant::create_dynamic_map());
    EXPECT_TRUE(torch::equal(state.absmax.slice(0, 256 * block, 256 * (block + 1)).to(torch::kLong),
                             codes));
  }
  const auto x = torch::randn({3, 128});
  EXPECT_TRUE(torch::allclose(quant::linear_4bit(x, packed, state),
                              torch::linear(x, quant::dequantize_4bit(packed, state)), 1e-4, 1e-4));
  const auto read = quant::from_dict(quant::as_dict(state), torch::kCPU);
  EXPECT_TRUE(
      torch::equal(quant::dequantize_4bit(packed, read), quant::dequantize_4bit(packed, state)));
}

TEST(FourBits, AreThoseOfTheirBlockForEverySize) {
  torch::manual_seed(10);
  const auto weight = torch::randn({16, 4096});
  for (const std::int64_t size : {32, 128, 256, 512, 1024, 2048, 4096}) {
    const auto [packed, state] =
        quant::quantize_4bit(weight, {.blocksize = size, .quant_type = "nf4"});
    const auto blocks = weight.view({-1, size});
    const auto absmax = std::get<0>(blocks.abs().max(1));
    EXPECT_TRUE(torch::equal(state.absmax, absmax)) << size;
    const auto codes = nearest((blocks * absmax.reciprocal().unsqueeze(1)).flatten(), state.code);
    const auto bytes = codes.view({-1, 2}).select(1, 0) * 16 + codes.view({-1, 2}).select(1, 1);
    EXPECT_TRUE(torch::equal(packed.flatten().to(torch::kLong), bytes)) << size;
    const auto values = quant::dequantize_4bit(packed, state);
    for (const std::int64_t rows : {1, 20}) {
      const auto x = torch::randn({rows, 4096});
      EXPECT_TRUE(torch::allclose(quant::linear_4bit(x, packed, state), torch::linear(x, values),
                                  1e-3, 1e-3))
          << size;
    }
  }
}

TEST(FourBits, AreRefusedInADtypeThatDoesNotDivideTheirBytes) {
  EXPECT_TRUE(has(message_of<ArgumentError>([] {
                    static_cast<void>(quant::quantize_4bit(torch::zeros({6}),
                                                           {.quant_storage = torch::kBFloat16}));
                  }),
                  "quantize_4bit: 3 bytes of codes are no whole number of elements of "
                  "quant_storage, BFloat16. Choose Byte."));
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
