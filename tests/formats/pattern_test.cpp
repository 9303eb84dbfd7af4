#include "formats/pattern.h"

#include <gtest/gtest.h>

#include <string>

#include "accelerate/errors.h"
#include "core/reference.h"
#include "support/message_of.h"

namespace accelerate::detail::formats {
namespace {

using test::message_of;

MatchBudget plenty() { return MatchBudget(100'000'000); }

TEST(PatternTest, SubstitutesAndMatchesAsPython) {
  const auto cases = test::reference("patterns/substitutions.json");
  auto budget = plenty();
  ASSERT_GT(cases.items().size(), 100U);
  for (const auto& one : cases.items()) {
    const Pattern pattern(one.at("pattern").as_string());
    const Replacement replacement(one.at("replacement").as_string(), pattern);
    for (const auto& result : one.at("results").items()) {
      const auto& name = result.items()[0].as_string();
      EXPECT_EQ(substitute(pattern, replacement, name, budget).value_or(name),
                result.items()[1].as_string())
          << pattern.text() << " in " << name;
      EXPECT_EQ(pattern.full_match(name, budget).has_value(), result.items()[2].as_bool())
          << pattern.text() << " is " << name;
    }
  }
}

TEST(PatternTest, TakesLinearTimeForPatternsThatBacktrackForEver) {
  MatchBudget budget(1'000'000);
  const std::string name(5000, 'a');
  EXPECT_FALSE(Pattern("(a*)*b").full_match(name, budget));
  EXPECT_FALSE(Pattern("(a|a)*c").full_match(name, budget));
  EXPECT_TRUE(Pattern("(?:a?){20}a{20}").full_match(std::string(20, 'a'), budget));
}

TEST(PatternTest, StopsWhenItsBudgetIsSpent) {
  MatchBudget budget(1000);
  EXPECT_EQ(message_of<ConfigError>(
                [&] { (void)Pattern("(a*)*b").full_match(std::string(5000, 'a'), budget); }),
            "Matching the patterns against all names takes too long. Use fewer rules, or patterns "
            "with fewer repetitions.");
}

std::string refusal(std::string_view pattern) {
  return message_of<ConfigError>([&] { (void)Pattern(pattern); });
}

TEST(PatternTest, NamesThePlaceAndTheProblemOfWhatItRefuses) {
  EXPECT_EQ(refusal("a("), "The pattern 'a(' cannot be used, at byte 3: a '(' without its ')'.");
  EXPECT_EQ(refusal("a)"), "The pattern 'a)' cannot be used, at byte 2: a ')' without its '('.");
  EXPECT_EQ(refusal("*a"), "The pattern '*a' cannot be used, at byte 1: nothing to repeat.");
  EXPECT_EQ(refusal("a**"), "The pattern 'a**' cannot be used, at byte 3: multiple repeat.");
  EXPECT_EQ(refusal("[a"), "The pattern '[a' cannot be used, at byte 3: a '[' without its ']'.");
  EXPECT_EQ(refusal("[z-a]"),
            "The pattern '[z-a]' cannot be used, at byte 5: a range of characters goes from low to "
            "high.");
  EXPECT_EQ(refusal("\\"), "The pattern '\\' cannot be used, at byte 2: a backslash at the end.");
  EXPECT_EQ(refusal("(a)\\1"),
            "The pattern '(a)\\1' cannot be used, at byte 5: the escape \\1 is not supported; \\d, "
            "\\w, \\s, their capitals and escaped punctuation are.");
  EXPECT_EQ(refusal("(?=a)"),
            "The pattern '(?=a)' cannot be used, at byte 2: of the groups that begin with (?, only "
            "(?:...) is supported.");
  EXPECT_EQ(refusal("a{2"),
            "The pattern 'a{2' cannot be used, at byte 2: '{' begins a repetition such as {2} or "
            "{1,3}; write \\{ for the character.");
  EXPECT_EQ(refusal("a{3,2}"),
            "The pattern 'a{3,2}' cannot be used, at byte 2: a repetition goes from fewer to more "
            "and at most to 1000.");
  EXPECT_EQ(refusal("^*"),
            "The pattern '^*' cannot be used, at byte 3: an anchor cannot be "
            "repeated.");
  EXPECT_EQ(refusal("(a)(a)(a)(a)(a)(a)(a)(a)(a)(a)"),
            "The pattern '(a)(a)(a)(a)(a)(a)(a)(a)(a)(a)' cannot be used, at byte 29: more than 9 "
            "groups.");
  EXPECT_EQ(refusal("\xFF"), "The pattern '\xFF' cannot be used, at byte 1: it is not UTF-8.");
}

TEST(PatternTest, CountsAllOfItsWork) {
  const auto spent = [](const std::string& pattern, const std::string& name) {
    MatchBudget budget(100);
    return message_of<ConfigError>([&] { (void)Pattern(pattern).find_all(name, budget); })
        .starts_with("Matching the patterns against all names takes too long.");
  };
  EXPECT_FALSE(spent("^a", "a"));
  EXPECT_TRUE(spent("^a", std::string(100, 'a')));  // it stops at once, but the name is decoded
  EXPECT_TRUE(spent("^" + std::string(900, 'a'), "a"));
}

TEST(PatternTest, RefusesPatternsThatAreTooLarge) {
  EXPECT_EQ(refusal(std::string(1001, 'a')),
            "A pattern of 1001 bytes is too long: 1000 are the limit. It begins with "
            "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'.");
  EXPECT_NE(refusal("(?:a{100}){100}").find("its repetitions make it too large"),
            std::string::npos);
  EXPECT_NE(refusal(std::string(60, '(') + std::string(60, ')')).find("more than 9 groups"),
            std::string::npos);
  std::string nested = "a";
  for (int i = 0; i < 60; ++i) nested = "(?:" + nested + ")";
  EXPECT_NE(refusal(nested).find("groups are nested deeper than 50 levels"), std::string::npos);
}

TEST(PatternTest, RefusesReplacementsThatNameNoGroup) {
  const Pattern pattern("(a)");
  EXPECT_EQ(message_of<ConfigError>([&] { Replacement(R"(\2)", pattern); }),
            R"(The replacement '\2' of the pattern '(a)' cannot be used: group 2 is not in the )"
            "pattern, which has 1.");
  EXPECT_EQ(
      message_of<ConfigError>([&] { Replacement(R"(\n)", pattern); }),
      R"(The replacement '\n' of the pattern '(a)' cannot be used: of the escapes, \1 to \9, )"
      R"(\g<0> to \g<9> and \\ are known.)");
}

}  // namespace
}  // namespace accelerate::detail::formats
