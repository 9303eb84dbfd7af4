// src/commands/menu.h - a menu in a terminal as a state machine: keys in, lines out.
//
//     Menu menu("Which shell?", {"bash", "zsh"}, /*preset=*/0);
//     menu.press({.key = Key::kDown});
//     menu.lines({.columns = 80, .rows = 24});
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace accelerate::detail::commands {

enum class Key : std::uint8_t {
  kUp,
  kDown,
  kLeft,
  kRight,
  kFirst,
  kLast,
  kDigit,
  kEnter,
  kEnd,
  kOther
};

struct KeyPress {
  Key key = Key::kOther;
  int digit = 0;
  char character = '\0';  ///< of another key that is a character

  bool operator==(const KeyPress&) const = default;
};

/// Turns the bytes that a terminal sends into keys: arrows, Home, End, j, k, digits, Enter, Ctrl-D
/// as the end of input, and other characters.
class KeyDecoder {
 public:
  /// nullopt inside of a control sequence.
  [[nodiscard]] std::optional<KeyPress> next(char byte);

 private:
  enum class State : std::uint8_t { kPlain, kEscape, kSequence };

  State state_ = State::kPlain;
  std::string parameters_;
};

struct ScreenSize {
  std::size_t columns = 80;
  std::size_t rows = 24;
};

struct MenuLine {
  enum class Style : std::uint8_t { kPlain, kSelected, kFaint };

  std::string text;
  Style style = Style::kPlain;

  bool operator==(const MenuLine&) const = default;
};

class Menu {
 public:
  /// `choices` must not be empty; `marker` stands before the selected one.
  Menu(std::string question, std::vector<std::string> choices, std::size_t preset,
       std::string marker = ">");

  /// True if the key confirms the selected choice.
  bool press(const KeyPress& press);

  [[nodiscard]] std::size_t selected() const noexcept { return selected_; }
  /// What to show: the question, the choices around the selected one, and a hint after a wrong
  /// number. No line is wider than the screen, and there are fewer lines than rows.
  [[nodiscard]] std::vector<MenuLine> lines(const ScreenSize& screen) const;

 private:
  void take_digit(int digit);
  [[nodiscard]] std::string choice_line(std::size_t index) const;

  std::string question_;
  std::vector<std::string> choices_;
  std::size_t selected_;
  std::string marker_;
  std::size_t number_ = 0;  // of the digits that were typed so far
  std::string hint_;
};

/// The first `columns` characters of a text.
[[nodiscard]] std::string clipped(const std::string& text, std::size_t columns);

}  // namespace accelerate::detail::commands
