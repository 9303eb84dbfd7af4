// src/core/ports.h - which TCP ports of this host are taken. The public side is
// accelerate/checks.h.
#pragma once

namespace accelerate::detail {

/// The port of a run that nobody gave one.
inline constexpr int kDefaultPort = 29500;

/// Throws `ArgumentError` unless the number is a TCP port (0 counts: the system chooses).
void check_port_number(int port);

}  // namespace accelerate::detail
