#include "examples/utf8.h"

#include <gtest/gtest.h>

namespace {

using examples::readable;

TEST(Readable, LeavesTextAlone) {
  EXPECT_EQ(readable(""), "");
  EXPECT_EQ(readable("the old fox.\n"), "the old fox.\n");
  EXPECT_EQ(readable("Füße, 犬, \U0001f98a, \u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff"),
            "Füße, 犬, \U0001f98a, \u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff");
}

TEST(Readable, ReplacesEachByteThatIsNoPartOfACharacter) {
  EXPECT_EQ(readable("a\x80z"), "a\ufffdz");
  EXPECT_EQ(readable("\xff\xfe"), "\ufffd\ufffd");
  EXPECT_EQ(readable("\xc3"), "\ufffd");                      // the rest is missing
  EXPECT_EQ(readable("\xe7\x8a!"), "\ufffd\ufffd!");          // so is this one's
  EXPECT_EQ(readable("\xc0\xaf"), "\ufffd\ufffd");            // has a shorter form
  EXPECT_EQ(readable("\xe0\x9f\xbf"), "\ufffd\ufffd\ufffd");  // so has this
  EXPECT_EQ(readable("\xf0\x8f\xbf\xbf"), "\ufffd\ufffd\ufffd\ufffd");
  EXPECT_EQ(readable("\xed\xa0\x80"), "\ufffd\ufffd\ufffd");            // half of a pair of UTF-16
  EXPECT_EQ(readable("\xf4\x90\x80\x80"), "\ufffd\ufffd\ufffd\ufffd");  // beyond U+10FFFF
}

TEST(Readable, ReplacesControlCharactersButTheEndOfALine) {
  using std::string_view_literals::operator""sv;
  EXPECT_EQ(readable("\0a\x1b[2J\r\n\x7f"sv), "\ufffda\ufffd[2J\ufffd\n\ufffd");
}

}  // namespace
