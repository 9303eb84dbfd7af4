// src/core/signals_blocked.h - threads of the library that take no signals of the program.
#pragma once

#include <csignal>

namespace accelerate::detail::inline core {

/// Signals are the program's business: threads that start while this lives get none.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace accelerate::detail::inline core
