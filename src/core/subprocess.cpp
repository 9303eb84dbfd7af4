#include "core/subprocess.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <tuple>

#include "accelerate/environment.h"
#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

using Clock = ProcessSet::Clock;

// How long the output of a child that has ended is read when something else keeps its pipe open.
constexpr auto kDrainLimit = std::chrono::seconds(2);
// Without a pidfd (kernels before 5.3) exits are looked for at this pace.
constexpr auto kPollWithoutPidfd = std::chrono::milliseconds(10);

std::string errno_text(int code) { return std::strerror(code); }

// None where the kernel has no such descriptors; it is close-on-exec by itself.
Descriptor open_pidfd(pid_t pid) {
  return Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (const auto& text : strings) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

// execvpe searches in the child, where only calls that are safe after fork may be made; so the
// search happens before.
std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) return name;
  const std::string found = find_in_path(name, Environment::process());
  return found.empty() ? name : found;
}

int milliseconds_until(Clock::time_point deadline) {
  const auto left = deadline - Clock::now();
  if (left <= Clock::duration::zero()) return 0;
  const auto milliseconds = std::chrono::ceil<std::chrono::milliseconds>(left).count();
  return static_cast<int>(std::min<long long>(milliseconds, 60'000));
}

// What a child was doing when it failed before its own code ran.
enum class Stage : int { kFolder = 1, kExecute = 2 };

// All that the child needs, made before the fork: after it nothing may allocate.
struct Prepared {
  Prepared(const SpawnOptions& options, bool executes)
      : folder(options.working_directory.string()),
        null_fd(::open("/dev/null", O_RDWR | O_CLOEXEC)) {
    if (!executes) return;
    program = find_program(options.program.empty() ? options.argv[0] : options.program);
    argv = pointers(options.argv);
    environment_strings = options.environment ? *options.environment : environment_with({});
    environment = pointers(environment_strings);
  }

  std::string program;
  std::vector<std::string> environment_strings;
  std::vector<char*> argv;
  std::vector<char*> environment;
  std::string folder;
  Descriptor null_fd;
  // Closed by exec; until then failures go back through it.
  PipePair report;
};

[[noreturn]] void fail_in_child(const Prepared& prepared, Stage stage) {
  const std::array<int, 2> report = {static_cast<int>(stage), errno};
  write_fully(prepared.report.write_end(),
              {reinterpret_cast<const char*>(report.data()), sizeof(report)});
  ::_exit(127);
}

[[noreturn]] void run_in_child(Prepared& prepared, const std::function<int()>& body) {
  prepared.report.close_write();  // tells the parent that the child is on its way
  // An exception must not unwind into what the parent was doing when it forked.
  const auto run = [&]() noexcept { return body(); };
  const int code = run();
  std::fflush(nullptr);
  ::_exit(code);
}

// Waits until the child executes its program, or says why it cannot.
void throw_if_not_started(Prepared& prepared, pid_t pid) {
  prepared.report.close_write();
  std::array<int, 2> failure = {0, 0};
  ssize_t count = 0;
  do {
    count = ::read(prepared.report.read_end(), failure.data(), sizeof(failure));
  } while (count < 0 && errno == EINTR);
  if (count != static_cast<ssize_t>(sizeof(failure))) return;
  ::waitpid(pid, nullptr, 0);
  const std::string reason = errno_text(failure[1]);
  if (failure[0] == static_cast<int>(Stage::kFolder)) {
    throw Error(str("The folder '", prepared.folder, "' cannot be entered: ", reason, "."));
  }
  throw Error(str("'", prepared.program, "' cannot be executed: ", reason, "."));
}

void redirect(int from, int to) {
  if (from < 0) return;
  if (from == to) {
    ::fcntl(to, F_SETFD, 0);
  } else {
    ::dup2(from, to);
  }
}

// A program begins with what every program expects: a signal that we block or ignore would stay
// blocked or ignored in it, and with SIGCHLD ignored it could not learn how its own children end. A
// copy of this process keeps its handlers, but ends when its pipe has no reader.
void restore_signals(bool executes) {
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::signal(SIGPIPE, SIG_DFL);
  if (!executes) return;
  for (const int signal : {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT}) ::signal(signal, SIG_DFL);
}

// The status of a child that has ended. Where the host program ignores SIGCHLD the system throws it
// away; then the exit status is unknown, which must not count as success.
ExitStatus collect(pid_t pid) {
  int status = 0;
  pid_t found = -1;
  do {
    found = ::waitpid(pid, &status, 0);
  } while (found < 0 && errno == EINTR);
  if (found != pid) return {.code = 255, .signal = 0};
  if (WIFSIGNALED(status)) return {.code = -1, .signal = WTERMSIG(status)};
  return {.code = WEXITSTATUS(status), .signal = 0};
}

void announce(int fd) {
  std::array<char, 16> line{'+'};
  char* end = std::to_chars(line.data() + 1, line.data() + line.size() - 1, ::getpid()).ptr;
  *end++ = '\n';
  write_fully(fd, {line.data(), end});
}

// Between fork and exec: system calls only.
void set_up_child(const SpawnOptions& options, const Prepared& prepared, int output, int error,
                  pid_t parent) {
  if (options.new_session) {
    ::setsid();  // makes a process group, too
  } else {
    ::setpgid(0, 0);
  }
  // It ends with the thread that started it.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The parent may have ended before the line above.
  if (::getppid() != parent) ::_exit(128 + SIGKILL);
  if (options.announce_fd >= 0) announce(options.announce_fd);
  if (options.no_input) redirect(prepared.null_fd.get(), STDIN_FILENO);
  if (options.output == StreamTarget::kNull) output = prepared.null_fd.get();
  if (options.error == StreamTarget::kNull) error = prepared.null_fd.get();
  redirect(output, STDOUT_FILENO);
  redirect(options.error == StreamTarget::kWithOutput ? STDOUT_FILENO : error, STDERR_FILENO);
  for (const int fd : options.inherit) ::fcntl(fd, F_SETFD, 0);
  if (!prepared.folder.empty() && ::chdir(prepared.folder.c_str()) != 0)
    fail_in_child(prepared, Stage::kFolder);
}

// In a program that was started without its standard streams a pipe could get their numbers.
Descriptor above_standard_streams(int fd) {
  Descriptor given(fd);
  if (!given || fd > STDERR_FILENO) return given;
  return Descriptor(::fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
}

// Its end to read from, and the one to write to.
std::pair<Descriptor, Descriptor> new_pipe() {
  std::array<int, 2> ends = {-1, -1};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    throw Error(str("No pipe to a child process: ", errno_text(errno),
                    errno == EMFILE ? ". Raise the limit: ulimit -n 4096" : "."));
  }
  return {above_standard_streams(ends[0]), above_standard_streams(ends[1])};
}

std::pair<Descriptor, Descriptor> new_terminal() {
  const auto refuse = [] {
    throw Error(str("No terminal for a child process: ", errno_text(errno), "."));
  };
  auto ours = above_standard_streams(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  std::array<char, 64> name{};
  if (!ours || ::grantpt(ours.get()) != 0 || ::unlockpt(ours.get()) != 0 ||
      ::ptsname_r(ours.get(), name.data(), name.size()) != 0) {
    refuse();
  }
  auto theirs = above_standard_streams(::open(name.data(), O_RDWR | O_NOCTTY | O_CLOEXEC));
  if (!theirs) refuse();
  // Bytes arrive as they were written: our own terminal does the rest.
  termios mode{};
  ::tcgetattr(theirs.get(), &mode);
  ::cfmakeraw(&mode);
  ::tcsetattr(theirs.get(), TCSANOW, &mode);
  winsize size{};
  for (const int fd : {STDOUT_FILENO, STDERR_FILENO}) {
    if (::ioctl(fd, TIOCGWINSZ, &size) == 0) break;
  }
  ::ioctl(theirs.get(), TIOCSWINSZ, &size);
  return {std::move(ours), std::move(theirs)};
}

// A stream of a child: the end that we read, and the one it writes to.
std::pair<Descriptor, Descriptor> open_stream(StreamTarget target,
                                              const std::filesystem::path& file) {
  std::pair<Descriptor, Descriptor> ends;
  if (target == StreamTarget::kPipe) ends = new_pipe();
  if (target == StreamTarget::kTerminal) ends = new_terminal();
  if (target == StreamTarget::kFile) {
    ends.second = Descriptor(::open(file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
    if (!ends.second) {
      throw Error(str("'", file.string(), "' cannot be written: ", errno_text(errno), "."));
    }
  }
  if (ends.first) set_nonblocking(ends.first.get());
  return ends;
}

}  // namespace

std::string ExitStatus::text() const {
  if (signal == 0) return str("exit code ", code);
  const std::string name = signal_name(signal);
  return name.starts_with("SIG") ? str("signal ", signal, " (", name, ")") : name;
}

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name != nullptr ? str("SIG", name) : str("signal ", signal);
}

std::vector<std::string> environment_with(
    std::span<const std::pair<std::string, std::optional<std::string>>> changes) {
  std::map<std::string, std::optional<std::string>, std::less<>> latest;
  for (const auto& [name, value] : changes) latest[name] = value;

  std::vector<std::string> result;
  const Environment now = Environment::process();
  for (const auto& [name, value] : now.variables()) {
    if (!latest.contains(name)) result.push_back(name + "=" + value);
  }
  for (const auto& [name, value] : latest) {
    if (value) result.push_back(name + "=" + *value);
  }
  return result;
}

std::vector<std::string> path_folders(const Environment& environment) {
  auto folders = split(environment.get("PATH").value_or("/usr/local/bin:/usr/bin:/bin"), ':');
  for (auto& folder : folders) {
    if (folder.empty()) folder = ".";
  }
  return folders;
}

std::string find_in_path(const std::string& name, const Environment& environment) {
  for (const auto& folder : path_folders(environment)) {
    const std::string path = folder + "/" + name;
    std::error_code ignored;
    if (::access(path.c_str(), X_OK) == 0 && std::filesystem::is_regular_file(path, ignored)) {
      return path;
    }
  }
  return {};
}

void LineBuffer::append(std::string_view bytes, const Line& line) {
  while (!bytes.empty()) {
    const auto end = bytes.find('\n');
    rest_.append(bytes.substr(0, end));
    if (end == std::string_view::npos) return;
    bytes.remove_prefix(end + 1);
    const std::string complete = std::exchange(rest_, {});
    line(complete);
  }
}

void LineBuffer::finish(const Line& line) {
  if (rest_.empty()) return;
  const std::string last = std::exchange(rest_, {});
  line(last);
}

PipePair::PipePair() { std::tie(read_, write_) = new_pipe(); }

std::string PipePair::read_available() const {
  set_nonblocking(read_.get());
  std::string result;
  std::array<char, 4096> bytes;
  for (;;) {
    const ssize_t count = ::read(read_.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return result;
    result.append(bytes.data(), static_cast<std::size_t>(count));
  }
}

bool write_fully(int fd, std::string_view bytes) noexcept {
  while (!bytes.empty()) {
    const ssize_t count = ::write(fd, bytes.data(), bytes.size());
    if (count < 0 && errno == EAGAIN) {
      pollfd ready{.fd = fd, .events = POLLOUT, .revents = 0};
      ::poll(&ready, 1, -1);
      continue;
    }
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(count));
  }
  return true;
}

std::optional<std::string> output_of(const std::vector<std::string>& argv, StreamTarget error,
                                     std::chrono::seconds limit) {
  std::string output;
  ProcessSet processes(
      [&](std::size_t, ProcessSet::Stream, std::string_view bytes) { output += bytes; },
      ProcessSet::Pieces::kBytes);
  try {
    processes.spawn(
        {.argv = argv, .output = StreamTarget::kPipe, .error = error, .no_input = true});
  } catch (const Error&) {
    return std::nullopt;
  }
  const bool ended = processes.wait_all(Clock::now() + limit);
  return ended && processes.status(0).ok() ? output : "";
}

std::size_t count_threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<std::size_t>(std::distance(begin(tasks), end(tasks)));
}

std::vector<std::string> own_command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!text.empty() && text.back() == '\0') text.pop_back();
  return split(text, '\0');
}

