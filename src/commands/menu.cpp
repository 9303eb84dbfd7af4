#include "commands/menu.h"

#include <algorithm>
#include <utility>

#include "core/python_text.h"
#include "core/text.h"
#include "launch/terminal_text.h"

namespace accelerate::detail::commands {
namespace {

KeyPress plain_key(char byte) {
  if (byte >= '0' && byte <= '9') return {.key = Key::kDigit, .digit = byte - '0'};
  if (byte == 'k') return {.key = Key::kUp};
  if (byte == 'j') return {.key = Key::kDown};
  if (byte == '\r' || byte == '\n') return {.key = Key::kEnter};
  if (byte == '\x04') return {.key = Key::kEnd};
  return {.character = byte};
}

// The key of ESC [ parameters last.
KeyPress sequence_key(const std::string& parameters, char last) {
  if (last == 'A') return {.key = Key::kUp};
  if (last == 'B') return {.key = Key::kDown};
  if (last == 'C' && parameters.empty()) return {.key = Key::kRight};
  if (last == 'D' && parameters.empty()) return {.key = Key::kLeft};
  const bool tilde = last == '~';
  if (last == 'H' || (tilde && (parameters == "1" || parameters == "5" || parameters == "7"))) {
    return {.key = Key::kFirst};
  }
  if (last == 'F' || (tilde && (parameters == "4" || parameters == "6" || parameters == "8"))) {
    return {.key = Key::kLast};
  }
  return {};
}

}  // namespace

std::optional<KeyPress> KeyDecoder::next(char byte) {
  constexpr char kEscape = '\x1b';
  if (byte == kEscape) {  // begins a sequence, also where another one was cut short
    state_ = State::kEscape;
    parameters_.clear();
    return std::nullopt;
  }
  switch (state_) {
    case State::kPlain:
      return plain_key(byte);
    case State::kEscape:
      if (byte == '[' || byte == 'O') {
        state_ = State::kSequence;
        return std::nullopt;
      }
      state_ = State::kPlain;
      return plain_key(byte);
    case State::kSequence:
      if (byte >= 0x40 && byte <= 0x7e) {
        state_ = State::kPlain;
        return sequence_key(parameters_, byte);
      }
      if (parameters_.size() < 16) parameters_ += byte;
      return std::nullopt;
  }
  return std::nullopt;
}

std::string clipped(const std::string& text, std::size_t columns) {
  std::size_t at = 0;
  for (std::size_t shown = 0; shown < columns && at < text.size(); ++shown) {
    at += next_code_point(text, at).length;
  }
  return text.substr(0, at);
}

Menu::Menu(std::string question, std::vector<std::string> choices, std::size_t preset,
           std::string marker)
    : question_(std::move(question)),
      choices_(std::move(choices)),
      selected_(preset),
      marker_(std::move(marker)) {}

bool Menu::press(const KeyPress& press) {
  hint_.clear();
  if (press.key == Key::kDigit) {
    take_digit(press.digit);
    return false;
  }
  number_ = 0;
  const std::size_t last = choices_.size() - 1;
  if (press.key == Key::kUp && selected_ > 0) --selected_;
  if (press.key == Key::kDown && selected_ < last) ++selected_;
  if (press.key == Key::kFirst) selected_ = 0;
  if (press.key == Key::kLast) selected_ = last;
  return press.key == Key::kEnter;
}

// Digits add up to a number, 1 and 0 to 10, as long as there is a choice of that number.
void Menu::take_digit(int digit) {
  const auto alone = static_cast<std::size_t>(digit);
  const std::size_t longer = number_ * 10 + alone;
  if (longer >= choices_.size() && alone >= choices_.size()) {
    number_ = 0;
    hint_ = str("There is no choice ", alone, "; the last one is ", choices_.size() - 1, ".");
    return;
  }
  number_ = longer < choices_.size() ? longer : alone;
  selected_ = number_;
}

std::string Menu::choice_line(std::size_t index) const {
  const std::string number = str(index);
  const std::size_t digits = str(choices_.size() - 1).size();
  const std::string gap = index == selected_ ? marker_ : " ";
  return str(" ", gap, " ", std::string(digits - number.size(), ' '), number, "  ",
             choices_[index]);
}

std::vector<MenuLine> Menu::lines(const ScreenSize& screen) const {
  using enum MenuLine::Style;
  const std::size_t columns = std::max<std::size_t>(screen.columns, 2) - 1;
  std::vector<MenuLine> result;
  for (auto& line : launch::wrap_line(question_, columns)) result.push_back({.text = line});
  const std::string hint = hint_.empty() ? "Arrow keys or a number, then Enter." : hint_;

  // One row for the hint, and one for the cursor below the menu.
  const std::size_t taken = result.size() + 2;
  const std::size_t room = screen.rows > taken ? screen.rows - taken : 1;
  const std::size_t shown = std::min(room, choices_.size());
  const std::size_t last_first = choices_.size() - shown;
  const std::size_t first = std::min(selected_ - std::min(selected_, shown / 2), last_first);
  for (std::size_t i = first; i < first + shown; ++i) {
    result.push_back({.text = choice_line(i), .style = i == selected_ ? kSelected : kPlain});
  }
  result.push_back({.text = hint, .style = kFaint});
  for (auto& line : result) line.text = clipped(line.text, columns);
  return result;
}

}  // namespace accelerate::detail::commands
