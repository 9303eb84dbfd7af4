// cli/commands.h - the sub-commands of `accelerate`. Each gets its parsed arguments and returns the
// exit code; main prints the help, and the errors that a command throws.
#pragma once

#include <string_view>

#include "accelerate/value.h"
#include "launch/command.h"

namespace accelerate::cli {

/// Documented in docs/launching.md.
enum ExitCode { kOk = 0, kFailure = 1, kWrongInput = 2, kPeerGone = 70 };

int launch(const detail::launch::Arguments& arguments);
int config(const detail::launch::Arguments& arguments);
int env(const detail::launch::Arguments& arguments);
int estimate_memory(const detail::launch::Arguments& arguments);
int to_fsdp2(const detail::launch::Arguments& arguments);
int checkpoint(const detail::launch::Arguments& arguments);
int merge_weights(const detail::launch::Arguments& arguments);
int monitor(const detail::launch::Arguments& arguments);
int test(const detail::launch::Arguments& arguments);
int completion(const detail::launch::Arguments& arguments);
int tpu_config(const detail::launch::Arguments& arguments);

/// Prints results to stdout.
void print(std::string_view text);
/// As JSON, indented; bytes that are not UTF-8 become U+FFFD.
void print_json(const Value& value);
/// Prints "accelerate: message" to stderr.
void print_message(std::string_view message);

}  // namespace accelerate::cli
