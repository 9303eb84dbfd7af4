// From the start of a process to its first gathered tensor; startup.py does the same in Python.
#include <accelerate/accelerate.h>
#include <time.h>
#include <unistd.h>

#include <fstream>
#include <iostream>
#include <sstream>
#include <string>

namespace {

/// Milliseconds since this process was started, by the kernel's clock (10 ms fine).
double milliseconds_since_start() {
  std::ifstream file("/proc/self/stat");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  std::istringstream fields(text.substr(text.rfind(')') + 2));  // the name may contain blanks
  std::string field;
  for (int i = 3; i <= 22; ++i) fields >> field;  // the 22nd field is the start, in clock ticks
  timespec now = {};
  ::clock_gettime(CLOCK_BOOTTIME, &now);
  return now.tv_sec * 1e3 + now.tv_nsec / 1e6 - std::stod(field) * 1e3 / ::sysconf(_SC_CLK_TCK);
}

double resident_megabytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmRSS:")) return std::stod(line.substr(6)) / 1024;
  }
  return 0;
}

}  // namespace

int main() {
  accelerate::PartialState state;
  const auto gathered = accelerate::gather(torch::ones({4}, state.device()));
  const double sum = gathered.sum().item<double>();
  if (!state.is_main_process() || sum != 4 * state.num_processes()) return 0;
  std::cout << "start to first gather\t" << milliseconds_since_start() << "\tms\n"
            << "resident memory then\t" << resident_megabytes() << "\tMB\n";
}