ProcessSet::ProcessSet(Sink sink, Pieces pieces) : sink_(std::move(sink)), pieces_(pieces) {}

ProcessSet::~ProcessSet() {
  signal_all(SIGKILL);
  for (const auto& child : children_) {
    if (!child.status) static_cast<void>(collect(child.pid));
  }
}

std::size_t ProcessSet::spawn(const SpawnOptions& options) {
  if (options.argv.empty()) throw ArgumentError("spawn: the command is empty.");
  return start(options, nullptr);
}

std::size_t ProcessSet::fork(const SpawnOptions& options, const std::function<int()>& body) {
  return start(options, &body);
}

std::size_t ProcessSet::start(const SpawnOptions& options, const std::function<int()>* body) {
  Prepared prepared(options, /*executes=*/body == nullptr);
  auto [our_output, output] = open_stream(options.output, options.output_file);
  auto [our_error, error] = open_stream(options.error, options.error_file);

  // What is buffered here must not be written twice.
  std::cout.flush();
  std::clog.flush();
  std::fflush(nullptr);
  children_.reserve(children_.size() + 1);
  const pid_t parent = ::getpid();
  const auto started = Clock::now();
  const pid_t pid = ::fork();
  if (pid == 0) {
    set_up_child(options, prepared, output.get(), error.get(), parent);
    restore_signals(/*executes=*/body == nullptr);
    if (body != nullptr) run_in_child(prepared, *body);
    ::execve(prepared.program.c_str(), prepared.argv.data(), prepared.environment.data());
    fail_in_child(prepared, Stage::kExecute);
  }
  if (pid < 0) throw Error(str("No child process could be started: ", errno_text(errno), "."));

  // Both sides set the group, so that it exists whichever runs first.
  if (!options.new_session) ::setpgid(pid, pid);
  throw_if_not_started(prepared, pid);

  children_.push_back({.pid = pid,
                       .pidfd = open_pidfd(pid),
                       .output = {std::move(our_output), options.output == StreamTarget::kTerminal},
                       .error = {std::move(our_error), options.error == StreamTarget::kTerminal},
                       .started = started});
  return children_.size() - 1;
}

