#include "launch/guard.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <set>

#include "core/text.h"

namespace accelerate::detail {
namespace {

constexpr const char* kFarewell = "bye";

/// What the guard has been told so far.
struct Charge {
  std::set<pid_t> groups;
  std::set<std::string> folders;
  bool farewell = false;

  void hear(std::string_view line) {
    if (line == kFarewell) {
      farewell = true;
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
  // In a session of its own and deaf: no key and no hang-up of the terminal reaches it.
  ::setsid();
  sigset_t all;
  ::sigfillset(&all);
  ::sigprocmask(SIG_BLOCK, &all, nullptr);
  ::prctl(PR_SET_NAME, "accelerate-grd");
  // Nobody shall wait for a pipe that only we hold open.
  ::dup2(fd, STDIN_FILENO);
  ::close_range(STDOUT_FILENO, ~0U, 0);
  Charge charge;
  LineBuffer lines;
  std::array<char, 4096> bytes;
  for (;;) {
    const ssize_t count = ::read(STDIN_FILENO, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    lines.append({bytes.data(), static_cast<std::size_t>(count)},
                 [&](std::string_view line) { charge.hear(line); });
  }
  if (!charge.farewell) charge.clean_up();
  ::_exit(0);
}

}  // namespace

Guard::Guard() {
  pid_ = ::fork();
  if (pid_ == 0) {
    pipe_.close_write();
    watch(pipe_.read_end());
  }
  pipe_.close_read();
}

Guard::~Guard() {
  tell(kFarewell);
  pipe_.close_write();
  if (pid_ > 0) {
    while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
}

void Guard::tell(const std::string& line) {
  if (pid_ > 0) write_fully(pipe_.write_end(), line + "\n");
}

void Guard::add_group(pid_t group) { tell(str("+", group)); }
void Guard::forget_group(pid_t group) { tell(str("-", group)); }
void Guard::add_folder(const std::filesystem::path& folder) { tell("d" + folder.string()); }

}  // namespace accelerate::detail
