#include "launch/console.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
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
// Lines of findings that are remembered; more than any run has ranks.
constexpr std::size_t kMostFindings = 10'000;
constexpr auto kWriteTimeout = std::chrono::seconds(10);

constexpr std::string_view kClearLine = "\r\033[K";

bool same_file(int a, int b) {
  struct stat first{};
  struct stat second{};
  return ::fstat(a, &first) == 0 && ::fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino && first.st_rdev == second.st_rdev;
}

// The words of a state of a line, without the numbers and bars that change in each.
std::string letters(std::string_view state) {
  std::string result;
  for (const char c : state) {
    if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) result += c;
  }
  return result;
}

// The last state of a line that is drawn again after carriage returns. Earlier states are passed on
// if their words are not in the next one.
std::string_view last_state(std::string_view line, const LineBuffer::Line& pass_on) {
  std::string_view last;
  for (std::size_t end = 0; end != line.npos;) {
    end = line.find('\r');
    const auto state = line.substr(0, end);
    if (end != line.npos) line.remove_prefix(end + 1);
    if (state.find_first_not_of(' ') == state.npos) continue;
    if (!letters(state).starts_with(letters(last))) pass_on(last);
    last = state;
  }
  return last;
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
    if (count < 0) {
      // The terminal was closed or the reader has ended: the workers go on. This is no error.
      if (errno != EPIPE && errno != EIO) error_ = errno;
      return queue_.clear();
    }
    queue_.erase(0, static_cast<std::size_t>(count));
  }
}

bool Screen::finish(std::chrono::milliseconds timeout, int interrupt) {
  while (!queue_.empty()) {
    const auto before = queue_.size();
    std::array<pollfd, 2> fds{{{.fd = fd_, .events = POLLOUT, .revents = 0},
                               {.fd = interrupt, .events = POLLIN, .revents = 0}}};
    ::poll(fds.data(), fds.size(), static_cast<int>(timeout.count()));
    flush();
    if (fds[1].revents != 0) return queue_.empty();
    if (queue_.size() == before) break;
  }
  return true;
}

void LineCutter::append(std::string_view bytes, const LineBuffer::Line& line) {
  while (!bytes.empty()) {
    const auto end = bytes.find('\n');
    rest_.append(bytes.substr(0, end));
    if (end == std::string_view::npos) break;
    bytes.remove_prefix(end + 1);
    line(last_state(rest_, line));
    rest_.clear();
  }
  if (rest_.size() <= kLongestLine) return;
  const bool redraws = rest_.ends_with('\r');
  rest_ = std::string(last_state(rest_, line));
  if (rest_.size() > kLongestLine) return finish(line);
  if (redraws) rest_ += '\r';
}

void LineCutter::finish(const LineBuffer::Line& line) {
  if (rest_.empty()) return;
  line(last_state(rest_, line));
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

bool Console::repeats_finding(Output& output, std::string_view line) {
  constexpr std::string_view kBegin = "accelerate: rank ";
  const bool begins = line.starts_with(kBegin);
  output.in_finding = begins || (output.in_finding && line.starts_with("  "));
  if (!output.in_finding || findings_.size() >= kMostFindings) return false;
  const auto first = findings_.try_emplace(std::string(line), &output).first->second;
  return !begins && first != &output;
}

void Console::take_line(Output& output, Stream stream, std::string_view line) {
  output.last.emplace_back(line.substr(0, kLastLineLength));
  if (output.last.size() > kLastLines) output.last.pop_front();
  if (!output.route.shown) return;
  const bool repeats = repeats_finding(output, line);
  if (output.route.prefix && !repeats) {
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

void Console::clear() {
  workers_.clear();
  findings_.clear();
}

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
  const int error = out_.error() != 0 ? out_.error() : err_.error();
  if (error == 0 || lost_output_) return;
  lost_output_ = true;
  say(str("accelerate: ", out_.error() != 0 ? "stdout" : "stderr", " can no longer be written: ",
          std::strerror(error), ". The workers go on, but their output is lost."));
}

bool Console::finish(int interrupt) {
  const bool done = out_.finish(kWriteTimeout, interrupt) && err_.finish(kWriteTimeout, interrupt);
  flush();
  return done;
}

}  // namespace accelerate::detail::launch
