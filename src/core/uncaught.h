// src/core/uncaught.h - how a process that belongs to a group ends by an exception nobody catches.
#pragma once

#include "accelerate/errors.h"

namespace accelerate::detail {

/// Writes the error down and ends the process with the code that says: ranks disagree, or one is
/// missing.
[[noreturn]] void end_with_error(const CommError& error);

/// From now on an uncaught `CommError` ends this process as above. Of other exceptions the
/// `failure_hook` hears before they end it as ever.
void handle_uncaught_exceptions();

}  // namespace accelerate::detail
