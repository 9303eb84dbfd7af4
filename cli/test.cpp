// accelerate test: launches the self-test of accelerate-torch as any other program.
#include "accelerate/errors.h"
#include "cli/commands.h"
#include "launch/store_process.h"

namespace accelerate::cli {

int test(const detail::launch::Arguments& arguments) {
  const auto program = detail::launch::find_torch_helper();
  if (program.empty()) {
    throw Error(
        "`accelerate test` needs the program accelerate-torch, which is neither beside accelerate "
        "nor in PATH. `make install` installs both.");
  }
  auto launched = arguments;  // --config_file
  launched.operands = {program, "self-test"};
  return launch(launched);
}

}  // namespace accelerate::cli
