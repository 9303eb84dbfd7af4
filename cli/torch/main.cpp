// accelerate-torch: what the command line needs LibTorch for. `accelerate` starts it by itself.
#include <sys/prctl.h>
#include <unistd.h>

#include <charconv>
#include <csignal>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/errors.h"
#include "cli/torch/self_test.h"
#include "core/text.h"
#include "state/library_versions.h"
#include "state/store_server.h"

namespace accelerate::detail {
namespace {

constexpr int kWrongInput = 2;
constexpr std::string_view kUsage =
    "usage: accelerate-torch store --listen-fd N [--timeout S]\n"
    "       accelerate-torch self-test\n"
    "       accelerate-torch versions\n";
constexpr std::string_view kHelp =
    "\n"
    "The part of accelerate that needs LibTorch. `accelerate` starts it where it is needed.\n"
    "\n"
    "commands:\n"
    "  store            serve the store at which the processes of a job meet, until this process\n"
    "                   is ended or the one that started it is gone\n"
    "    --listen-fd N  the descriptor of a TCP socket that is bound and listens\n"
    "    --timeout S    end after S seconds\n"
    "  self-test        check that processes train together, for `accelerate test`; started by\n"
    "                   `accelerate launch`, or alone\n"
    "  versions         print the versions of LibTorch, CUDA and NCCL, as a JSON object\n"
    "\n"
    "  -h, --help       this text\n";

using Arguments = std::vector<std::string>;

int read_number(const std::string& flag, const std::string& text) {
  int value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) {
    throw ConfigError(str(flag, " is '", text, "', which is not a number from 0 on."));
  }
  return value;
}

struct StoreFlags {
  std::optional<int> listen_fd = std::nullopt;
  int timeout_seconds = 0;  // 0: none
};

StoreFlags read_store_flags(const Arguments& arguments) {
  StoreFlags flags;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto equals = arguments[i].find('=');
    const std::string flag = arguments[i].substr(0, equals);
    if (flag != "--listen-fd" && flag != "--timeout") {
      throw ConfigError(str("store takes no '", arguments[i], "'."));
    }
    if (equals == std::string::npos && i + 1 == arguments.size()) {
      throw ConfigError(str(flag, " needs a number."));
    }
    const std::string text =
        equals == std::string::npos ? arguments[++i] : arguments[i].substr(equals + 1);
    const int number = read_number(flag, text);
    if (flag == "--timeout") {
      flags.timeout_seconds = number;
    } else {
      flags.listen_fd = number;
    }
  }
  if (!flags.listen_fd) throw ConfigError("store needs --listen-fd, the socket to serve.");
  return flags;
}

[[noreturn]] void serve_store(const Arguments& arguments) {
  const StoreFlags flags = read_store_flags(arguments);
  // Ends with the process that started it.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  // Ctrl-C and a closed terminal are for the workers, who may need the store to end in order.
  std::signal(SIGINT, SIG_IGN);
  std::signal(SIGHUP, SIG_IGN);
  if (flags.timeout_seconds > 0) ::alarm(static_cast<unsigned>(flags.timeout_seconds));
  state::hold_store(*flags.listen_fd);
  for (;;) ::pause();
}

void print_versions() {
  const auto quoted = [](const std::optional<std::string>& text) {
    return text ? str('"', *text, '"') : std::string("null");
  };
  std::cout << "{\"torch\": " << quoted(state::library_version("torch"))
            << ", \"path\": " << quoted(state::libtorch_folder())
            << ", \"cuda\": " << quoted(state::library_version("cuda"))
            << ", \"nccl\": " << quoted(state::library_version("nccl")) << "}\n";
}

int run(const Arguments& arguments) {
  const std::string command = arguments.empty() ? "" : arguments[0];
  if (command == "--help" || command == "-h") {
    std::cout << kUsage << kHelp;
    return 0;
  }
  if (command == "store") {
    serve_store(Arguments(arguments.begin() + 1, arguments.end()));
  }
  if (command == "self-test") return self_test();
  if (command == "versions") {
    print_versions();
    return 0;
  }
  throw ConfigError(
      command.empty()
          ? "a command is missing."
          : str("'", command, "' is not a command. There are: store, self-test, versions."));
}

}  // namespace
}  // namespace accelerate::detail

int main(int argc, char** argv) {
  using namespace accelerate;
  try {
    return detail::run(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const ConfigError& error) {
    std::cerr << "accelerate-torch: " << error.what() << "\n" << detail::kUsage;
    return detail::kWrongInput;
  } catch (const std::exception& error) {
    std::cerr << "accelerate-torch: " << error.what() << "\n";
    return 1;
  }
}
