// tests/support/patience.h - how long a test waits on this machine, as busy as it is.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <thread>

namespace accelerate::test {

using Seconds = std::chrono::duration<double>;

/// Time limits are for a machine that does nothing else: longer under sanitizers and beside others.
[[nodiscard]] inline Seconds patient(Seconds limit) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  limit *= 5;
#endif
  // More threads that want to run than there are cores: each gets a part of the time. The average
  // is of a minute and knows nothing of what has just begun; those that run now are in the fourth
  // field.
  double load = 0;
  double older = 0;
  double running = 0;
  std::ifstream("/proc/loadavg") >> load >> older >> older >> running;
  const double share = std::max(load, running) / std::max(1U, std::thread::hardware_concurrency());
  return limit * std::clamp(share, 1.0, 10.0);
}

}  // namespace accelerate::test
