#include "commands/menu.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>

namespace accelerate::detail::commands {
namespace {

std::vector<KeyPress> decoded(std::string_view bytes) {
  KeyDecoder decoder;
  std::vector<KeyPress> keys;
  for (const char byte : bytes) {
    if (const auto key = decoder.next(byte)) keys.push_back(*key);
  }
  return keys;
}

std::vector<std::string> numbered(std::size_t count) {
  std::vector<std::string> choices;
  for (std::size_t i = 0; i < count; ++i) choices.push_back("choice " + std::to_string(i));
  return choices;
}

void type(Menu& menu, std::string_view bytes) {
  for (const auto& key : decoded(bytes)) menu.press(key);
}

std::vector<std::string> texts(const std::vector<MenuLine>& lines) {
  std::vector<std::string> result;
  for (const auto& line : lines) result.push_back(line.text);
  return result;
}

TEST(KeyDecoder, KnowsArrowsOfBothModesLettersDigitsAndEnter) {
  EXPECT_EQ(decoded("\x1b[A\x1b[B\x1bOA\x1bOBkj\r\n7\x04"),
            (std::vector<KeyPress>{{.key = Key::kUp},
                                   {.key = Key::kDown},
                                   {.key = Key::kUp},
                                   {.key = Key::kDown},
                                   {.key = Key::kUp},
                                   {.key = Key::kDown},
                                   {.key = Key::kEnter},
                                   {.key = Key::kEnter},
                                   {.key = Key::kDigit, .digit = 7},
                                   {.key = Key::kEnd}}));
}

TEST(KeyDecoder, KnowsHomeAndEndInTheFormsOfTerminals) {
  for (const auto* home : {"\x1b[H", "\x1bOH", "\x1b[1~", "\x1b[7~", "\x1b[5~"}) {
    EXPECT_EQ(decoded(home), (std::vector<KeyPress>{{.key = Key::kFirst}}));
  }
  for (const auto* end : {"\x1b[F", "\x1bOF", "\x1b[4~", "\x1b[8~", "\x1b[6~"}) {
    EXPECT_EQ(decoded(end), (std::vector<KeyPress>{{.key = Key::kLast}}));
  }
}

TEST(KeyDecoder, TakesASequenceThatItDoesNotKnowForOneOtherKey) {
  EXPECT_EQ(
      decoded("\x1b[200~\x1b[1;5Cj"),
      (std::vector<KeyPress>{{.key = Key::kOther}, {.key = Key::kOther}, {.key = Key::kDown}}));
  // Escape, and then another key.
  EXPECT_EQ(decoded("\x1bj"), (std::vector<KeyPress>{{.key = Key::kDown}}));
  // A sequence that was cut short.
  EXPECT_EQ(decoded("\x1b[\x1b[B"), (std::vector<KeyPress>{{.key = Key::kDown}}));
}

TEST(Menu, StartsAtThePresetAndStopsAtBothEnds) {
  Menu menu("?", numbered(3), 1);
  EXPECT_EQ(menu.selected(), 1U);
  type(menu, "jjj");
  EXPECT_EQ(menu.selected(), 2U);
  type(menu, "kkkk");
  EXPECT_EQ(menu.selected(), 0U);
  type(menu, "\x1b[F");
  EXPECT_EQ(menu.selected(), 2U);
}

TEST(Menu, ConfirmsWithEnterAlone) {
  Menu menu("?", numbered(3), 0);
  EXPECT_FALSE(menu.press({.key = Key::kDown}));
  EXPECT_FALSE(menu.press({.key = Key::kDigit, .digit = 2}));
  EXPECT_FALSE(menu.press({.key = Key::kOther}));
  EXPECT_TRUE(menu.press({.key = Key::kEnter}));
  EXPECT_EQ(menu.selected(), 2U);
}

TEST(Menu, AddsDigitsUpToTheNumberOfAChoice) {
  Menu menu("?", numbered(13), 0);
  type(menu, "1");
  EXPECT_EQ(menu.selected(), 1U);
  type(menu, "2");
  EXPECT_EQ(menu.selected(), 12U);
  type(menu, "3");  // there is no 123: the number begins anew
  EXPECT_EQ(menu.selected(), 3U);
  type(menu, "1j0");  // a key between digits ends a number
  EXPECT_EQ(menu.selected(), 0U);
}

TEST(Menu, SaysThatThereIsNoSuchNumber) {
  Menu menu("?", numbered(3), 1);
  type(menu, "7");
  EXPECT_EQ(menu.selected(), 1U);
  EXPECT_EQ(menu.lines({}).back().text, "There is no choice 7; the last one is 2.");
  type(menu, "0");
  EXPECT_EQ(menu.lines({}).back().text, "Arrow keys or a number, then Enter.");
}

TEST(Menu, ShowsTheQuestionNumbersAndTheMarker) {
  Menu menu("Which one?", numbered(11), 10);
  const auto lines = menu.lines({.columns = 80, .rows = 24});
  EXPECT_EQ(lines.front(), (MenuLine{.text = "Which one?"}));
  EXPECT_EQ(lines[1], (MenuLine{.text = "    0  choice 0"}));
  EXPECT_EQ(lines[11], (MenuLine{.text = " > 10  choice 10", .style = MenuLine::Style::kSelected}));
}

TEST(Menu, ShowsThePartAroundTheSelectedChoiceOnALowScreen) {
  Menu menu("Which one?", numbered(11), 5);
  EXPECT_EQ(texts(menu.lines({.columns = 80, .rows = 6})),
            (std::vector<std::string>{"Which one?", "    4  choice 4", " >  5  choice 5",
                                      "    6  choice 6", "Arrow keys or a number, then Enter."}));
}

TEST(Menu, FitsEveryScreen) {
  const std::vector<std::string> wide{"a text with many words ➔ and more of them", "b"};
  for (std::size_t columns = 1; columns < 60; ++columns) {
    for (std::size_t rows = 1; rows < 12; ++rows) {
      const Menu menu("A question of several words, longer than a narrow screen?", wide, 0, "➔");
      const auto lines = menu.lines({.columns = columns, .rows = rows});
      for (const auto& line : lines)
        EXPECT_EQ(clipped(line.text, std::max(columns, 2UL) - 1), line.text);
      EXPECT_GE(lines.size(), 3U);  // the selected choice is there, even where there is no room
    }
  }
}

}  // namespace
}  // namespace accelerate::detail::commands
