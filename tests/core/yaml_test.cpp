#include "core/yaml.h"

#include <gtest/gtest.h>

#include "accelerate/errors.h"
#include "reference.h"

namespace accelerate::detail::inline core {
namespace {

using test::message_of;
using test::reference;

std::string problem(const std::string& text) {
  return message_of<ConfigError>([&] { (void)yaml_loads(text, "a.yaml"); });
}

void expect_read_as_python_does(const std::string& table) {
  for (const auto& row : reference(table).as_list()) {
    const auto& text = row.items()[0].as_string();
    if (row.items()[1].is_none()) {
      EXPECT_THROW(ADD_FAILURE() << text << " -> " << yaml_loads(text).repr(), ConfigError);
    } else {
      try {
        EXPECT_EQ(yaml_loads(text).repr(), row.items()[1].as_string()) << text;
      } catch (const ConfigError& error) {
        ADD_FAILURE() << text << ": " << error.what();
      }
    }
  }
}

TEST(Yaml, ResolvesPlainScalarsAsPythonDoes) { expect_read_as_python_does("yaml/scalars.json"); }

TEST(Yaml, ReadsDocumentsAsPythonDoes) { expect_read_as_python_does("yaml/documents.json"); }

TEST(Yaml, WritesWhatPythonWrites) {
  const auto table = reference("yaml/dumps.json");
  ASSERT_GT(table.as_list().size(), 3000U);
  for (const auto& row : table.as_list()) {
    EXPECT_EQ(yaml_dumps(row.items()[0]), row.items()[1].as_string()) << row.items()[0].repr();
  }
}

TEST(Yaml, ReadsBackWhatItWrites) {
  for (const auto& row : reference("yaml/dumps.json").as_list()) {
    const auto& value = row.items()[0];
    if (value.is_double() && value != value) continue;  // not a number: equals nothing
    EXPECT_EQ(yaml_loads(yaml_dumps(value)), value) << value.repr();
  }
}

TEST(Yaml, KeepsLongStringsInOneLine) {
  const std::string words(200, 'w');
  EXPECT_EQ(yaml_dumps(Value::Dict{{"a", words + " " + words}}),
            "a: " + words + " " + words + "\n");
}

TEST(Yaml, KeepsDatesAsStrings) {
  EXPECT_EQ(yaml_loads("2024-01-31").repr(), "'2024-01-31'");
  EXPECT_EQ(yaml_dumps(Value::List{"2024-01-31"}), "- '2024-01-31'\n");
}

TEST(Yaml, NamesSourceLineAndColumnOfWhatIsWrong) {
  EXPECT_EQ(problem("a: 1\nb: [1, 2\nc: 3\n"),
            "a.yaml, line 3, column 2: while parsing a flow sequence, did not find expected ',' or "
            "']'.");
  EXPECT_EQ(problem("a: 1\nb: *x\n"),
            "a.yaml, line 2, column 4: the alias 'x' has no anchor before it.");
  EXPECT_EQ(problem("a: 1\n---\nb: 2\n"),
            "a.yaml, line 2, column 1: there is a second document; one was expected.");
  EXPECT_EQ(problem("- !foo bar\n"), "a.yaml, line 1, column 3: the tag '!foo' is not supported.");
  EXPECT_EQ(problem("a:\n  1.5: x\n"),
            "a.yaml, line 2, column 3: a key must be a string, an int or a bool, not double.");
  EXPECT_EQ(problem("a: 99999999999999999999\n"),
            "a.yaml, line 1, column 4: the integer '99999999999999999999' does not fit into 64 "
            "bits.");
  EXPECT_EQ(problem("a: 1\n<<: 3\n"),
            "a.yaml, line 2, column 1: a merge key needs a mapping or a list of mappings.");
  EXPECT_EQ(problem("a: \xFF\n"), "a.yaml, line 1, column 4: invalid leading UTF-8 octet.");
}

TEST(Yaml, RefusesAnAliasInsideItsOwnAnchor) {
  EXPECT_EQ(problem("&a [1, *a]"),
            "a.yaml, line 1, column 8: the alias 'a' is inside its own anchor.");
}

TEST(Yaml, StopsAliasesThatGrowTheDocumentWithoutEnd) {
  std::string bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n";
  for (int i = 1; i < 12; ++i) {
    const auto below = "*a" + std::to_string(i - 1);
    bomb += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " [" + below;
    for (int k = 0; k < 9; ++k) bomb += ", " + below;
    bomb += "]\n";
  }
  EXPECT_NE(problem(bomb).find("the aliases make the document larger than 64 MiB"),
            std::string::npos);
}

TEST(Yaml, StopsAtNestsThatAreTooDeep) {
  const auto nest = [](std::size_t n) { return std::string(n, '[') + std::string(n, ']'); };
  EXPECT_NO_THROW((void)yaml_loads(nest(kMaxValueDepth + 1)));
  EXPECT_NE(problem(nest(kMaxValueDepth + 2)).find("nested deeper than 500 levels"),
            std::string::npos);
  // Each line is flat, but each alias goes one level deeper.
  std::string ladder = "a0: &a0 [x]\n";
  for (int i = 1; i < 600; ++i) {
    const auto n = std::to_string(i);
    ladder += "a" + n + ": &a" + n + " [*a" + std::to_string(i - 1) + "]\n";
  }
  EXPECT_NE(problem(ladder).find("nested deeper than 500 levels"), std::string::npos);
}

TEST(Yaml, RefusesToWriteBytes) {
  EXPECT_EQ(message_of<ArgumentError>([] { (void)yaml_dumps(Value::List{Value::bytes("x")}); }),
            "YAML cannot hold a value of kind bytes.");
}

}  // namespace
}  // namespace accelerate::detail::inline core
