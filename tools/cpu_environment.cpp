// Prints the variables, as NAME=VALUE, with which Python's torch works on this processor: what the
// library does for its own process when it is loaded (src/core/cpu_features.h), for programs that
// do not load it. `make interop` and `make bench` export them.
#include <cstdlib>
#include <iostream>

#include "core/cpu_features.h"

int main() {
  accelerate::detail::avoid_amx_without_palettes();
  if (const char* isa = std::getenv(accelerate::detail::kOnednnIsaVariable)) {
    std::cout << accelerate::detail::kOnednnIsaVariable << '=' << isa << '\n';
  }
}
