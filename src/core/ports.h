// src/core/ports.h - which TCP ports of this host are taken. The public side is
// accelerate/checks.h.
#pragma once

namespace accelerate::detail::inline core {

/// The default port of a run.
inline constexpr int kDefaultPort = 29500;

/// The variable in which launchers tell rank 0 the number of the socket that they have bound to its
/// port. It listens, so that no other process takes the port before rank 0 serves there.
inline constexpr const char* kListenFdVariable = "ACCELERATE_MASTER_LISTEN_FD";

}  // namespace accelerate::detail::inline core