std::vector<std::size_t> ProcessSet::wait(Clock::time_point deadline, std::span<pollfd> also) {
  const auto called = [&] {
    return std::ranges::any_of(also, [](const pollfd& each) { return each.revents != 0; });
  };
  while (ended_.empty() && (running() > 0 || !also.empty())) {
    poll_once(deadline, also);
    if (called() || Clock::now() >= deadline) break;
  }
  return std::exchange(ended_, {});
}

bool ProcessSet::wait_all(Clock::time_point deadline) {
  while (running() > 0) {
    poll_once(deadline);
    if (running() > 0 && Clock::now() >= deadline) return false;
  }
  return true;
}

void ProcessSet::poll_once(Clock::time_point deadline, std::span<pollfd> also) {
  struct Source {
    std::size_t index;
    std::optional<Stream> stream;
  };
  std::vector<pollfd> fds;
  std::vector<Source> sources;
  bool blind = false;
  for (std::size_t i = 0; i < children_.size(); ++i) {
    const Child& child = children_[i];
    if (child.status) continue;
    blind = blind || !child.pidfd;
    const auto add = [&](const Descriptor& fd, std::optional<Stream> stream) {
      if (!fd) return;
      fds.push_back({.fd = fd.get(), .events = POLLIN, .revents = 0});
      sources.push_back({i, stream});
    };
    if (listens_) {
      add(child.output.fd, Stream::kOutput);
      add(child.error.fd, Stream::kError);
    }
    add(child.pidfd, std::nullopt);
  }
  fds.insert(fds.end(), also.begin(), also.end());
  int timeout = milliseconds_until(deadline);
  if (blind) timeout = std::min(timeout, static_cast<int>(kPollWithoutPidfd.count()));
  if (::poll(fds.data(), fds.size(), timeout) < 0) {
    for (auto& each : fds) each.revents = 0;
  }
  std::copy(fds.end() - static_cast<std::ptrdiff_t>(also.size()), fds.end(), also.begin());

  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (fds[i].revents != 0 && sources[i].stream) read_some(sources[i].index, *sources[i].stream);
  }
  for (std::size_t i = 0; i < children_.size(); ++i) {
    if (!children_[i].status && reap(i)) ended_.push_back(i);
  }
}

