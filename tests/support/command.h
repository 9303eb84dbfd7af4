// tests/support/command.h - one command under test: what it writes, how it ends, what it leaves.
//
//     Command command({.argv = {"accelerate", "launch", "./train"}});
//     ASSERT_TRUE(command.saw("step 1"));
//     command.signal(SIGTERM);
//     const auto outcome = command.wait();
//     EXPECT_EQ(outcome.shell_code(), 143);
//     EXPECT_EQ(outcome.left_behind, Nothing);
//
// The command gets an environment without the variables of launchers, a folder for temporary files
// of its own and a variable that marks it and all that it starts, whatever becomes of parents and
// groups: so the test sees who is left, and the end of the test is the end of them.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/patience.h"

namespace accelerate::test {

/// Set, or with no value unset.
using Variables = std::vector<std::pair<std::string, std::optional<std::string>>>;

/// A folder that is removed at the end.
class Folder {
 public:
  Folder();
  ~Folder();
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  [[nodiscard]] std::string operator/(const std::string& name) const {
    return (path_ / name).string();
  }

 private:
  std::filesystem::path path_;
};

struct CommandOptions {
  /// argv[0] without a slash is looked up in PATH.
  std::vector<std::string> argv = {};
  Variables environment = {};
  std::filesystem::path working_directory = {};
  /// Streams and control go through a terminal of its own, as in a window; stderr is stdout then.
  bool terminal = false;
  /// Of the terminal.
  int columns = 80;
};

/// How it ended, what it said, and who and what were still there a moment later.
struct Outcome {
  int code = 0;    ///< -1 when a signal ended it
  int signal = 0;  ///< 0 when it ended by itself
  bool timed_out = false;
  std::string output = {};
  std::string error = {};
  double seconds = 0;
  /// "process 123 (probe ...)", "file x": empty as it should be.
  std::vector<std::string> left_behind = {};

  [[nodiscard]] int shell_code() const { return signal != 0 ? 128 + signal : code; }
  /// Everything, for messages of tests.
  [[nodiscard]] std::string text() const;
};

class Command {
 public:
  explicit Command(const CommandOptions& options);
  ~Command();
  Command(Command&&) noexcept;
  Command& operator=(Command&&) noexcept;

  [[nodiscard]] pid_t pid() const;
  /// To the command alone; `signal_group` reaches its group, as a key in a terminal does.
  void signal(int number) const;
  void signal_group(int number) const;
  /// Whether it handles or reads this signal by now, and does not end by it.
  [[nodiscard]] bool takes_signal(int number) const;
  /// Kills the command and all that it marked, at once: the machine loses its power.
  void kill_all() const;

  /// Terminal only: keys, such as "\x03"; and the window is closed.
  void type(const std::string& keys);
  void resize(int columns, int rows);
  void close_terminal();

  /// Waits until `text` was written `times` times on either stream.
  [[nodiscard]] bool saw(const std::string& text, int times = 1, Seconds limit = Seconds(20));
  [[nodiscard]] std::string output() const;
  [[nodiscard]] std::string error() const;
  [[nodiscard]] bool running() const;

  /// Waits for the end; at the limit all is killed and the outcome says so.
  [[nodiscard]] Outcome wait(Seconds limit = Seconds(30));

  /// Those that carry the mark and live, the command among them.
  [[nodiscard]] std::vector<pid_t> processes() const;
  /// Where it keeps its temporary files.
  [[nodiscard]] std::filesystem::path temporary_folder() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Runs a command to its end.
[[nodiscard]] Outcome run(const CommandOptions& options, Seconds limit = Seconds(30));

/// A program of this build, by its place relative to the test: "tests/launch_probe",
/// "bin/accelerate".
[[nodiscard]] std::string built(const std::string& name);

[[nodiscard]] bool is_alive(pid_t pid);
/// Whether somebody listens at the port, on any address of this network namespace.
[[nodiscard]] bool is_listening(int port);
/// All ports at which somebody listens.
[[nodiscard]] std::vector<int> listening_ports();
/// The same from the text of /proc/net/tcp and /proc/net/tcp6.
[[nodiscard]] std::vector<int> ports_in_tables(const std::string& tables);

[[nodiscard]] std::vector<std::string> lines_of(const std::string& text);
[[nodiscard]] int count_of(const std::string& text, const std::string& what);

/// Waits until `condition()` holds.
template <class F>
[[nodiscard]] bool eventually(F condition, Seconds limit = Seconds(5)) {
  const auto deadline = std::chrono::steady_clock::now() + patient(limit);
  for (;;) {
    if (condition()) return true;
    if (std::chrono::steady_clock::now() > deadline) return false;
    const timespec pause = {.tv_sec = 0, .tv_nsec = 5'000'000};
    ::nanosleep(&pause, nullptr);
  }
}

}  // namespace accelerate::test
