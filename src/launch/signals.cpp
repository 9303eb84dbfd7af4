#include "launch/signals.h"

#include <sys/signalfd.h>
#include <unistd.h>

namespace accelerate::detail::launch {
namespace {

bool is_ignored(int signal) {
  struct sigaction action{};
  return ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

}  // namespace

SignalQueue::SignalQueue(const std::vector<int>& signals) {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int signal : signals) {
    if (signal == SIGHUP && is_ignored(SIGHUP)) continue;
    // Shells let background commands ignore SIGINT; a SIGINT sent to us is intended.
    if (is_ignored(signal)) ::signal(signal, SIG_DFL);
    ::sigaddset(&set, signal);
  }
  for (const int signal : {SIGTSTP, SIGCONT, SIGWINCH, SIGUSR1}) ::sigaddset(&set, signal);
  ::sigprocmask(SIG_BLOCK, &set, &before_);
  pipe_before_ = ::signal(SIGPIPE, SIG_IGN);
  fd_ = Descriptor(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
}

SignalQueue::~SignalQueue() {
  ::signal(SIGPIPE, pipe_before_);
  ::sigprocmask(SIG_SETMASK, &before_, nullptr);
}

std::optional<int> SignalQueue::next() {
  signalfd_siginfo info{};
  if (::read(fd_.get(), &info, sizeof info) != static_cast<ssize_t>(sizeof info)) {
    return std::nullopt;
  }
  return static_cast<int>(info.ssi_signo);
}

}  // namespace accelerate::detail::launch
