#include "support/command.h"

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <thread>

extern char** environ;  // NOLINT

namespace accelerate::test {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr const char* kMark = "ACCELERATE_TEST_MARK";
// How long what a command has started may live on after it, and still count as ended with it: the
// time of a few scheduling rounds on a machine with two busy cores.
constexpr Seconds kAftermath{2.0};

// What launchers and users leave in the environment, and what a test must not inherit.
bool belongs_to_a_launcher(const std::string& name) {
  static const std::set<std::string> names = {
      "RANK",        "WORLD_SIZE",      "LOCAL_RANK",       "LOCAL_WORLD_SIZE", "GROUP_RANK",
      "ROLE_RANK",   "ROLE_NAME",       "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE",  "MASTER_ADDR",
      "MASTER_PORT", "OMP_NUM_THREADS", "PYTHON_EXEC",      "XDG_CACHE_HOME",   "HF_HOME"};
  if (names.contains(name)) return true;
  const auto prefixes = {"ACCELERATE_", "TORCHELASTIC_", "TORCH_ELASTIC_", "SLURM_",
                         "OMPI_",       "PMI_",          "PMIX_",          "MPI_",
                         "MV2_",        "FSDP_",         "GTEST_"};
  return std::any_of(prefixes.begin(), prefixes.end(),
                     [&](const char* prefix) { return name.starts_with(prefix); });
}

std::vector<std::string> environment_of(const CommandOptions& options, const std::string& mark,
                                        const fs::path& folder) {
  std::map<std::string, std::string> variables;
  for (char** each = environ; *each != nullptr; ++each) {
    const std::string text = *each;
    const auto equals = text.find('=');
    if (equals == std::string::npos || belongs_to_a_launcher(text.substr(0, equals))) continue;
    variables[text.substr(0, equals)] = text.substr(equals + 1);
  }
  variables[kMark] = mark;
  variables["TMPDIR"] = (folder / "tmp").string();
  variables["HF_HOME"] = (folder / "home").string();
  for (const auto& [name, value] : options.environment) {
    if (value) {
      variables[name] = *value;
    } else {
      variables.erase(name);
    }
  }
  std::vector<std::string> result;
  for (const auto& [name, value] : variables) result.push_back(name + "=" + value);
  return result;
}

std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) return name;
  const char* path = std::getenv("PATH");
  std::istringstream folders(path != nullptr ? path : "/usr/sbin:/usr/bin:/sbin:/bin");
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string candidate = folder + "/" + name;
    if (::access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return "/usr/sbin/" + name;  // daemons, where PATH is that of a user
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (auto& text : strings) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

std::string contents_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();  // a process that ends while it is read leaves what was read until then
  return std::move(text).str();
}

bool is_number(const std::string& text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

// /proc/PID/environ: what the process was started with, "A=1\0B=2\0". It is empty for the moment
// in which a process changes its program, and such a process must not be missed; a thread of the
// kernel has none and no program either.
std::string variables_of(const fs::path& process) {
  std::string variables = contents_of(process / "environ");
  std::error_code no_program;
  for (int i = 0; i < 50 && variables.empty(); ++i) {
    if (fs::read_symlink(process / "exe", no_program).empty()) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    variables = contents_of(process / "environ");
  }
  return variables;
}

std::vector<pid_t> marked_with(const std::string& mark) {
  const std::string wanted = std::string(kMark) + "=" + mark + '\0';
  std::vector<pid_t> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator("/proc", error)) {
    const std::string name = entry.path().filename().string();
    if (!is_number(name)) continue;
    if (variables_of(entry.path()).find(wanted) == std::string::npos) continue;
    const auto pid = static_cast<pid_t>(std::stol(name));
    if (is_alive(pid)) found.push_back(pid);
  }
  return found;
}

std::string command_line_of(pid_t pid) {
  std::string text = contents_of("/proc/" + std::to_string(pid) + "/cmdline");
  std::replace(text.begin(), text.end(), '\0', ' ');
  return text.substr(0, 160);
}