void ProcessSet::deliver(std::size_t index, Stream stream, std::string_view bytes) {
  if (!sink_) return;
  if (pieces_ == Pieces::kBytes) return sink_(index, stream, bytes);
  children_[index].pipe(stream).lines.append(
      bytes, [&](std::string_view line) { sink_(index, stream, line); });
}

// The end of a pipe is an empty read; that of a terminal whose other side is closed, an error.
void ProcessSet::read_some(std::size_t index, Stream stream) {
  std::array<char, 16384> bytes;
  const ssize_t count = ::read(children_[index].pipe(stream).fd.get(), bytes.data(), bytes.size());
  if (count > 0) {
    deliver(index, stream, {bytes.data(), static_cast<std::size_t>(count)});
  } else if (count == 0 || (errno != EAGAIN && errno != EINTR)) {
    end_pipe(index, stream);
  }
}

void ProcessSet::end_pipe(std::size_t index, Stream stream) {
  Pipe& pipe = children_[index].pipe(stream);
  pipe.lines.finish([&](std::string_view line) { sink_(index, stream, line); });
  pipe.fd.reset();
}

// While the dead leader is not yet collected its number cannot be reused, so this
// is the moment to end what it has left in its group.
bool ProcessSet::reap(std::size_t index) {
  Child& child = children_[index];
  siginfo_t info{};
  const int found =
      ::waitid(P_PID, static_cast<id_t>(child.pid), &info, WEXITED | WNOHANG | WNOWAIT);
  if (found == 0 && info.si_pid == 0) return false;
  if (found == 0) ::kill(-child.pid, SIGKILL);
  const ExitStatus status = collect(child.pid);
  child.ended = Clock::now();
  drain(index);
  child.status = status;
  child.pidfd.reset();
  return true;
}

