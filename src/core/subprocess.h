// src/core/subprocess.h - child processes: start, listen, end, leave none behind.
//
// Shared by `debug_launcher`, `notebook_launcher`, the test harness and the command line. Children
// get a process group of their own, so that what they start ends with them, and a death signal, so
// that they end with us even when we are killed.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/environment.h"
#include "accelerate/value/fields.h"
#include "core/descriptor.h"

namespace accelerate::detail::inline core {

/// The exit code of a worker that was asked to stop (SIGTERM, SIGUSR1) and saved its state first.
inline constexpr int kPreemptedExitCode = 75;

/// How a process ended: with a code, or by a signal.
struct ExitStatus {
  int code = 0;    ///< -1 when a signal ended it
  int signal = 0;  ///< 0 when it exited

  [[nodiscard]] bool ok() const noexcept { return code == 0 && signal == 0; }
  /// "exit code 3" or "signal 9 (SIGKILL)".
  [[nodiscard]] std::string text() const;
  /// What a shell shows: the code, or 128 plus the signal.
  [[nodiscard]] int shell_code() const noexcept { return signal != 0 ? 128 + signal : code; }

  bool operator==(const ExitStatus&) const = default;
};
/// The keys of its dictionary form.
ACCELERATE_VALUE_FIELDS(ExitStatus, code, signal);

/// "SIGKILL" for 9; "signal 99" for what has no name.
[[nodiscard]] std::string signal_name(int signal);

/// Where the output of a child goes.
enum class StreamTarget {
  kInherit,     ///< where ours goes
  kPipe,        ///< to us
  kTerminal,    ///< to us through a terminal of its own, so that the child behaves as in ours
  kWithOutput,  ///< stderr only: where stdout goes, in the order of writing
  kNull,        ///< nowhere
  kFile,        ///< appended to `SpawnOptions::output_file` or `error_file`
};

struct SpawnOptions {
  /// The command. argv[0] is looked up in PATH when it has no slash and `program` is empty.
  std::vector<std::string> argv = {};
  /// The file to execute, when it is not argv[0].
  std::string program = {};
  /// "NAME=value" each: the whole environment of the child. Unset: ours.
  std::optional<std::vector<std::string>> environment = std::nullopt;
  std::filesystem::path working_directory = {};
  StreamTarget output = StreamTarget::kInherit;
  StreamTarget error = StreamTarget::kInherit;
  std::filesystem::path output_file = {};
  std::filesystem::path error_file = {};
  /// Reading stdin gives the end of file, instead of what our stdin has.
  bool no_input = false;
  /// A session of its own: without our terminal, whose keys then reach us alone.
  bool new_session = false;
  /// Descriptors that stay open in the child, under the same number.
  std::vector<int> inherit = {};
  /// Gets "+<pid>\n" from the child before it executes the program, so that the
  /// reader knows the process group before anything can be started in it. -1: nothing is written.
  int announce_fd = -1;
};

/// The variables of this process with `changes` applied, as "NAME=value". An unset value removes.
[[nodiscard]] std::vector<std::string> environment_with(
    std::span<const std::pair<std::string, std::optional<std::string>>> changes);

/// The folders of PATH, in order; "." for an empty entry.
[[nodiscard]] std::vector<std::string> path_folders(const Environment& environment);
/// The first executable file of this name in the folders of PATH; "" if there is none.
[[nodiscard]] std::string find_in_path(const std::string& name, const Environment& environment);

/// Cuts a stream of bytes into whole lines.
class LineBuffer {
 public:
  using Line = std::function<void(std::string_view line)>;

  /// Hands every line that is now complete to `line`, without its line end.
  void append(std::string_view bytes, const Line& line);
  /// Hands out what is left at the end of the stream.
  void finish(const Line& line);

 private:
  std::string rest_;
};

/// A set of children that are watched together. Its destructor kills what still runs.
class ProcessSet {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Stream { kOutput, kError };
  using Sink = std::function<void(std::size_t index, Stream stream, std::string_view text)>;
  /// What a sink gets: whole lines without their ends, or the bytes as they come.
  enum class Pieces { kLines, kBytes };

  /// `sink` gets what children write to us, on the thread that calls `wait`.
  explicit ProcessSet(Sink sink = {}, Pieces pieces = Pieces::kLines);
  ~ProcessSet();
  ProcessSet(const ProcessSet&) = delete;
  ProcessSet& operator=(const ProcessSet&) = delete;

