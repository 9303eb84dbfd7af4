// cli/torch/self_test.h - the program that `accelerate test` starts under the launcher.
#pragma once

namespace accelerate::detail {

/// Collective. Runs every check and prints a line for each on the main process. Ends on all
/// processes with the first check that fails on any, with a message to stderr and to the launcher.
/// Returns the exit code.
[[nodiscard]] int self_test();

}  // namespace accelerate::detail
