// bench/since_start.h - the age of this process.
#pragma once

#include <time.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

namespace bench {

/// Milliseconds since this process was started, by the kernel's clock (10 ms fine).
inline double milliseconds_since_start() {
  std::ifstream file("/proc/self/stat");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  std::istringstream fields(text.substr(text.rfind(')') + 2));  // the name may contain blanks
  std::string field;
  for (int i = 3; i <= 22; ++i) fields >> field;  // the 22nd field is the start, in clock ticks
  timespec now = {};
  ::clock_gettime(CLOCK_BOOTTIME, &now);
  return now.tv_sec * 1e3 + now.tv_nsec / 1e6 - std::stod(field) * 1e3 / ::sysconf(_SC_CLK_TCK);
}

}  // namespace bench
