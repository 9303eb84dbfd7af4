// When a launched process reaches `main`, and when its process group is ready; launch.py does the
// same in Python, launches.py starts both and compares.
#include <accelerate/accelerate.h>
#include <time.h>

#include <cstdio>
#include <cstdlib>

namespace {

// CLOCK_MONOTONIC is one clock for all processes of a machine.
double now_ms() {
  timespec now = {};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) / 1e6;
}

}  // namespace

int main() {
  const double main_ms = now_ms();
  accelerate::PartialState state;
  state.wait_for_everyone();
  std::printf("reached main %.3f group %.3f\n", main_ms, now_ms());
  std::fflush(stdout);
}
