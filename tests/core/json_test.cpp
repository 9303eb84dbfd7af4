#include "core/json.h"

#include <gtest/gtest.h>

#include "accelerate/errors.h"
#include "accelerate/value/json.h"
#include "reference.h"
#include "support/reference_path.h"

namespace accelerate::detail::inline core {
namespace {

using test::message_of;
using test::reference;

std::string problem(const std::string& text) {
  return message_of<ConfigError>([&] { (void)json_loads(text, "a.json"); });
}

TEST(Json, ReadsWhatPythonReadsAndRefusesTheRest) {
  const auto table = reference("json/loads.json");
  ASSERT_GT(table.as_list().size(), 1000U);
  for (const auto& row : table.as_list()) {
    const auto& text = row.items()[0].as_string();
    if (row.items()[1].is_none()) {
      EXPECT_THROW((void)json_loads(text), ConfigError) << text;
    } else {
      EXPECT_EQ(json_loads(text).repr(), row.items()[1].as_string()) << text;
    }
  }
}

TEST(Json, WritesWhatPythonWrites) {
  for (const auto& row : reference("json/dumps.json").as_list()) {
    const auto& value = row.items()[0];
    EXPECT_EQ(json_dumps(value), row.items()[1].as_string());
    EXPECT_EQ(json_dumps(value, {.indent = 2, .sort_keys = true}), row.items()[2].as_string());
    EXPECT_EQ(json_dumps(value, {.ensure_ascii = false}), row.items()[3].as_string());
  }
}

TEST(Json, NamesSourceLineAndColumnOfWhatIsWrong) {
  EXPECT_EQ(problem("{\n  \"a\": 1\n  \"b\": 2\n}"),
            "a.json, line 3, column 3: expected ',' or '}'.");
  EXPECT_EQ(problem(""), "a.json, line 1, column 1: expected a value, found the end.");
  EXPECT_EQ(problem("[1, nope]"), "a.json, line 1, column 5: expected a value.");
  EXPECT_EQ(problem("[1] 2"), "a.json, line 1, column 5: there is something behind the value.");
  EXPECT_EQ(problem("\"\xFF\""), "a.json, line 1, column 2: the text is not UTF-8.");
  EXPECT_EQ(problem("[\n99999999999999999999]"),
            "a.json, line 2, column 1: the integer does not fit into 64 bits.");
  EXPECT_EQ(problem("\"\\ud800\""),
            "a.json, line 1, column 2: half a surrogate pair is no character.");
}

TEST(Json, ReadsFiles) {
  const auto config = read_json_file(test::reference_path("decoders/llama/config.json"));
  EXPECT_EQ(config.at("model_type").as_string(), "llama");
  const auto missing = test::reference_path("decoders/none.json");
  const auto message = message_of<ConfigError>([&] { (void)read_json_file(missing); });
  EXPECT_NE(message.find(missing.string()), std::string::npos) << message;
  const auto no_json = test::reference_path("decoders/write_reference.py");
  EXPECT_NE(message_of<ConfigError>([&] {
              (void)read_json_file(no_json);
            }).find(no_json.string() + ", line 1, column "),
            std::string::npos);
}

TEST(Json, StopsAtNestsThatAreTooDeep) {
  const std::size_t most = kMaxValueDepth;
  const auto nest = [](std::size_t n) { return std::string(n, '[') + std::string(n, ']'); };
  EXPECT_NO_THROW((void)json_loads(nest(most + 1)));
  EXPECT_EQ(problem(nest(most + 2)),
            "a.json, line 1, column 502: the value is nested deeper than 500 levels.");
  EXPECT_THROW((void)json_loads(std::string(10'000'000, '[')), ConfigError);
}

TEST(Json, WritesKeysThatAreNoStringsAsPythonDoes) {
  EXPECT_EQ(json_dumps(Value::Dict{{2, Value::tuple({1, true})}, {false, nullptr}}),
            R"({"2": [1, true], "false": null})");
  EXPECT_EQ(json_dumps(Value::Dict{{10, 1}, {9, 2}}, {.sort_keys = true}), R"({"9": 2, "10": 1})");
}

TEST(Json, NamesThePathOfWhatItCannotHold) {
  const Value value = Value::Dict{{"a", Value::List{1, Value::Dict{{"b", Value::bytes("x")}}}}};
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)json_dumps(value); }),
            "JSON cannot hold the bytes at ['a'][1]['b'].");
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)json_dumps(Value::bytes("x")); }),
            "JSON cannot hold the bytes.");
}

}  // namespace
}  // namespace accelerate::detail::inline core
