// src/core/ports.h - which TCP ports of this host are taken. The public side is
// accelerate/checks.h.
#pragma once

namespace accelerate::detail {

/// The port of a run that nobody gave one.
inline constexpr int kDefaultPort = 29500;

/// The variable in which launchers tell rank 0 the number of the socket that they have bound to its
/// port. It listens, so that nobody can take the port before rank 0 serves there.
inline constexpr const char* kListenFdVariable = "ACCELERATE_MASTER_LISTEN_FD";

/// Throws `ArgumentError` unless the number is a TCP port (0 counts: the system chooses).
void check_port_number(int port);

}  // namespace accelerate::detail
