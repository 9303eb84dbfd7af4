// From the start of a process to its first gathered tensor; startup.py does the same in Python.
#include <accelerate/accelerate.h>

#include <fstream>
#include <iostream>
#include <string>

#include "since_start.h"

namespace {

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
  std::cout << "start to first gather\t" << bench::milliseconds_since_start() << "\tms\n"
            << "resident memory then\t" << resident_megabytes() << "\tMB\n";
}
