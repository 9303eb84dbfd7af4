// src/core/process_variables.h - edits of the process's environment by the library itself.
#pragma once

#include <optional>
#include <string>

namespace accelerate::detail::inline core {

/// Sets a variable of this process, or removes it when there is no value. Waits for
/// other threads of this library that read or edit the environment: `setenv` itself knows no locks.
void set_process_variable(const std::string& name, const std::optional<std::string>& value);

}  // namespace accelerate::detail::inline core
