// accelerate completion bash|zsh|fish
#include "accelerate/errors.h"
#include "cli/commands.h"
#include "launch/help.h"

namespace accelerate::cli {

int completion(std::span<const std::string> words) {
  constexpr std::string_view kUsage =
      "usage: accelerate completion bash|zsh|fish\n\n"
      "Prints the completion script of a shell. To use it:\n"
      "  bash  source <(accelerate completion bash)      in ~/.bashrc\n"
      "  zsh   source <(accelerate completion zsh)       in ~/.zshrc, after compinit\n"
      "  fish  accelerate completion fish | source       in ~/.config/fish/config.fish\n";
  if (words.size() == 1 && (words[0] == "--help" || words[0] == "-h")) {
    print(kUsage);
    return 0;
  }
  if (words.size() != 1) {
    throw ConfigError("Name one shell: accelerate completion bash, zsh or fish.");
  }
  print(detail::launch::completion_script(words[0]));
  return 0;
}

}  // namespace accelerate::cli
