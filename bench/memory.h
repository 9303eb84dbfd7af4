// bench/memory.h - what a process holds, as the system counts it.
#pragma once

#include <fstream>
#include <string>

namespace bench {

inline double bytes_in_status(const std::string& name) {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word && word != name) {
  }
  double kilobytes = 0;
  status >> kilobytes;
  return kilobytes * 1024;
}

/// Beside what is mapped: memory of several processes, which has a fixed size.
inline double private_bytes() { return bytes_in_status("VmRSS:") - bytes_in_status("RssShmem:"); }

/// The most that was held since the last call of `forget_peak`.
inline double peak_private_bytes() {
  return bytes_in_status("VmHWM:") - bytes_in_status("RssShmem:");
}
inline void forget_peak() { std::ofstream("/proc/self/clear_refs") << 5; }

}  // namespace bench
