#include "accelerate/errors.h"

namespace accelerate {

// Out of line, so that each class has one vtable and one type_info, and an exception thrown in the
// library is caught by type in the program.
Error::~Error() = default;
ConfigError::~ConfigError() = default;
ArgumentError::~ArgumentError() = default;
StateError::~StateError() = default;
CommError::~CommError() = default;
DistributedOperationException::~DistributedOperationException() = default;
CheckpointError::~CheckpointError() = default;
FormatError::~FormatError() = default;
StateDictMismatch::~StateDictMismatch() = default;
UnsupportedError::~UnsupportedError() = default;

}  // namespace accelerate
