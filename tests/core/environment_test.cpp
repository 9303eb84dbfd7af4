#include "accelerate/environment.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "accelerate/errors.h"
#include "captured_log.h"
#include "reference.h"

namespace accelerate {
namespace {

using test::message_of;

std::string text_of(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "(unset)";
}

TEST(StrToBool, KnowsPythonsWordsInAnyCase) {
  for (const auto* word : {"y", "yes", "t", "true", "on", "1", "YES", "True", "oN"}) {
    EXPECT_TRUE(str_to_bool(word)) << word;
  }
  for (const auto* word : {"n", "no", "f", "false", "off", "0", "NO", "False", "oFf"}) {
    EXPECT_FALSE(str_to_bool(word)) << word;
  }
}

TEST(StrToBool, RefusesOtherWordsAndTrimsNothing) {
  EXPECT_EQ(message_of<ArgumentError>([] { (void)str_to_bool("maybe"); }),
            "invalid truth value 'maybe'. Use y, yes, t, true, on, 1 or n, no, f, false, off, 0.");
  EXPECT_THROW((void)str_to_bool(""), ArgumentError);
  EXPECT_THROW((void)str_to_bool(" yes"), ArgumentError);
}

TEST(Environment, TakesAnEmptyValueForUnset) {
  const Environment environment({{"A", ""}, {"B", "x"}});
  EXPECT_FALSE(environment.contains("A"));
  EXPECT_EQ(environment.get("B"), "x");
  EXPECT_TRUE(environment.flag("A", true));
  EXPECT_EQ(environment.integer({"A"}, 9), 9);
}

TEST(Environment, NamesVariableAndValueThatAreNoTruth) {
  const Environment environment({{"ACCELERATE_USE_CPU", "si"}, {"RANK", "0"}});
  EXPECT_EQ(message_of<ConfigError>([&] { (void)environment.flag("ACCELERATE_USE_CPU"); }),
            "ACCELERATE_USE_CPU is 'si', which is no truth value. Use y, yes, t, true, on, 1 or n, "
            "no, f, false, off, 0.");
}

TEST(Environment, GivesTheFirstNumberThatIsNotNegative) {
  const Environment environment({{"A", "-1"}, {"B", "0"}, {"C", "5"}, {"D", " 7 "}, {"E", "+3"}});
  EXPECT_EQ(environment.integer({"A", "B", "C"}, 9), 0);
  EXPECT_EQ(environment.integer({"A", "Z"}, 9), 9);
  EXPECT_EQ(environment.integer({"D"}, 9), 7);
  EXPECT_EQ(environment.integer({"E"}, 9), 3);
}

TEST(Environment, NamesTheVariableThatIsNoNumber) {
  const Environment environment({{"RANK", "two"}, {"SIZE", "99999999999999999999"}, {"H", "0x1"}});
  EXPECT_EQ(message_of<ConfigError>([&] { (void)environment.integer({"RANK"}, 0); }),
            "RANK is 'two', which is not a whole number.");
  EXPECT_EQ(message_of<ConfigError>([&] { (void)environment.integer({"SIZE"}, 0); }),
            "SIZE is '99999999999999999999', which is beyond 64 bits.");
  EXPECT_THROW((void)environment.integer({"H"}, 0), ConfigError);
}

TEST(PatchEnvironment, UpperCasesNamesAndPutsBackWhatWasThere) {
  ::setenv("AA", "before", 1);
  ::unsetenv("BB");
  {
    auto patched = patch_environment({{"aa", "1"}, {"Bb", "2"}});
    EXPECT_EQ(text_of("AA"), "1");
    EXPECT_EQ(text_of("BB"), "2");
    {
      auto again = patch_environment({{"AA", "3"}});
      EXPECT_EQ(text_of("AA"), "3");
    }
    EXPECT_EQ(text_of("AA"), "1");
  }
  EXPECT_EQ(text_of("AA"), "before");
  EXPECT_EQ(text_of("BB"), "(unset)");
}

TEST(PatchEnvironment, PutsBackAlsoWhenTheScopeThrowsOrTwoNamesBecomeOne) {
  ::setenv("AA", "before", 1);
  try {
    auto patched = patch_environment({{"aa", "1"}, {"AA", "2"}});
    EXPECT_EQ(text_of("AA"), "2");
    throw std::runtime_error("out");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(text_of("AA"), "before");
}

TEST(PatchEnvironment, RefusesNamesThatCannotBeAndChangesNothing) {
  ::setenv("AA", "before", 1);
  EXPECT_EQ(message_of<ArgumentError>(
                [] { auto patched = patch_environment({{"AA", "1"}, {"a=b", "2"}}); }),
            "'a=b' cannot be the name of an environment variable.");
  EXPECT_EQ(text_of("AA"), "before");
}

TEST(ClearEnvironment, EmptiesAndRestoresAll) {
  ::setenv("AA", "before", 1);
  const auto all = Environment::process().variables();
  {
    auto cleared = clear_environment();
    EXPECT_TRUE(Environment::process().variables().empty());
    ::setenv("NEW_ONE", "x", 1);
    ::setenv("AA", "changed", 1);
  }
  EXPECT_EQ(Environment::process().variables(), all);
}

TEST(PurgeAccelerateEnvironment, RestoresChangedRemovedAndNewVariablesAndNoOthers) {
  ::setenv("ACCELERATE_CHANGED", "1", 1);
  ::setenv("ACCELERATE_REMOVED", "2", 1);
  const int result = purge_accelerate_environment([] {
    ::setenv("ACCELERATE_CHANGED", "9", 1);
    ::unsetenv("ACCELERATE_REMOVED");
    ::setenv("ACCELERATE_NEW", "9", 1);
    ::setenv("OTHER_NEW", "9", 1);
    return 5;
  });
  EXPECT_EQ(result, 5);
  EXPECT_EQ(text_of("ACCELERATE_CHANGED"), "1");
  EXPECT_EQ(text_of("ACCELERATE_REMOVED"), "2");
  EXPECT_EQ(text_of("ACCELERATE_NEW"), "(unset)");
  EXPECT_EQ(text_of("OTHER_NEW"), "9");
  EXPECT_THROW(purge_accelerate_environment([] {
                 ::setenv("ACCELERATE_NEW", "9", 1);
                 throw std::runtime_error("out");
               }),
               std::runtime_error);
  EXPECT_EQ(text_of("ACCELERATE_NEW"), "(unset)");
}

TEST(ReadingVariables, UsesThoseOfTheProcess) {
  auto patched = patch_environment({{"VALUES_FLAG", "on"}, {"VALUES_INT", "4"}, {"VALUES_E", ""}});
  EXPECT_TRUE(parse_flag_from_env("VALUES_FLAG"));
  EXPECT_FALSE(parse_flag_from_env("VALUES_NONE"));
  EXPECT_TRUE(parse_flag_from_env("VALUES_NONE", true));
  EXPECT_EQ(parse_choice_from_env("VALUES_FLAG"), "on");
  EXPECT_EQ(parse_choice_from_env("VALUES_NONE"), "no");
  EXPECT_EQ(parse_choice_from_env("VALUES_E", "x"), "x");
  EXPECT_EQ(get_int_from_env({"VALUES_NONE", "VALUES_INT"}, 1), 4);
}

TEST(ConvertDictToEnvVariables, LeavesOutWhatCannotStandInALine) {
  const test::CapturedLog log;
  const auto lines = convert_dict_to_env_variables({{"A", "1"},
                                                    {"", "x"},
                                                    {"B", ""},
                                                    {"C", "a b"},
                                                    {"D", "a;b"},
                                                    {"E", "a\nb"},
                                                    {"F<", "x"},
                                                    {"G", "a>b"},
                                                    {"H", "2"}});
  EXPECT_EQ(lines, (std::vector<std::string>{"A=1\n", "H=2\n"}));
  ASSERT_EQ(log.messages().size(), 7U);
  EXPECT_EQ(log.messages()[2],
            "The variable 'C' with the value 'a b' is left out: a part is empty or has a blank, a "
            "line end or one of ; < > in it.");
}

TEST(EnvVarPathAdd, AppendsToTheNonEmptyParts) {
  auto patched = patch_environment({{"VALUES_PATH", ":/a::/b:"}});
  EXPECT_EQ(env_var_path_add("VALUES_PATH", "/c"), "/a:/b:/c");
  EXPECT_EQ(env_var_path_add("VALUES_NO_PATH", "/c"), "/c");
}

}  // namespace
}  // namespace accelerate
