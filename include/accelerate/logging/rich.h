// accelerate/logging/rich.h - uncaught exceptions shown with colours and their stack.
#pragma once

#include "accelerate/api.h"

namespace accelerate::rich {

/// Where ACCELERATE_ENABLE_RICH is true: an uncaught exception is shown as type, message
/// and stack before the program ends as it would have ended anyway. Colours where stderr is a
/// terminal and NO_COLOR is not set. Else nothing happens. A `PartialState` calls this when it is
/// made; call it first in `main` to see exceptions before that too.
ACCELERATE_API void install();

}  // namespace accelerate::rich
