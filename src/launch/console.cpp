#include "launch/console.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::launch {
namespace {

// A pipe that is ready takes this many bytes without blocking.
constexpr std::size_t kAtOnce = 4096;
// With more queued bytes the workers wait.
constexpr std::size_t kFull = 1 << 20;
// A line longer than this is cut in pieces.
constexpr std::size_t kLongestLine = 1 << 20;
constexpr std::size_t kLastLines = 20;
constexpr std::size_t kLastLineLength = 1000;
constexpr auto kWriteTimeout = std::chrono::seconds(10);

constexpr std::string_view kClearLine = "\r\033[K";

bool same_file(int a, int b) {
  struct stat first{};
  struct stat second{};
  return ::fstat(a, &first) == 0 && ::fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino && first.st_rdev == second.st_rdev;
}

// The part of a line that a terminal would show at the end.
std::string_view as_drawn(std::string_view line) {
  if (line.ends_with('\r')) line.remove_suffix(1);
  const auto last = line.rfind('\r');
  return last == std::string_view::npos ? line : line.substr(last + 1);
}

}  // namespace

Screen::Screen(int fd) : fd_(fd), terminal_(::isatty(fd) == 1) {
  const char* kind = std::getenv("TERM");
  redraws_ = terminal_ && kind != nullptr && std::string_view(kind) != "dumb";
}

void Screen::raw(std::string_view bytes) {
  const auto end = bytes.rfind('\n');
  if (terminal_) queue_ += bytes;
  if (end == std::string_view::npos) {
    begun_ += bytes;
  } else {
    if (!terminal_) queue_.append(begun_).append(bytes.substr(0, end + 1));
    begun_ = bytes.substr(end + 1);
  }
  if (!terminal_) {
    if (begun_.size() > kLongestLine) queue_ += std::exchange(begun_, {});
    return;
  }
  // Of a line that is drawn repeatedly only the last state has to be restored.
  const auto drawn = begun_.rfind('\r');
  if (drawn != std::string::npos && drawn > 0 && drawn + 1 < begun_.size()) begun_.erase(0, drawn);
  if (begun_.size() > kLongestLine) begun_.clear();
}

void Screen::line(std::string_view text) {
  const bool over = terminal_ && !begun_.empty();
  if (over) queue_ += redraws_ ? kClearLine : std::string_view("\n");
  queue_.append(text).append("\n");
  if (over) queue_ += begun_;
}

void Screen::end_raw() {
  if (begun_.empty()) return;
  if (!terminal_) queue_ += begun_;
  // The next line comes from another process.
  queue_ += "\n";
  begun_.clear();
}

void Screen::flush() {
  while (!queue_.empty()) {
    pollfd ready{.fd = fd_, .events = POLLOUT, .revents = 0};
    if (::poll(&ready, 1, 0) != 1) return;
    const ssize_t count = ::write(fd_, queue_.data(), std::min(queue_.size(), kAtOnce));
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) return;
    // The terminal was closed or the reader has ended. The workers go on.
    if (count < 0) return queue_.clear();
    queue_.erase(0, static_cast<std::size_t>(count));
  }
}

void Screen::finish(std::chrono::milliseconds timeout) {
  while (!queue_.empty()) {
    const auto before = queue_.size();
    pollfd ready{.fd = fd_, .events = POLLOUT, .revents = 0};
    ::poll(&ready, 1, static_cast<int>(timeout.count()));
    flush();
    if (queue_.size() == before) return;
  }
}

void LineCutter::append(std::string_view bytes, const LineBuffer::Line& line) {
  while (!bytes.empty()) {
    const auto end = bytes.find('\n');
    rest_.append(bytes.substr(0, end));
    if (end == std::string_view::npos) break;
    bytes.remove_prefix(end + 1);
    line(as_drawn(rest_));
    rest_.clear();
  }
  if (rest_.size() <= kLongestLine) return;
  rest_ = as_drawn(rest_);
  if (rest_.size() > kLongestLine) finish(line);
}

void LineCutter::finish(const LineBuffer::Line& line) {
  if (rest_.empty()) return;
  line(as_drawn(rest_));
  rest_.clear();
}

Console::Console(int out_fd, int err_fd)
    : out_(out_fd), err_(err_fd), one_screen_(same_file(out_fd, err_fd)) {}

Screen& Console::screen(Stream stream) {
  return one_screen_ || stream == Stream::kOutput ? out_ : err_;
}

void Console::attach(std::size_t worker, const Route& output, const Route& error) {
  Worker& entry = workers_[worker];
  for (const auto& [target, route] : {std::pair(&entry.output, &output), {&entry.error, &error}}) {
    target->route = *route;
    if (route->file.empty()) continue;
    target->file =
        Descriptor(::open(route->file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
    if (!target->file) {
      throw ConfigError(str("the log file '", route->file.string(),
                            "' cannot be written: ", std::strerror(errno), "."));
    }
  }
}

void Console::write_file(Output& output, std::string_view bytes) {
  if (!output.file || write_fully(output.file.get(), bytes)) return;
  const std::string why = std::strerror(errno);
  output.file.reset();
  say(str("accelerate: the log file ", output.route.file.string(),
          " can no longer be written: ", why, ". The workers go on."));
}

void Console::take_line(Output& output, Stream stream, std::string_view line) {
  output.last.emplace_back(line.substr(0, kLastLineLength));
  if (output.last.size() > kLastLines) output.last.pop_front();
  if (output.route.shown && output.route.prefix) {
    screen(stream).line(str(*output.route.prefix, line));
  }
}

void Console::bytes(std::size_t worker, Stream stream, std::string_view bytes) {
  const auto found = workers_.find(worker);
  if (found == workers_.end()) return;
  Output& output = stream == Stream::kOutput ? found->second.output : found->second.error;
  write_file(output, bytes);
  if (output.route.shown && !output.route.prefix) screen(stream).raw(bytes);
  output.lines.append(bytes, [&](std::string_view line) { take_line(output, stream, line); });
  flush();
}

void Console::ended(std::size_t worker) {
  const auto found = workers_.find(worker);
  if (found == workers_.end()) return;
  for (const auto stream : {Stream::kOutput, Stream::kError}) {
    Output& output = stream == Stream::kOutput ? found->second.output : found->second.error;
    output.lines.finish([&](std::string_view line) { take_line(output, stream, line); });
    if (output.route.shown && !output.route.prefix) screen(stream).end_raw();
    output.file.reset();
  }
  flush();
}

void Console::clear() { workers_.clear(); }

std::vector<std::string> Console::last_lines(std::size_t worker) const {
  const auto found = workers_.find(worker);
  if (found == workers_.end()) return {};
  const auto& [output, error] = found->second;
  const auto& lines = error.last.empty() ? output.last : error.last;
  return {lines.begin(), lines.end()};
}

void Console::say(std::string_view text) {
  if (text.ends_with('\n')) text.remove_suffix(1);
  for (const auto& line : split(text, '\n')) screen(Stream::kError).line(line);
  flush();
}

bool Console::full() const noexcept { return out_.waiting() + err_.waiting() > kFull; }

void Console::wants(std::vector<pollfd>& fds) const {
  for (const Screen* each : {&out_, &err_}) {
    if (each->waiting() > 0) fds.push_back({.fd = each->fd(), .events = POLLOUT, .revents = 0});
  }
}

void Console::flush() {
  out_.flush();
  err_.flush();
}

void Console::finish() {
  out_.finish(kWriteTimeout);
  err_.finish(kWriteTimeout);
}

}  // namespace accelerate::detail::launch
