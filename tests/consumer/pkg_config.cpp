// A program that is compiled with what `pkg-config --cflags --libs accelerate` prints.
//
//   pkg_config <version that pkg-config tells>
#include <ATen/ops/ones.h>
#include <accelerate/state.h>
#include <accelerate/version.h>

#include <iostream>

int main(int argc, char** argv) {
  if (argc != 2 || accelerate::kVersion != argv[1]) {
    std::cerr << "the headers are of version " << accelerate::kVersion << "\n";
    return 1;
  }
  const accelerate::PartialState state;
  const auto sum = at::ones({2, 3}).to(state.device()).sum().item<double>();
  std::cout << "pkg-config: " << state.num_processes() << " process, sum " << sum << "\n";
  return sum == 6 ? 0 : 1;
}
