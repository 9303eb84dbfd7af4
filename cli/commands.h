// cli/commands.h - the sub-commands of `accelerate`. Each gets the words after its name and
// returns the exit code; main prints the errors that it throws.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace accelerate::cli {

int launch(std::span<const std::string> words);
int checkpoint(std::span<const std::string> words);
int completion(std::span<const std::string> words);
int merge_weights(std::span<const std::string> words);

/// Prints results to stdout.
void print(std::string_view text);
/// Prints "accelerate: message" to stderr.
void print_message(std::string_view message);

}  // namespace accelerate::cli
