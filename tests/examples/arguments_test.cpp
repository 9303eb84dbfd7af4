#include "examples/arguments.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace {

struct Options {
  std::int64_t batch_size = 16, seed = 42;
  double rate = 0.5;
  std::string text;
  std::optional<accelerate::PrecisionType> mixed_precision = std::nullopt;
};

Options parse(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "program");
  std::vector<char*> argv;
  for (auto& argument : arguments) argv.push_back(argument.data());
  Options options;
  examples::read_arguments(static_cast<int>(argv.size()), argv.data(),
                           {{"--batch_size", options.batch_size},
                            {"--seed", options.seed, /*least=*/0},
                            {"--rate", options.rate, /*least=*/0},
                            {"--text", options.text},
                            {"--mixed_precision", options.mixed_precision}});
  return options;
}

std::string refusal_of(const std::vector<std::string>& arguments) {
  try {
    parse(arguments);
  } catch (const accelerate::ConfigError& error) {
    return error.what();
  }
  return "taken";
}

TEST(Arguments, GoToTheirVariables) {
  const auto options =
      parse({"--batch_size", "1", "--seed", "0", "--text", "a b", "--mixed_precision", "bf16"});
  EXPECT_EQ(options.batch_size, 1);
  EXPECT_EQ(options.seed, 0);
  EXPECT_EQ(options.text, "a b");
  EXPECT_EQ(options.mixed_precision, accelerate::PrecisionType::kBf16);
  EXPECT_EQ(parse({}).batch_size, 16);
  EXPECT_EQ(parse({"--rate", "0.25"}).rate, 0.25);
}

TEST(Arguments, ThatAreTooSmallOrNoNumberAreRefused) {
  EXPECT_EQ(refusal_of({"--batch_size", "0"}),
            "--batch_size is '0', which is not a whole number from 1 on.");
  EXPECT_EQ(refusal_of({"--seed", "-1"}), "--seed is '-1', which is not a whole number from 0 on.");
  for (const auto* text : {"", "x", "1.5", "2x", "99999999999999999999"}) {
    EXPECT_NE(refusal_of({"--batch_size", text}), "taken") << text;
  }
  EXPECT_EQ(refusal_of({"--rate", "-0.5"}), "--rate is '-0.5', which is not a number from 0 on.");
  for (const auto* text : {"", "x", "1.5x", "nan"}) {
    EXPECT_NE(refusal_of({"--rate", text}), "taken") << text;
  }
}

TEST(Arguments, ThatAreUnknownOrWithoutAValueAreRefused) {
  EXPECT_EQ(refusal_of({"--batch", "2"}),
            "'--batch' is not a flag of this program. Choose from: --batch_size, --seed, --rate, "
            "--text, --mixed_precision.");
  EXPECT_EQ(refusal_of({"--seed"}), "--seed needs a value behind it.");
}

}  // namespace
