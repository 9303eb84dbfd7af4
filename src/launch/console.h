// src/launch/console.h - the output of all workers on one console, without torn lines.
//
// The main worker's output appears as it comes; that of the others line by line, with a prefix.
// Nothing here waits for the console: what it does not take yet is kept, and when that is much,
// `full()` says that the workers should wait.
#pragma once

#include <poll.h>

#include <cstddef>
#include <deque>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/subprocess.h"
#include "launch/channel.h"

namespace accelerate::detail {

/// One of our own streams, with what still has to be written to it.
class Screen {
 public:
  explicit Screen(int fd);

  /// Bytes of the main worker. On a terminal they appear at once; else a line when it is complete.
  void raw(std::string_view bytes);
  /// A whole line, put before the line that the main worker has begun.
  void line(std::string_view text);
  /// The main worker has ended: what it began is a line.
  void end_raw();

  /// Writes what can be written without waiting.
  void flush();
  /// Writes everything, giving up when nothing is taken for `patience`.
  void finish(std::chrono::milliseconds patience);

  [[nodiscard]] int fd() const noexcept { return fd_; }
  [[nodiscard]] bool terminal() const noexcept { return terminal_; }
  [[nodiscard]] std::size_t waiting() const noexcept { return queue_.size(); }

 private:
  int fd_;
  bool terminal_;
  bool redraws_;       // the terminal understands how a line is cleared
  std::string queue_;  // to be written
  std::string begun_;  // by the main worker: on the terminal already, or held back
};

/// Keeps whole lines of a stream. A line that is drawn again and again (carriage returns) counts as
/// it looks at the end.
class LineCutter {
 public:
  void append(std::string_view bytes, const LineBuffer::Line& line);
  void finish(const LineBuffer::Line& line);

 private:
  std::string rest_;
};

class Console {
 public:
  using Stream = ProcessSet::Stream;

  /// Where the output of one stream of a worker goes.
  struct Route {
    bool shown = true;
    /// Unset: as it comes; for the main worker.
    std::optional<std::string> prefix = std::nullopt;
    /// Raw bytes are written here too, unless empty. Throws `ConfigError` when it cannot be opened.
    std::filesystem::path file = {};
  };

  Console(int out_fd, int err_fd);

  /// Whether stdout and stderr are one terminal or file, so that their order is seen.
  [[nodiscard]] bool one_screen() const noexcept { return one_screen_; }
  [[nodiscard]] bool terminal(Stream stream) const noexcept {
    return stream == Stream::kOutput ? out_.terminal() : err_.terminal();
  }

  void attach(std::size_t worker, const Route& output, const Route& error);
  void bytes(std::size_t worker, Stream stream, std::string_view bytes);
  void ended(std::size_t worker);
  /// Forgets the workers of a round.
  void clear();

  /// What a worker wrote last: its stderr, or its stdout when that is empty.
  [[nodiscard]] std::vector<std::string> last_lines(std::size_t worker) const;

  /// A line of our own on stderr.
  void say(std::string_view text);

  [[nodiscard]] bool full() const noexcept;
  /// What to wait for while something waits to be written; appended.
  void wants(std::vector<pollfd>& fds) const;
  void flush();
  void finish();

 private:
  struct Output {
    Route route;
    Descriptor file;
    LineCutter lines;
    std::deque<std::string> last;
  };
  struct Worker {
    Output output;
    Output error;
  };

  [[nodiscard]] Screen& screen(Stream stream);
  void write_file(Output& output, std::string_view bytes);
  void take_line(Output& output, Stream stream, std::string_view line);

  Screen out_;
  Screen err_;
  bool one_screen_;
  std::map<std::size_t, Worker> workers_;
};

}  // namespace accelerate::detail
