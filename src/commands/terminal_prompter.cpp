// Menus and questions in a terminal.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <string_view>
#include <utility>

#include "commands/menu.h"
#include "commands/prompter.h"
#include "commands/terminal.h"
#include "core/progress_line.h"
#include "core/text.h"
#include "launch/signals.h"
#include "launch/terminal_text.h"

namespace accelerate::detail::commands {
namespace {

constexpr std::string_view kClearBelow = "\x1b[J";
constexpr std::string_view kGreen = "\x1b[32m";
constexpr std::string_view kFaint = "\x1b[2m";
constexpr std::string_view kReset = "\x1b[0m";

class TerminalPrompter final : public Prompter {
 public:
  explicit TerminalPrompter(const TerminalStyle& style) : style_(style) {}

  std::size_t choose(const std::string& question, const std::vector<std::string>& choices,
                     std::size_t preset) override {
    Menu menu(question, choices, preset, style_.utf8 ? "➔" : ">");
    {
      const KeyMode mode;
      drawn_.clear();
      KeyDecoder decoder;
      bool open = true;
      while (open) {
        draw(menu.lines(screen_size()));
        // Keys may be left that were typed ahead.
        if (input_.empty() && wait(&mode) == Event::kEnd) refuse_end_of_input(question);
        while (open && !input_.empty()) {
          const auto key = decoder.next(take_byte());
          if (key && key->key == Key::kEnd) refuse_end_of_input(question);
          open = !key || !menu.press(*key);
        }
      }
      erase();
    }
    write_to_terminal(str(question, "\n  ",
                          styled({choices[menu.selected()], MenuLine::Style::kSelected}), "\n"));
    return menu.selected();
  }

  std::string line(const std::string& question) override {
    // Broken at words, where the terminal would break inside of them.
    const std::string shown = join(launch::wrap_line(question, screen_size().columns), "\n");
    write_to_terminal(shown);
    while (true) {
      if (const auto end = input_.find('\n'); end != std::string::npos) {
        std::string answer = input_.substr(0, end);
        input_.erase(0, end + 1);
        return answer;
      }
      const Event event = wait(nullptr);
      if (event == Event::kEnd) refuse_end_of_input(question);
      if (event == Event::kResumed) write_to_terminal(shown);
    }
  }

  void say(const std::string& text) override { write_to_terminal(text + "\n"); }

 private:
  enum class Event { kInput, kEnd, kResized, kResumed };

  // Waits for input or a signal. `mode` is the mode of an open menu.
  Event wait(const KeyMode* mode) {
    while (true) {
      std::array<pollfd, 2> fds{{{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0},
                                 {.fd = signals_.fd(), .events = POLLIN, .revents = 0}}};
      if (::poll(fds.data(), fds.size(), -1) < 0 && errno != EINTR) return Event::kEnd;
      if (const auto signal = signals_.next()) {
        if (*signal == SIGWINCH) return Event::kResized;
        if (*signal == SIGCONT) return Event::kResumed;
        if (*signal != SIGTSTP) {
          if (mode == nullptr) write_to_terminal("\n");
          throw Interrupted{*signal};
        }
        suspend(mode);
        continue;
      }
      if (fds[0].revents == 0) continue;
      std::array<char, 256> bytes{};
      const auto count = ::read(STDIN_FILENO, bytes.data(), bytes.size());
      if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      if (count <= 0) return Event::kEnd;
      input_.append(bytes.data(), static_cast<std::size_t>(count));
      return Event::kInput;
    }
  }

  void suspend(const KeyMode* mode) {
    if (mode != nullptr) mode->leave();
    ::raise(SIGSTOP);  // returns after `fg`, with a SIGCONT in the queue
    if (mode != nullptr) mode->enter();
    drawn_.clear();  // what the shell wrote meanwhile stays; the menu comes below it
  }

  char take_byte() {
    const char byte = input_.front();
    input_.erase(0, 1);
    return byte;
  }

  [[nodiscard]] std::string styled(const MenuLine& line) const {
    if (!style_.color || line.style == MenuLine::Style::kPlain) return line.text;
    return str(line.style == MenuLine::Style::kSelected ? kGreen : kFaint, line.text, kReset);
  }

  void draw(std::vector<MenuLine> lines) {
    std::string text = rows_up();
    for (const auto& line : lines) text += styled(line) + "\n";
    write_to_terminal(text);
    drawn_ = std::move(lines);
  }

  void erase() {
    write_to_terminal(rows_up());
    drawn_.clear();
  }

  // Moves to the first row of the menu and clears what follows. A terminal that became narrower has
  // broken wide lines into several rows.
  [[nodiscard]] std::string rows_up() const {
    const std::size_t columns = std::max<std::size_t>(screen_size().columns, 1);
    std::size_t rows = 0;
    for (const auto& line : drawn_) {
      rows += std::max<std::size_t>(
          1, (static_cast<std::size_t>(display_width(line.text)) + columns - 1) / columns);
    }
    return rows == 0 ? std::string() : str("\x1b[", rows, "A\r", kClearBelow);
  }

  TerminalStyle style_;
  launch::SignalQueue signals_{{SIGINT, SIGTERM, SIGHUP, SIGQUIT}};
  std::string input_;            // read and not used yet
  std::vector<MenuLine> drawn_;  // on the screen
};

}  // namespace

std::unique_ptr<Prompter> make_terminal_prompter(const TerminalStyle& style) {
  return std::make_unique<TerminalPrompter>(style);
}

}  // namespace accelerate::detail::commands