// Both pipes together: one that is kept open must not use up the time of the other.
void ProcessSet::drain(std::size_t index) {
  Child& child = children_[index];
  const auto limit = Clock::now() + kDrainLimit;
  while ((child.output.fd || child.error.fd) && Clock::now() < limit) {
    std::array<pollfd, 2> ready{{{.fd = child.output.fd.get(), .events = POLLIN, .revents = 0},
                                 {.fd = child.error.fd.get(), .events = POLLIN, .revents = 0}}};
    ::poll(ready.data(), ready.size(), milliseconds_until(limit));
    if (ready[0].revents != 0) read_some(index, Stream::kOutput);
    if (ready[1].revents != 0) read_some(index, Stream::kError);
  }
  // Left open by something that moved out of the child's group: that output is not ours.
  for (const auto stream : {Stream::kOutput, Stream::kError}) {
    if (child.pipe(stream).fd) end_pipe(index, stream);
  }
}

void ProcessSet::set_terminal_size(unsigned short rows, unsigned short columns) noexcept {
  winsize size{};
  size.ws_row = rows;
  size.ws_col = columns;
  for (const auto& child : children_) {
    for (const Pipe* pipe : {&child.output, &child.error}) {
      if (pipe->terminal && pipe->fd) ::ioctl(pipe->fd.get(), TIOCSWINSZ, &size);
    }
  }
}

void ProcessSet::signal_all(int signal) noexcept {
  for (const auto& child : children_) {
    if (!child.status) ::kill(-child.pid, signal);
  }
}

void ProcessSet::terminate(std::chrono::milliseconds grace) {
  if (running() == 0) return;
  signal_all(SIGTERM);
  // A stopped process sees SIGTERM only when it runs again.
  signal_all(SIGCONT);
  if (wait_all(Clock::now() + grace)) return;
  signal_all(SIGKILL);
  // SIGKILL cannot be refused; only a process stuck in the kernel takes longer.
  static_cast<void>(wait_all(Clock::time_point::max()));
}

std::size_t ProcessSet::running() const noexcept {
  return static_cast<std::size_t>(std::count_if(children_.begin(), children_.end(),
                                                [](const Child& child) { return !child.status; }));
}

const ExitStatus& ProcessSet::status(std::size_t index) const {
  const auto& status = children_.at(index).status;
  if (!status) throw StateError(str("Process ", index, " still runs and has no exit status."));
  return *status;
}

std::chrono::duration<double> ProcessSet::elapsed(std::size_t index) const {
  const Child& child = children_.at(index);
  return (child.status ? child.ended : Clock::now()) - child.started;
}

}  // namespace accelerate::detail::inline core
