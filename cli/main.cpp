// accelerate: runs a sub-command and prints its errors.
#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/logging.h"
#include "accelerate/version.h"
#include "cli/commands.h"
#include "commands/command_table.h"
#include "commands/help.h"
#include "core/json.h"
#include "core/subprocess.h"
#include "core/text.h"

namespace accelerate::cli {
namespace {

using Handler = int (*)(const detail::launch::Arguments&);
constexpr std::array<std::pair<std::string_view, Handler>, 11> kHandlers{{
    {"launch", launch},
    {"config", config},
    {"env", env},
    {"estimate-memory", estimate_memory},
    {"to-fsdp2", to_fsdp2},
    {"checkpoint", checkpoint},
    {"merge-weights", merge_weights},
    {"monitor", monitor},
    {"test", test},
    {"completion", completion},
    {"tpu-config", tpu_config},
}};

[[noreturn]] void refuse_command(const std::string& name) {
  std::vector<std::string> names;
  for (const auto& command : detail::commands::command_table()) names.emplace_back(command.name);
  const auto near = detail::nearest(name, names);
  throw ConfigError(detail::str("'", name, "' is not a command",
                                near.empty() ? ". `accelerate --help` lists them all."
                                             : detail::str("; did you mean ", near, "?")));
}

std::size_t terminal_width() {
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 100;
}

// The number of a standard stream that the caller has closed (`>&-`) would be given to the next
// file or socket, which then gets our messages.
void open_closed_streams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(fd, F_GETFD) >= 0) continue;
    // open() returns the lowest free number, which is this one.
    if (::open("/dev/null", fd == STDIN_FILENO ? O_RDONLY : O_WRONLY) < 0) return;
  }
}

int dispatch(const std::string& name, std::span<const std::string> words) {
  const auto* const handler =
      std::ranges::find(kHandlers, name, &std::pair<std::string_view, Handler>::first);
  if (handler == kHandlers.end()) refuse_command(name);
  const auto& command = *detail::commands::find_command(name);
  const auto arguments = detail::launch::parse_arguments(command, words);
  if (arguments.help) {
    print(detail::commands::command_help(command, terminal_width()));
    return kOk;
  }
  // Log messages of the library are printed like those of the command.
  basic_config({.sink = [](const LogEntry& entry) { print_message(entry.message); }});
  return handler->second(arguments);
}

int run(std::span<const std::string> words) {
  open_closed_streams();
  // Links named accelerate-launch, accelerate-config, ... carry the command in their name.
  const std::string own = words.empty() ? "" : words[0].substr(words[0].rfind('/') + 1);
  constexpr std::string_view kPrefix = "accelerate-";
  if (own.starts_with(kPrefix)) {
    const std::string name = own.substr(kPrefix.size());
    if (detail::commands::find_command(name) != nullptr) return dispatch(name, words.subspan(1));
  }
  if (words.size() < 2) {
    print(detail::commands::main_help());
    return kFailure;
  }
  if (words[1] == "--help" || words[1] == "-h" || words[1] == "help") {
    print(detail::commands::main_help());
    return kOk;
  }
  if (words[1] == "--version") {
    print(detail::str("accelerate ", kVersion, "\n"));
    return kOk;
  }
  return dispatch(words[1], words.subspan(2));
}

}  // namespace

void print(std::string_view text) {
  if (detail::write_fully(STDOUT_FILENO, text) || errno == EPIPE) return;
  throw Error(detail::str("stdout cannot be written: ", std::strerror(errno), "."));
}

void print_json(const Value& value) {
  print(detail::json_dumps(value, {.indent = 2, .replace_invalid = true}) + "\n");
}

void print_message(std::string_view message) {
  detail::write_fully(STDERR_FILENO, detail::str("accelerate: ", message, "\n"));
}

}  // namespace accelerate::cli

int main(int argc, char** argv) {
  using namespace accelerate;
  const std::vector<std::string> words(argv, argv + argc);
  try {
    return cli::run(words);
  } catch (const ConfigError& error) {
    cli::print_message(error.what());
    return cli::kWrongInput;
  } catch (const UnsupportedError& error) {
    cli::print_message(error.what());
    return cli::kWrongInput;
  } catch (const CommError& error) {
    cli::print_message(error.what());
    return cli::kPeerGone;
  } catch (const std::exception& error) {
    cli::print_message(error.what());
    return cli::kFailure;
  }
}
