#include "formats/key_mapping.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "accelerate/errors.h"
#include "support/message_of.h"

namespace accelerate::detail::formats {
namespace {

using test::message_of;

/// "join0(a, t01(b))", with parts as "b[1/3 dim 0]".
std::string text_of(const TensorRecipe& recipe) {
  struct Visitor {
    std::string operator()(const TensorRecipe::FromFile& step) const { return step.key; }
    std::string operator()(const TensorRecipe::Transpose& step) const {
      return "t" + std::to_string(step.dim0) + std::to_string(step.dim1) + "(" + text_of(*step.of) +
             ")";
    }
    std::string operator()(const TensorRecipe::Part& step) const {
      auto text = text_of(*step.of) + "[" + std::to_string(step.index) + "/" +
                  std::to_string(step.count) + " dim " + std::to_string(step.dim);
      for (const auto size : step.sizes) text += " " + std::to_string(size);
      return text + "]";
    }
    std::string operator()(const TensorRecipe::Join& step) const {
      auto text = "join" + std::to_string(step.dim) + "(";
      for (const auto& one : step.of) text += text_of(*one) + (&one == &step.of.back() ? "" : ", ");
      return text + ")";
    }
  };
  return std::visit(Visitor(), recipe.step);
}

std::vector<std::string> texts(const MappedTensors& mapped) {
  std::vector<std::string> result;
  for (const auto& [name, recipe] : mapped.tensors)
    result.push_back(name + " = " + text_of(*recipe));
  return result;
}

using Texts = std::vector<std::string>;

TEST(KeyMappingTest, RenamesByPrefixNameAndPattern) {
  KeyMapping mapping;
  mapping.strip_prefix("model.")
      .replace(R"(^h\.(\d+)\.)", R"(blocks.\1.)")
      .rename("lm_head.weight", "head.weight")
      .add_prefix("net.");
  const auto mapped = map_keys(mapping, {"model.h.0.w", "model.h.12.w", "lm_head.weight", "other"});
  EXPECT_EQ(texts(mapped), (Texts{"net.blocks.0.w = model.h.0.w", "net.blocks.12.w = model.h.12.w",
                                  "net.head.weight = lm_head.weight", "net.other = other"}));
}

TEST(KeyMappingTest, ReportsWhatMatchedAndWhatDidNot) {
  KeyMapping mapping;
  mapping.strip_prefix("model.").rename("a", "b").drop("nothing.*");
  const auto report = map_keys(mapping, {"model.w", "model.v", "rest"}).report;
  EXPECT_EQ(report.rules,
            (std::vector<KeyMappingReport::Rule>{
                {"strip_prefix 'model.'", 2}, {"rename 'a' to 'b'", 0}, {"drop 'nothing.*'", 0}}));
  EXPECT_EQ(report.unmatched, Texts{"rest"});
  EXPECT_EQ(report.to_string(),
            "strip_prefix 'model.': 2 names\nrename 'a' to 'b': 0 names\ndrop 'nothing.*': 0 "
            "names\nmatched by no rule: rest\n");
}

TEST(KeyMappingTest, SplitsAFusedTensorIntoEqualOrGivenParts) {
  KeyMapping mapping;
  mapping.transpose(R"(.*c_attn\.weight)")
      .split(R"((.*)\.c_attn\.(.*))", {R"(\1.q.\2)", R"(\1.k.\2)", R"(\1.v.\2)"})
      .split("gate_up", {"gate", "up"}, {.dim = 1, .sizes = {3, 5}});
  EXPECT_EQ(texts(map_keys(mapping, {"h.c_attn.weight", "gate_up"})),
            (Texts{"h.q.weight = t01(h.c_attn.weight)[0/3 dim 0]",
                   "h.k.weight = t01(h.c_attn.weight)[1/3 dim 0]",
                   "h.v.weight = t01(h.c_attn.weight)[2/3 dim 0]", "gate = gate_up[0/2 dim 1 3 5]",
                   "up = gate_up[1/2 dim 1 3 5]"}));
}

TEST(KeyMappingTest, JoinsTheCompleteGroupsInTheOrderOfThePatterns) {
  KeyMapping mapping;
  mapping.join({R"((.*)\.q)", R"((.*)\.k)", R"((.*)\.v)"}, R"(\1.qkv)");
  const auto mapped = map_keys(mapping, {"a.v", "a.q", "x", "b.q", "a.k", "b.v"});
  EXPECT_EQ(texts(mapped),
            (Texts{"a.qkv = join0(a.q, a.k, a.v)", "x = x", "b.q = b.q", "b.v = b.v"}));
  EXPECT_EQ(mapped.report.incomplete, (Texts{"b.q", "b.v"}));
  EXPECT_EQ(mapped.report.rules.front().matched, 3);
}

TEST(KeyMappingTest, RefusesTwoTensorsWithOneName) {
  KeyMapping mapping;
  mapping.replace(R"(\d)", "");
  EXPECT_EQ(message_of<ConfigError>([&] { (void)map_keys(mapping, {"a1", "a2"}); }),
            "The key mapping gives the name 'a' to two tensors, made of a1, a2. Drop one, or make "
            "the patterns more exact.");
}

TEST(KeyMappingTest, RefusesAPartThatIsThereTwice) {
  KeyMapping mapping;
  mapping.join({"q.", "k"}, "qk");
  EXPECT_EQ(message_of<ConfigError>([&] { (void)map_keys(mapping, {"q1", "q2", "k"}); }),
            "The rule join 'q.', 'k' into 'qk' finds part 1 of 'qk' twice: 'q1' and 'q2'. Make its "
            "patterns more exact.");
}

TEST(KeyMappingTest, RefusesNamesThatGetEmptyOrGrowWithoutLimit) {
  KeyMapping empty;
  empty.strip_prefix("a");
  EXPECT_EQ(message_of<ConfigError>([&] { (void)map_keys(empty, {"a"}); }),
            "The rule strip_prefix 'a' leaves a name empty.");
  KeyMapping twice;
  for (int i = 0; i < 40; ++i) twice.replace("^.*$", R"(\g<0>\g<0>)");
  EXPECT_EQ(message_of<ConfigError>([&] { (void)map_keys(twice, {"a"}); }),
            R"(Replacing '^.*$' by '\g<0>\g<0>' in ')" + std::string(100, 'a') +
                "' makes a name of more than 65536 bytes.");
}

TEST(KeyMappingTest, RefusesSplitsThatGrowWithoutLimit) {
  KeyMapping many;
  for (int i = 0; i < 30; ++i) many.split("(.*)", std::vector<std::string>(64, R"(\1)"));
  EXPECT_EQ(
      message_of<ConfigError>([&] { (void)map_keys(many, {"x"}); }),
      "The rules of the key mapping make too many or too long names. Make their patterns more "
      "exact.");
  KeyMapping deep;
  for (int i = 0; i < 30; ++i) deep.split("x", {"a", "b"}).join({"a", "b"}, "x");
  EXPECT_NE(
      message_of<ConfigError>([&] { (void)map_keys(deep, {"x"}); }).find("4096 are the limit"),
      std::string::npos);
}

TEST(KeyMappingTest, ChecksTheArgumentsOfARule) {
  KeyMapping mapping;
  EXPECT_EQ(message_of<ConfigError>([&] { mapping.split("x", {}); }),
            "The split of 'x' has 0 parts. Give the names of 1 to 64.");
  EXPECT_EQ(message_of<ConfigError>([&] { mapping.split("x", {"a", "b"}, {.sizes = {1}}); }),
            "The split of 'x' has 2 parts and 1 sizes. Give one size per part, or none.");
  EXPECT_EQ(message_of<ConfigError>([&] { mapping.split("x", {"a"}, {.sizes = {-1}}); }),
            "The split of 'x' has the sizes -1. Sizes are not negative.");
  EXPECT_EQ(message_of<ConfigError>([&] { mapping.join({}, "x"); }),
            "The join into 'x' has 0 patterns. Give 1 to 64.");
  EXPECT_TRUE(mapping.empty());
  for (int i = 0; i < 256; ++i) mapping.drop("x");
  EXPECT_EQ(message_of<ConfigError>([&] { mapping.drop("x"); }),
            "A key mapping has at most 256 rules.");
}

constexpr std::string_view kRules = R"(
- strip_prefix: model.
- add_prefix: net.
- rename: {from: net.a, to: net.b}
- replace: {pattern: '^net\.h\.(\d+)', with: 'net.blocks.\1'}
- transpose: .*\.t
- transpose: {pattern: 'net\.u', dim0: -1, dim1: 2}
- split: {pattern: net\.fused, into: [net.x, net.y], dim: 1, sizes: [1, 2]}
- join: {patterns: [net\.q, net\.k], into: net.qk, dim: 1}
- drop: net\.drop
)";

TEST(KeyMappingTest, ReadsRulesFromAFile) {
  const auto path = std::filesystem::path(testing::TempDir()) / "rules.yaml";
  std::ofstream(path) << kRules;
  const auto mapped = map_keys(KeyMapping::from_file(path),
                               {"model.a", "h.3", "m.t", "u", "fused", "k", "q", "drop"});
  EXPECT_EQ(texts(mapped), (Texts{"net.b = model.a", "net.blocks.3 = h.3", "net.m.t = t01(m.t)",
                                  "net.u = t-12(u)", "net.x = fused[0/2 dim 1 1 2]",
                                  "net.y = fused[1/2 dim 1 1 2]", "net.qk = join1(q, k)"}));

  const auto json = std::filesystem::path(testing::TempDir()) / "rules.json";
  std::ofstream(json) << R"([{"strip_prefix": "model."}])";
  EXPECT_EQ(texts(map_keys(KeyMapping::from_file(json), {"model.a"})), Texts{"a = model.a"});
}

std::string refusal(const Value& rules) {
  return message_of<ConfigError>([&] { (void)KeyMapping::from_value(rules); });
}

TEST(KeyMappingTest, NamesTheRuleAndTheProblemOfAFile) {
  EXPECT_EQ(refusal(Value::Dict{}),
            "The key mapping must be a list of rules, and is of kind dict.");
  EXPECT_EQ(refusal(Value::List{1}),
            "The key mapping, rule 1: a rule has one key, its kind: strip_prefix, rename, ...");
  EXPECT_EQ(
      refusal(Value::List{Value::Dict{{"drop", "a"}}, Value::Dict{{"renam", "a"}}}),
      "The key mapping, rule 2: there is no kind of rule 'renam'; choose one of strip_prefix, "
      "add_prefix, rename, replace, transpose, split, join, drop. Did you mean 'rename'?");
  EXPECT_EQ(refusal(Value::List{Value::Dict{{"rename", Value::Dict{{"from", "a"}}}}}),
            "The key mapping, rule 1: it needs the field 'to'.");
  EXPECT_EQ(refusal(Value::List{
                Value::Dict{{"rename", Value::Dict{{"from", "a"}, {"to", "b"}, {"too", "c"}}}}}),
            "The key mapping, rule 1: it has no field 'too'; its fields are from, to. Did you mean "
            "'to'?");
  EXPECT_EQ(refusal(Value::List{Value::Dict{{"strip_prefix", 3}}}),
            "The key mapping, rule 1: The value is of kind int, not string: 3");
}

}  // namespace
}  // namespace accelerate::detail::formats
