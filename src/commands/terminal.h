// src/commands/terminal.h - the terminal of a command: its size, what it can show, and its modes.
#pragma once

#include <termios.h>

#include <optional>
#include <string_view>

#include "accelerate/environment.h"
#include "commands/menu.h"

namespace accelerate::detail::commands {

struct TerminalStyle {
  bool color = true;
  bool utf8 = false;
};

/// nullopt unless stdin and stdout are a terminal that understands control sequences.
[[nodiscard]] std::optional<TerminalStyle> terminal_style(const Environment& environment);

/// 80 columns and 24 rows if it is not known.
[[nodiscard]] ScreenSize screen_size();

void write_to_terminal(std::string_view text);

/// While it lives, keys arrive one by one and are not shown, and the cursor is hidden.
class KeyMode {
 public:
  KeyMode();
  ~KeyMode();
  KeyMode(const KeyMode&) = delete;
  KeyMode& operator=(const KeyMode&) = delete;

  void enter() const;
  void leave() const;

 private:
  termios before_{};
  bool known_ = false;
};

}  // namespace accelerate::detail::commands
