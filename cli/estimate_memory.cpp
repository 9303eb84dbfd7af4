#include "cli/commands.h"
namespace accelerate::cli {
int estimate_memory(const detail::launch::Arguments& /*arguments*/) { return 1; }
}  // namespace accelerate::cli
