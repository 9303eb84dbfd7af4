// src/core/processes.h - other processes of this host.
#pragma once

#include <string>

namespace accelerate::detail::inline core {

/// "running", "stopped", "a zombie", "waiting for a device", or "gone".
[[nodiscard]] std::string process_state(int pid);

/// The same for two processes exactly if each can see the other: this boot of this machine, and the
/// namespace of process numbers.
[[nodiscard]] std::string host_identity();

}  // namespace accelerate::detail::inline core
