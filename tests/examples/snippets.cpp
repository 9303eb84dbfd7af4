// Code of guides that belongs to no example program, so that it compiles (`make lint` compares).
#include <accelerate/accelerate.h>

namespace docs {

struct Arguments {};
Arguments parse(int argc, char** argv);
void train(const Arguments& arguments);

void options_of_a_call() {
  accelerate::Accelerator accelerator({.gradient_accumulation_steps = 4});
  accelerator.print("ready");
}

accelerate::AcceleratorOptions options_as_a_variable() {
  const accelerate::AcceleratorOptions options{.gradient_accumulation_steps = 4};
  return options;
}

torch::Tensor two_lines_one_collective(const accelerate::PartialState& state,
                                       const torch::Tensor& loss) {
  auto named = accelerate::name_collectives("loss");
  auto all = state.is_main_process() ? accelerate::gather(loss) : accelerate::gather(loss.detach());
  return all;
}

// A function of this name beside `::main` is allowed, and the guide shows the one of a program.
namespace program {
int main(int argc, char** argv) {
  return accelerate::record([&] { train(parse(argc, argv)); });
}
}  // namespace program

}  // namespace docs
