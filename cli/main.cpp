// accelerate: runs a sub-command and prints its errors.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/version.h"
#include "cli/commands.h"
#include "core/subprocess.h"
#include "core/text.h"
#include "launch/help.h"

namespace accelerate::cli {
namespace {

// Documented in docs/launching.md.
enum ExitCode { kOk = 0, kFailure = 1, kWrongInput = 2, kPeerGone = 70 };

[[noreturn]] void refuse_command(const std::string& name) {
  std::vector<std::string> names;
  for (const auto& command : detail::launch::subcommands()) {
    names.emplace_back(command.name);
    if (command.name != name) continue;
    throw UnsupportedError(
        detail::str("`accelerate ", name, "` is not available yet. ", command.instead));
  }
  const auto near = detail::nearest(name, names);
  throw ConfigError(detail::str("'", name, "' is not a command",
                                near.empty() ? ". `accelerate --help` lists them all."
                                             : detail::str("; did you mean ", near, "?")));
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
  if (name == "launch") return launch(words);
  if (name == "completion") return completion(words);
  if (name == "checkpoint") return checkpoint(words);
  if (name == "merge-weights") return merge_weights(words);
  refuse_command(name);
}

int run(std::span<const std::string> words) {
  open_closed_streams();
  // Links named accelerate-launch, accelerate-config, ... carry the command in their name.
  const std::string own = words.empty() ? "" : words[0].substr(words[0].rfind('/') + 1);
  constexpr std::string_view kPrefix = "accelerate-";
  if (own.starts_with(kPrefix)) {
    const std::string name = own.substr(kPrefix.size());
    const auto known = [&](const detail::launch::Subcommand& command) {
      return command.name == name;
    };
    if (std::ranges::any_of(detail::launch::subcommands(), known))
      return dispatch(name, words.subspan(1));
  }
  if (words.size() < 2) {
    print(detail::launch::main_help());
    return kFailure;
  }
  if (words[1] == "--help" || words[1] == "-h" || words[1] == "help") {
    print(detail::launch::main_help());
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