  /// Starts a program and returns its index. Throws `Error` when it cannot be executed.
  std::size_t spawn(const SpawnOptions& options);

  /// Starts a copy of this process that runs `body` and ends with what it returns, without running
  /// destructors of statics. `argv`, `program` and `environment` are not looked at. Only safe while
  /// no other thread runs here.
  std::size_t fork(const SpawnOptions& options, const std::function<int()>& body);

  /// Passes lines on until a child has ended or the deadline is over. Returns the children that
  /// ended since the last call, in the order in which that was noticed; their output is complete.
  /// Returns early, too, when one of the descriptors in `also` has something to say (`revents`).
  [[nodiscard]] std::vector<std::size_t> wait(Clock::time_point deadline,
                                              std::span<pollfd> also = {});

  /// `wait` until all children have ended; false when the deadline came first.
  [[nodiscard]] bool wait_all(Clock::time_point deadline);

  /// Turns reading from the children on or off. While off, a child waits when its pipe is full.
  void listen(bool reads) noexcept { listens_ = reads; }

  /// The size of the terminals of children that have one.
  void set_terminal_size(unsigned short rows, unsigned short columns) noexcept;

  /// Sends `signal` to the groups of all children that run.
  void signal_all(int signal) noexcept;

  /// SIGTERM, then SIGKILL to what still runs after `grace`. Afterwards none is left.
  void terminate(std::chrono::milliseconds grace);

  [[nodiscard]] std::size_t size() const noexcept { return children_.size(); }
  [[nodiscard]] std::size_t running() const noexcept;
  [[nodiscard]] bool running(std::size_t index) const { return !children_.at(index).status; }
  [[nodiscard]] pid_t pid(std::size_t index) const { return children_.at(index).pid; }
  /// Only after the child has ended.
  [[nodiscard]] const ExitStatus& status(std::size_t index) const;
  /// How long the child has run, or ran.
  [[nodiscard]] std::chrono::duration<double> elapsed(std::size_t index) const;

 private:
  struct Pipe {
    Descriptor fd = {};
    bool terminal = false;
    LineBuffer lines = {};
  };
  struct Child {
    pid_t pid = -1;
    Descriptor pidfd = {};
    Pipe output = {};
    Pipe error = {};
    Clock::time_point started = {};
    Clock::time_point ended = {};
    std::optional<ExitStatus> status = std::nullopt;

    [[nodiscard]] Pipe& pipe(Stream stream) { return stream == Stream::kOutput ? output : error; }
  };

  std::size_t start(const SpawnOptions& options, const std::function<int()>* body);
  void poll_once(Clock::time_point deadline, std::span<pollfd> also = {});
  void deliver(std::size_t index, Stream stream, std::string_view bytes);
  void read_some(std::size_t index, Stream stream);
  void end_pipe(std::size_t index, Stream stream);
  bool reap(std::size_t index);
  void drain(std::size_t index);

  Sink sink_;
  Pieces pieces_;
  bool listens_ = true;
  std::vector<Child> children_;
  std::vector<std::size_t> ended_;
};

/// A pipe whose ends close themselves on exec unless named in `SpawnOptions::inherit`.
class PipePair {
 public:
  PipePair();

  [[nodiscard]] int read_end() const noexcept { return read_.get(); }
  [[nodiscard]] int write_end() const noexcept { return write_.get(); }
  void close_read() noexcept { read_.reset(); }
  void close_write() noexcept { write_.reset(); }

  /// What is in the pipe now; does not wait for more.
  [[nodiscard]] std::string read_available() const;

 private:
  Descriptor read_;
  Descriptor write_;
};

/// Writes all of `bytes`; false when the other side is gone. Safe in a process about to end.
bool write_fully(int fd, std::string_view bytes) noexcept;

/// What a command prints; "" if it fails or runs longer than `limit`, nullopt if it cannot be
/// executed.
[[nodiscard]] std::optional<std::string> output_of(const std::vector<std::string>& argv,
                                                   StreamTarget error, std::chrono::seconds limit);

/// How many threads run in this process.
[[nodiscard]] std::size_t count_threads();

/// The command line of this process.
[[nodiscard]] std::vector<std::string> own_command_line();

}  // namespace accelerate::detail::inline core
