// cli/commands.h - the sub-commands of `accelerate`. Each gets the words behind its name and
// returns the exit code; what it throws is shown by main.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace accelerate::cli {

int launch(std::span<const std::string> words);
int completion(std::span<const std::string> words);

/// To stdout; results only.
void print(std::string_view text);
/// "accelerate: message" to stderr.
void complain(std::string_view message);

}  // namespace accelerate::cli
