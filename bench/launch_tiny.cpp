// A program without Torch that says when it was reached.
#include <time.h>

#include <cstdio>

int main() {
  timespec now = {};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  const double ms = static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) / 1e6;
  std::printf("reached main %.3f\n", ms);
}
