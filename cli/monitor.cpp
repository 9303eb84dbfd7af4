// accelerate monitor
#include <poll.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "cli/commands.h"
#include "commands/monitor/page.h"
#include "commands/monitor/screen.h"
#include "core/numbers.h"
#include "core/sockets.h"
#include "core/text.h"
#include "core/world.h"
#include "launch/signals.h"

namespace accelerate::cli {
namespace {

using namespace detail::commands;  // NOLINT(google-build-using-namespace): the parts of one command
using detail::str;
using std::chrono::milliseconds;

constexpr int kDefaultPort = 6116;
constexpr int kPortsToTry = 20;
// Reading goes on between two answers, so that a large run does not delay the page.
constexpr milliseconds kReadAtOnce(100);
constexpr milliseconds kBetweenReads(250);

/// The exit code if a signal asks to end; else acts on it.
std::optional<int> code_of(int signal) {
  if (signal == SIGTSTP) ::raise(SIGSTOP);
  if (signal == SIGTSTP || signal == SIGCONT || signal == SIGWINCH || signal == SIGUSR1) {
    return std::nullopt;
  }
  return signal == SIGINT ? 0 : 128 + signal;
}

// ---- the page -----------------------------------------------------------------------------------

detail::Descriptor listen_for(const std::string& host, std::optional<int> port) {
  std::string error;
  const int first = port.value_or(kDefaultPort);
  for (int next = first; next < first + (port ? 1 : kPortsToTry); ++next) {
    if (auto socket = detail::listen_at(host, next, error)) return std::move(*socket);
  }
  throw ConfigError(str("The page cannot be served at ", host, ":", first, ": ", error,
                        ". Choose another --port, or --host."));
}

std::optional<int> typed_port(const detail::launch::Arguments& arguments) {
  if (!arguments.typed("port")) return std::nullopt;
  const auto port = detail::parse_number<int>(arguments.value("port"));
  if (port && *port >= 0 && *port <= 65535) return port;
  throw ConfigError(str("--port is ", arguments.value("port"), ", expected 0 to 65535."));
}

/// As it stands in an address: IPv6 in brackets.
std::string in_address(const std::string& host) {
  return host.find(':') != host.npos ? str("[", host, "]") : host;
}

int serve(RunSet& runs, const detail::launch::Arguments& arguments) {
  const std::string host = arguments.typed("host") ? arguments.value("host") : "127.0.0.1";
  auto socket = listen_for(host, typed_port(arguments));
  const int port = detail::port_of(socket);
  const bool local = detail::is_loopback(detail::own_address(socket));
  PageAccess access{.cookie = str("accelerate_monitor_", port)};
  if (local) access.hosts = {"localhost", "127.0.0.1", "[::1]", detail::to_lower(in_address(host))};
  if (!local || arguments.on("token")) access.token = new_token();
  const bool all = host == "0.0.0.0" || host == "::";
  // Before the message: who reads it may answer at once.
  detail::launch::SignalQueue signals({SIGINT, SIGTERM, SIGHUP, SIGQUIT});
  print(str("http://", in_address(all ? detail::this_host_name() : host), ":", port, "/",
            access.token.empty() ? "" : str("?token=", access.token), "\n"));
  print_message(str("monitoring '", runs.folder().string(), "'; Ctrl-C ends it."));
  MonitorPage page(runs, std::move(access));
  PageServer server(std::move(socket), [&](const auto& request) { return page.answer(request); });
  for (;;) {
    runs.refresh(kReadAtOnce);
    const bool more = runs.bytes_read() < runs.bytes_known();
    server.serve(more ? milliseconds(5) : kBetweenReads, signals.fd());
    while (const auto signal = signals.next()) {
      if (const auto code = code_of(*signal)) return *code;
    }
  }
}

// ---- the terminal -------------------------------------------------------------------------------

/// The screen of a program of its own; what was there before comes back.
class OtherScreen {
 public:
  OtherScreen() { enter(); }
  ~OtherScreen() { leave(); }
  OtherScreen(const OtherScreen&) = delete;
  OtherScreen& operator=(const OtherScreen&) = delete;

  void enter() const { write_to_terminal("\x1b[?1049h"); }
  void leave() const { write_to_terminal("\x1b[?1049l"); }
};

void draw(MonitorScreen& screen) {
  std::string text = "\x1b[H";
  const auto lines = screen.lines(screen_size(), now_in_seconds());
  for (std::size_t i = 0; i < lines.size(); ++i) {
    text += str(i == 0 ? "" : "\r\n", lines[i], "\x1b[K");
  }
  write_to_terminal(text + "\x1b[J");
}

int show_in_terminal(RunSet& runs) {
  const auto style = terminal_style(Environment::process());
  if (!style) {
    throw ConfigError(
        "`accelerate monitor --tui` draws in a terminal, but stdin or stdout is none (or TERM is "
        "dumb). Without --tui it serves a page for a browser.");
  }
  detail::launch::SignalQueue signals({SIGINT, SIGTERM, SIGHUP, SIGQUIT});
  const OtherScreen other;
  const KeyMode mode;
  MonitorScreen screen(runs, *style);
  KeyDecoder decoder;
  for (;;) {
    runs.refresh(kReadAtOnce);
    draw(screen);
    std::array<pollfd, 2> fds{{{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0},
                               {.fd = signals.fd(), .events = POLLIN, .revents = 0}}};
    ::poll(fds.data(), fds.size(), static_cast<int>(2 * kBetweenReads.count()));
    while (const auto signal = signals.next()) {
      const bool stops = *signal == SIGTSTP;
      if (stops) {
        mode.leave();
        other.leave();
      }
      if (const auto code = code_of(*signal)) return *code;
      if (!stops) continue;
      other.enter();
      mode.enter();
    }
    if (fds[0].revents == 0) continue;
    std::array<char, 256> bytes{};
    const auto count = ::read(STDIN_FILENO, bytes.data(), bytes.size());
    if (count <= 0) return 0;  // the terminal is gone
    for (const char byte : std::string_view(bytes.data(), static_cast<std::size_t>(count))) {
      const auto key = decoder.next(byte);
      if (key && !screen.press(*key)) return 0;
    }
  }
}

}  // namespace

int monitor(const detail::launch::Arguments& arguments) {
  RunSet runs(arguments.operands.empty() ? "." : arguments.operands.front());
  if (!arguments.on("tui")) return serve(runs, arguments);
  for (const auto* flag : {"host", "port", "token"}) {
    if (arguments.typed(flag))
      throw ConfigError(str("--", flag, " is for the page, not for --tui."));
  }
  return show_in_terminal(runs);
}

}  // namespace accelerate::cli
