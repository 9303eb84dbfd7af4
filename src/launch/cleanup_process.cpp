#include "launch/cleanup_process.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <set>

#include "core/text.h"

namespace accelerate::detail::launch {
namespace {

constexpr const char* kDone = "done";

/// The process groups and folders of the launch.
struct Registered {
  std::set<pid_t> groups;
  std::set<std::string> folders;
  bool done = false;

  void apply(std::string_view line) {
    if (line == kDone) {
      done = true;
    } else if (line.starts_with("+")) {
      groups.insert(std::atoi(std::string(line.substr(1)).c_str()));
    } else if (line.starts_with("-")) {
      groups.erase(std::atoi(std::string(line.substr(1)).c_str()));
    } else if (line.starts_with("d")) {
      folders.emplace(line.substr(1));
    }
  }

  void clean_up() const {
    for (const pid_t group : groups) ::kill(-group, SIGKILL);
    std::error_code ignored;
    for (const auto& folder : folders) std::filesystem::remove_all(folder, ignored);
  }
};

[[noreturn]] void watch(int fd) {
  // A session of its own and blocked signals: the terminal's keys and its end do not reach it.
  ::setsid();
  sigset_t all;
  ::sigfillset(&all);
  ::sigprocmask(SIG_BLOCK, &all, nullptr);
  ::prctl(PR_SET_NAME, "accelerate-cln");
  // No pipe of the launcher stays open because of this process.
  ::dup2(fd, STDIN_FILENO);
  ::close_range(STDOUT_FILENO, ~0U, 0);
  Registered registered;
  LineBuffer lines;
  std::array<char, 4096> bytes;
  for (;;) {
    const ssize_t count = ::read(STDIN_FILENO, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    lines.append({bytes.data(), static_cast<std::size_t>(count)},
                 [&](std::string_view line) { registered.apply(line); });
  }
  if (!registered.done) registered.clean_up();
  ::_exit(0);
}

}  // namespace

CleanupProcess::CleanupProcess() {
  pid_ = ::fork();
  if (pid_ == 0) {
    pipe_.close_write();
    watch(pipe_.read_end());
  }
  pipe_.close_read();
}

CleanupProcess::~CleanupProcess() {
  send(kDone);
  pipe_.close_write();
  if (pid_ > 0) {
    while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
}

void CleanupProcess::send(const std::string& line) {
  if (pid_ > 0) write_fully(pipe_.write_end(), line + "\n");
}

void CleanupProcess::forget_group(pid_t group) { send(str("-", group)); }
void CleanupProcess::add_folder(const std::filesystem::path& folder) {
  send("d" + folder.string());
}

}  // namespace accelerate::detail::launch