std::string next_mark() {
  static std::atomic<int> counter = 0;
  return std::to_string(::getpid()) + "-" + std::to_string(counter++);
}

}  // namespace

Folder::Folder() {
  std::string pattern = (fs::temp_directory_path() / "accelerate-test-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary folder");
  path_ = pattern;
}

Folder::~Folder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

// A thread reads what the command writes, so that several commands can be watched at once and none
// waits for its reader.
struct Command::State {
  Folder folder;
  std::string mark = next_mark();
  pid_t pid = -1;
  int pidfd = -1;
  int terminal = -1;
  std::array<int, 2> streams = {-1, -1};
  std::array<int, 2> wake = {-1, -1};
  Clock::time_point started = Clock::now();

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::array<std::string, 2> text;
  std::optional<int> status;  // as waitpid gives it
  Clock::time_point ended;
  bool terminal_closes = false;

  std::thread reader;

  void start(const CommandOptions& options);
  [[noreturn]] void in_child(const CommandOptions& options, const std::string& program,
                             const std::vector<char*>& argv, const std::vector<char*>& variables,
                             const std::array<int, 2>& ends, pid_t parent) const;
  void read_until_end();
  bool take(std::size_t stream);
  void drain();
  void end();
};

void Command::State::in_child(const CommandOptions& options, const std::string& program,
                              const std::vector<char*>& argv, const std::vector<char*>& variables,
                              const std::array<int, 2>& ends, pid_t parent) const {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(126);
  if (!options.terminal) {
    ::setpgid(0, 0);
    const int null = ::open("/dev/null", O_RDONLY);
    ::dup2(null, STDIN_FILENO);
    ::dup2(ends[0], STDOUT_FILENO);
    ::dup2(ends[1], STDERR_FILENO);
  }
  // What the test was started with is not for the command.
  ::close_range(STDERR_FILENO + 1, ~0U, 0);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::signal(SIGPIPE, SIG_DFL);
  const std::string folder = options.working_directory.string();
  if (!folder.empty() && ::chdir(folder.c_str()) != 0) ::_exit(126);
  ::execve(program.c_str(), argv.data(), variables.data());
  ::_exit(127);
}

