// src/state/store_server.h - the store of a job, served by a process that is not one of its ranks.
#pragma once

#include "accelerate/api.h"

namespace accelerate::detail::state {

/// Serves a c10d store on a socket that another process has bound, in the background, until this
/// process ends. Returns the port.
///
/// Throws `ConfigError` when `listen_fd` is not a TCP socket that listens, `CommError` when it
/// cannot be served.
ACCELERATE_API int hold_store(int listen_fd);

}  // namespace accelerate::detail::state
