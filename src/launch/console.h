// src/launch/console.h - the output of all workers on one console, without torn lines.
//
// The main worker's output is passed on unchanged, that of the others line by line with a prefix.
// Nothing here waits for the console: output is queued, and `full()` tells when the queue is so
// long that the workers should wait.
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

#include "core/descriptor.h"
#include "core/subprocess.h"

namespace accelerate::detail::launch {

/// One of our own streams, with a queue of output.
class Screen {
 public:
  explicit Screen(int fd);

  /// Bytes of the main worker. A terminal shows them at once, a file or pipe gets whole lines.
  void raw(std::string_view bytes);
  /// A whole line, inserted before the unfinished line of the main worker.
  void line(std::string_view text);
  /// The main worker has ended: ends its unfinished line.
  void end_raw();

  /// Writes as much as possible without waiting.
  void flush();
  /// Writes everything; gives up if nothing can be written for `timeout`. Returns false if
  /// `interrupt` became readable before.
  bool finish(std::chrono::milliseconds timeout, int interrupt);

  /// The error by which output was lost, e.g. a full disk; 0 if none was. A reader that has ended
  /// does not count.
  [[nodiscard]] int error() const noexcept { return error_; }

  [[nodiscard]] int fd() const noexcept { return fd_; }
  [[nodiscard]] bool terminal() const noexcept { return terminal_; }
  [[nodiscard]] std::size_t waiting() const noexcept { return queue_.size(); }

 private:
  int fd_;
  bool terminal_;
  bool redraws_;       // the terminal understands how a line is cleared
  std::string queue_;  // to be written
  std::string begun_;  // by the main worker: on the terminal already, or held back
  int error_ = 0;
};

/// Cuts a stream into whole lines. Of a line with carriage returns (a progress bar) the last state
/// is shown, and before it those whose words the next state does not have.
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
    /// nullopt: bytes are passed on unchanged, for the main worker.
    std::optional<std::string> prefix = std::nullopt;
    /// A file that gets the bytes as well; "" for none.
    std::filesystem::path file = {};
  };

  Console(int out_fd, int err_fd);

  /// True if stdout and stderr are one terminal or file, so that their order is visible.
  [[nodiscard]] bool one_screen() const noexcept { return one_screen_; }
  [[nodiscard]] bool terminal(Stream stream) const noexcept {
    return stream == Stream::kOutput ? out_.terminal() : err_.terminal();
  }

  /// Throws `ConfigError` if a file of the routes cannot be opened.
  void attach(std::size_t worker, const Route& output, const Route& error);
  void bytes(std::size_t worker, Stream stream, std::string_view bytes);
  void ended(std::size_t worker);
  /// Removes the workers of a round.
  void clear();

  /// The last lines of a worker's stderr, or of its stdout if that is empty.
  [[nodiscard]] std::vector<std::string> last_lines(std::size_t worker) const;

  /// Prints a line of the launcher on stderr.
  void say(std::string_view text);

  [[nodiscard]] bool full() const noexcept;
  /// Appends the descriptors to poll while output is queued.
  void wants(std::vector<pollfd>& fds) const;
  void flush();
  /// Writes everything; gives up without a reader. Returns false if `interrupt`, a descriptor or
  /// -1, became readable before.
  bool finish(int interrupt = -1);
  /// True if output could not be written, which was said then.
  [[nodiscard]] bool has_lost_output() const noexcept { return lost_output_; }

 private:
  struct Output {
    Route route;
    Descriptor file;
    LineCutter lines;
    std::deque<std::string> last;
    bool in_finding = false;
  };
  struct Worker {
    Output output;
    Output error;
  };

  [[nodiscard]] Screen& screen(Stream stream);
  void write_file(Output& output, std::string_view bytes);
  void take_line(Output& output, Stream stream, std::string_view line);
  /// All ranks tell which rank is at fault and list where each was. True for a line of that list
  /// that another rank has shown.
  [[nodiscard]] bool repeats_finding(Output& output, std::string_view line);

  Screen out_;
  Screen err_;
  bool one_screen_;
  bool lost_output_ = false;
  std::map<std::size_t, Worker> workers_;
  /// Lines of findings, by the output that has shown them first.
  std::map<std::string, const Output*, std::less<>> findings_;
};

}  // namespace accelerate::detail::launch
