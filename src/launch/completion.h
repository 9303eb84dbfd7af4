// src/launch/completion.h - completion scripts for shells, made from the table of flags.
#pragma once

#include <string>
#include <string_view>

namespace accelerate::detail {

/// The script for "bash", "zsh" or "fish". Throws `ConfigError` for another shell.
[[nodiscard]] std::string completion_script(std::string_view shell);

}  // namespace accelerate::detail
