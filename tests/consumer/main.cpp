// The smallest program that uses the library: one process gathers a tensor from itself.
#include <accelerate/accelerate.h>

#include <iostream>

int main() {
  accelerate::PartialState state({.cpu = true});
  const auto gathered = accelerate::gather(torch::arange(4));
  std::cout << state << "sum " << gathered.sum().item<int64_t>() << '\n';
  return gathered.sum().item<int64_t>() == 6 ? 0 : 1;
}
