// accelerate completion bash|zsh|fish
#include "cli/commands.h"
#include "commands/help.h"

namespace accelerate::cli {

int completion(const detail::launch::Arguments& arguments) {
  print(detail::commands::completion_script(arguments.operands.front()));
  return 0;
}

}  // namespace accelerate::cli
