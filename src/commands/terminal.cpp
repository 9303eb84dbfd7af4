#include "commands/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include "core/subprocess.h"
#include "core/text.h"

namespace accelerate::detail::commands {
namespace {

constexpr std::string_view kHideCursor = "\x1b[?25l";
constexpr std::string_view kShowCursor = "\x1b[?25h";

}  // namespace

std::optional<TerminalStyle> terminal_style(const Environment& environment) {
  const bool screen = ::isatty(STDIN_FILENO) != 0 && ::isatty(STDOUT_FILENO) != 0;
  if (!screen || environment.get("TERM").value_or("dumb") == "dumb") return std::nullopt;
  TerminalStyle style{.color = !environment.get("NO_COLOR")};
  for (const auto* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const auto locale = environment.get(name);
    if (!locale) continue;
    const auto lower = to_lower(*locale);
    style.utf8 = lower.ends_with("utf-8") || lower.ends_with("utf8");
    break;
  }
  return style;
}

ScreenSize screen_size() {
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return {};
  return {.columns = size.ws_col, .rows = size.ws_row};
}

void write_to_terminal(std::string_view text) { write_fully(STDOUT_FILENO, text); }

KeyMode::KeyMode() {
  known_ = ::tcgetattr(STDIN_FILENO, &before_) == 0;
  enter();
}

KeyMode::~KeyMode() { leave(); }

void KeyMode::enter() const {
  termios keys = before_;
  keys.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
  keys.c_cc[VMIN] = 1;
  keys.c_cc[VTIME] = 0;
  // DRAIN, not FLUSH: keys that were typed ahead stay.
  if (known_) ::tcsetattr(STDIN_FILENO, TCSADRAIN, &keys);
  write_to_terminal(kHideCursor);
}

void KeyMode::leave() const {
  if (known_) ::tcsetattr(STDIN_FILENO, TCSADRAIN, &before_);
  write_to_terminal(kShowCursor);
}

}  // namespace accelerate::detail::commands