void Command::State::start(const CommandOptions& options) {
  fs::create_directory(folder.path() / "tmp");
  fs::create_directory(folder.path() / "home");
  auto arguments = options.argv;
  auto variables = environment_of(options, mark, folder.path());
  const auto argv = pointers(arguments);
  const auto environment = pointers(variables);
  const std::string program = find_program(arguments.at(0));
  std::array<int, 2> ends = {-1, -1};
  if (::pipe2(wake.data(), O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
  const pid_t parent = ::getpid();
  if (options.terminal) {
    const winsize size = {.ws_row = 24,
                          .ws_col = static_cast<unsigned short>(options.columns),
                          .ws_xpixel = 0,
                          .ws_ypixel = 0};
    pid = ::forkpty(&terminal, nullptr, nullptr, &size);
    if (pid > 0) ::fcntl(terminal, F_SETFD, FD_CLOEXEC);
    streams[0] = terminal;
  } else {
    for (std::size_t i = 0; i < 2; ++i) {
      std::array<int, 2> pair{};
      if (::pipe2(pair.data(), O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
      streams[i] = pair[0];
      ends[i] = pair[1];
    }
    pid = ::fork();
  }
  if (pid == 0) in_child(options, program, argv, environment, ends, parent);
  if (pid < 0) throw std::runtime_error("no child process");
  for (const int fd : ends) {
    if (fd >= 0) ::close(fd);
  }
  if (!options.terminal) ::setpgid(pid, pid);
  pidfd = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  for (const int fd : streams) {
    if (fd >= 0) ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  }
  started = Clock::now();
  reader = std::thread([this] { read_until_end(); });
}

// False at the end of the stream.
bool Command::State::take(std::size_t stream) {
  std::array<char, 16384> bytes;
  const ssize_t count = ::read(streams[stream], bytes.data(), bytes.size());
  if (count > 0) {
    const std::lock_guard lock(mutex);
    text[stream].append(bytes.data(), static_cast<std::size_t>(count));
    changed.notify_all();
    return true;
  }
  return count < 0 && (errno == EAGAIN || errno == EINTR);
}

// What is still in the pipes once the command has ended.
void Command::State::drain() {
  for (std::size_t i = 0; i < 2; ++i) {
    for (;;) {
      if (streams[i] < 0) break;
      const auto before = text[i].size();
      if (!take(i) || text[i].size() == before) break;
    }
  }
}

void Command::State::read_until_end() {
  for (;;) {
    std::array<pollfd, 4> ready{{{.fd = streams[0], .events = POLLIN, .revents = 0},
                                 {.fd = streams[1], .events = POLLIN, .revents = 0},
                                 {.fd = pidfd, .events = POLLIN, .revents = 0},
                                 {.fd = wake[0], .events = POLLIN, .revents = 0}}};
    ::poll(ready.data(), ready.size(), -1);
    for (std::size_t i = 0; i < 2; ++i) {
      if (ready[i].revents == 0 || take(i)) continue;
      if (streams[i] != terminal) ::close(streams[i]);
      streams[i] = -1;
    }
    if (ready[3].revents != 0) {
      char byte = 0;
      static_cast<void>(!::read(wake[0], &byte, 1));
      const std::lock_guard lock(mutex);
      if (terminal_closes && terminal >= 0) {
        ::close(terminal);
        terminal = streams[0] = -1;
      }
    }
    if (ready[2].revents == 0) continue;
    drain();
    int how = 0;
    ::waitpid(pid, &how, 0);
    const std::lock_guard lock(mutex);
    ended = Clock::now();
    status = how;
    changed.notify_all();
    return;
  }
}

void Command::State::end() {
  for (const pid_t each : marked_with(mark)) ::kill(each, SIGKILL);
  {
    const std::lock_guard lock(mutex);
    if (!status) ::kill(pid, SIGKILL);
  }
  if (reader.joinable()) reader.join();
  // Who was just being started when the others were killed.
  for (int round = 0; round < 20; ++round) {
    const auto rest = marked_with(mark);
    if (rest.empty()) break;
    for (const pid_t each : rest) ::kill(each, SIGKILL);
  }
  for (const int fd :
       {streams[0] == terminal ? -1 : streams[0], streams[1], terminal, pidfd, wake[0], wake[1]}) {
    if (fd >= 0) ::close(fd);
  }
}

Command::Command(const CommandOptions& options) : state_(std::make_unique<State>()) {
  state_->start(options);
}

Command::~Command() {
  if (state_) state_->end();
}

Command::Command(Command&&) noexcept = default;

Command& Command::operator=(Command&& other) noexcept {
  std::swap(state_, other.state_);
  return *this;
}

pid_t Command::pid() const { return state_->pid; }

void Command::signal(int number) const {
  const std::lock_guard lock(state_->mutex);
  if (!state_->status) ::kill(state_->pid, number);
}

void Command::signal_group(int number) const {
  const std::lock_guard lock(state_->mutex);
  if (!state_->status) ::kill(-state_->pid, number);
}

bool Command::takes_signal(int number) const {
  std::ifstream status("/proc/" + std::to_string(pid()) + "/status");
  std::uint64_t taken = 0;
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("SigBlk:") || line.starts_with("SigCgt:")) {
      taken |= std::stoull(line.substr(7), nullptr, 16);
    }
  }
  return (taken >> (number - 1) & 1) != 0;
}

void Command::kill_all() const {
  signal(SIGKILL);
  for (const pid_t each : processes()) ::kill(each, SIGKILL);
}

void Command::type(const std::string& keys) {
  const std::lock_guard lock(state_->mutex);
  static_cast<void>(!::write(state_->terminal, keys.data(), keys.size()));
}

void Command::resize(int columns, int rows) {
  const winsize size = {.ws_row = static_cast<unsigned short>(rows),
                        .ws_col = static_cast<unsigned short>(columns),
                        .ws_xpixel = 0,
                        .ws_ypixel = 0};
  ::ioctl(state_->terminal, TIOCSWINSZ, &size);
}

void Command::close_terminal() {
  const std::lock_guard lock(state_->mutex);
  state_->terminal_closes = true;
  static_cast<void>(!::write(state_->wake[1], "x", 1));
}

bool Command::saw(const std::string& text, int times, Seconds limit) {
  std::unique_lock lock(state_->mutex);
  const auto is_there = [&] {
    return count_of(state_->text[0], text) + count_of(state_->text[1], text) >= times;
  };
  state_->changed.wait_for(lock, patient(limit), [&] { return is_there() || state_->status; });
  return is_there();
}

std::string Command::output() const {
  const std::lock_guard lock(state_->mutex);
  return state_->text[0];
}

std::string Command::error() const {
  const std::lock_guard lock(state_->mutex);
  return state_->text[1];
}

bool Command::running() const {
  const std::lock_guard lock(state_->mutex);
  return !state_->status;
}

Outcome Command::wait(Seconds limit) {
  Outcome outcome;
  {
    std::unique_lock lock(state_->mutex);
    outcome.timed_out =
        !state_->changed.wait_for(lock, patient(limit), [&] { return state_->status.has_value(); });
  }
  if (outcome.timed_out) {
    kill_all();
    state_->reader.join();
  }
  const int status = *state_->status;
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  outcome.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  outcome.output = output();
  outcome.error = error();
  outcome.seconds = Seconds(state_->ended - state_->started).count();
  static_cast<void>(eventually([&] { return processes().empty(); }, kAftermath));
  for (const pid_t each : processes()) {
    outcome.left_behind.push_back("process " + std::to_string(each) + " (" + command_line_of(each) +
                                  ")");
  }
  std::error_code ignored;
  for (const auto& entry : fs::recursive_directory_iterator(temporary_folder(), ignored)) {
    outcome.left_behind.push_back("file " + entry.path().string());
  }
  return outcome;
}

std::vector<pid_t> Command::processes() const { return marked_with(state_->mark); }

fs::path Command::temporary_folder() const { return state_->folder.path() / "tmp"; }

std::string Outcome::text() const {
  std::ostringstream all;
  all << (timed_out ? "killed at the time limit" : "ended with " + std::to_string(shell_code()))
      << " after " << seconds << " s\n--- stdout\n"
      << output << "--- stderr\n"
      << error;
  for (const auto& each : left_behind) all << "--- left: " << each << "\n";
  return std::move(all).str();
}

Outcome run(const CommandOptions& options, Seconds limit) {
  Command command(options);
  return command.wait(limit);
}

std::string built(const std::string& name) {
  const fs::path test = fs::read_symlink("/proc/self/exe");
  return (test.parent_path().parent_path() / name).string();
}

bool is_alive(pid_t pid) {
  const std::string stat = contents_of("/proc/" + std::to_string(pid) + "/stat");
  const auto name_ends = stat.rfind(") ");
  return name_ends != std::string::npos && stat[name_ends + 2] != 'Z' && stat[name_ends + 2] != 'X';
}

std::vector<int> ports_in_tables(const std::string& tables) {
  std::vector<int> ports;
  for (const auto& line : lines_of(tables)) {
    std::istringstream fields(line);
    std::string number;
    std::string local;
    std::string remote;
    std::string state;
    fields >> number >> local >> remote >> state;
    if (state != "0A") continue;  // LISTEN
    ports.push_back(std::stoi(local.substr(local.rfind(':') + 1), nullptr, 16));
  }
  std::sort(ports.begin(), ports.end());
  return ports;
}

std::vector<int> listening_ports() {
  return ports_in_tables(contents_of("/proc/self/net/tcp") + contents_of("/proc/self/net/tcp6"));
}

bool is_listening(int port) {
  const auto ports = listening_ports();
  return std::find(ports.begin(), ports.end(), port) != ports.end();
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

int count_of(const std::string& text, const std::string& what) {
  int count = 0;
  for (auto at = text.find(what); at != std::string::npos; at = text.find(what, at + what.size())) {
    ++count;
  }
  return count;
}

}  // namespace accelerate::test
