#include <vector>

#include "accelerate/errors.h"
#include "core/text.h"
#include "launch/flags.h"
#include "launch/help.h"

namespace accelerate::detail::launch {
namespace {

std::vector<std::string> command_names() {
  std::vector<std::string> names;
  for (const auto& command : subcommands()) {
    if (command.instead.empty()) names.emplace_back(command.name);
  }
  return names;
}

template <class F>
void for_each_shown_flag(F&& f) {
  for_each_flag([&](const Flag& flag) {
    if (!flag.file_only) f(flag);
  });
}

// The words that shells offer after a flag; "" if any value is valid.
std::string words_for(const Flag& flag) {
  if (flag.kind == FlagKind::kTruth) return "true false";
  return std::string(flag.choices.empty() ? flag.suggestions : flag.choices);
}

std::string without(std::string_view text, std::string_view unwanted) {
  std::string result;
  for (const char c : text) {
    if (unwanted.find(c) == std::string_view::npos) result += c;
  }
  return result;
}

std::string bash_script() {  // NOLINT(readability-function-size): the script is one text
  std::vector<std::string> flags;
  std::vector<std::string> valued;
  std::string values;
  for_each_shown_flag([&](const Flag& flag) {
    const std::string name = str("--", flag.name);
    const std::string pattern = flag.short_name ? str(name, "|-", flag.short_name) : name;
    flags.push_back(name);
    if (flag.takes_value()) valued.push_back(pattern);
    if (const auto words = words_for(flag); !words.empty()) {
      values += str("    ", pattern, ") words='", words, "' ;;\n");
    }
  });
  return str(R"(# bash completion of accelerate: source <(accelerate completion bash)
_accelerate() {
  local cur=${COMP_WORDS[COMP_CWORD]} command=${COMP_WORDS[1]} i=2 word flag= words=
  COMPREPLY=()
  [[ ${COMP_WORDS[0]##*/} == accelerate-launch ]] && command=launch i=1
  if (( i == 2 && COMP_CWORD == 1 )); then
    COMPREPLY=($(compgen -W ')",
             join(command_names(), " "), R"(' -- "$cur"))
    return
  fi
  case $command in
    launch) ;;
    checkpoint)
      if (( COMP_CWORD == 2 )); then
        COMPREPLY=($(compgen -W show -- "$cur"))
      elif [[ $cur == -* ]]; then
        COMPREPLY=($(compgen -W '--json --help' -- "$cur"))
      fi
      return ;;
    completion) COMPREPLY=($(compgen -W 'bash zsh fish' -- "$cur")); return ;;
    merge-weights)
      if [[ $cur == -* ]]; then
        COMPREPLY=($(compgen -W '--unsafe_serialization --remove_checkpoint_dir --help' -- "$cur"))
      fi
      return ;;
    *) return ;;
  esac
  # bash cuts --flag=value into three words.
  for (( ; i < COMP_CWORD; i++ )); do
    word=${COMP_WORDS[i]}
    if [[ $word == = ]]; then
      flag=${flag:-${COMP_WORDS[i-1]}}
      continue
    fi
    if [[ -n $flag ]]; then
      flag=
      continue
    fi
    [[ $word == --* ]] && word=--$(tr - _ <<<"${word#--}")
    case $word in
      )",
             join(valued, "|"), R"() flag=$word ;;
      -*) ;;
      *) return ;;
    esac
  done
  if [[ $cur == = ]]; then
    flag=${flag:-${COMP_WORDS[COMP_CWORD-1]}}
    cur=
  fi
  case $flag in
    '')
      [[ $cur == -* ]] && COMPREPLY=($(compgen -W ')",
             join(flags, " "), R"(' -- "$cur"))
      return ;;
)",
             values, R"(  esac
  [[ -n $words ]] && COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -o default -F _accelerate accelerate accelerate-launch
)");
}

std::string zsh_action(const Flag& flag) {
  if (const auto words = words_for(flag); !words.empty()) return str(":word:(", words, ")");
  if (flag.value_name == "FILE") return ":file:_files";
  if (flag.value_name == "DIR") return ":folder:_files -/";
  return ":value: ";
}

std::string zsh_script() {
  std::string specs;
  for_each_shown_flag([&](const Flag& flag) {
    const std::string help = str("[", without(flag.help, "[]':`\"$\\"), "]");
    const std::string repeat = flag.kind == FlagKind::kTexts ? "*" : "";
    std::string tail;
    if (flag.takes_value()) tail = zsh_action(flag);
    specs +=
        str("    '", repeat, "--", flag.name, flag.takes_value() ? "=" : "", help, tail, "'\n");
    if (flag.short_name != '\0') specs += str("    '-", flag.short_name, help, tail, "'\n");
  });
  return str(R"(#compdef accelerate accelerate-launch
# zsh completion of accelerate: source <(accelerate completion zsh)
_accelerate_launch() {
  local -a flags=(
)",
             specs, R"(  )
  _arguments -S -s $flags '(-)1:program:_files' '*::arguments:_files'
}
_accelerate() {
  if [[ ${words[1]:t} == accelerate-launch ]]; then
    _accelerate_launch
  elif (( CURRENT == 2 )); then
    compadd -- )",
             join(command_names(), " "), R"(
  else
    shift words
    (( CURRENT-- ))
    case $words[1] in
      launch) _accelerate_launch ;;
      checkpoint)
        if (( CURRENT == 2 )); then compadd -- show
        else _arguments '--json[one JSON object]' '--help[how to use it]' '*:file:_files'; fi ;;
      completion) compadd -- bash zsh fish ;;
      merge-weights)
        _arguments '--unsafe_serialization[write pytorch_model.bin]' \
          '--remove_checkpoint_dir[remove the checkpoint after success]' '--help[how to use it]' '*:folder:_files -/' ;;
    esac
  fi
}
if [[ ${funcstack[1]} == _accelerate ]]; then
  _accelerate "$@"
elif (( $+functions[compdef] )); then
  compdef _accelerate accelerate accelerate-launch
fi
)");
}

std::string fish_script() {
  std::string out =
      "# fish completion of accelerate: accelerate completion fish | source\n"
      "complete -c accelerate -f -n __fish_use_subcommand\n";
  for (const auto& command : subcommands()) {
    if (!command.instead.empty()) continue;
    out += str("complete -c accelerate -n __fish_use_subcommand -a ", command.name, " -d '",
               without(command.help, "'\\"), "'\n");
  }
  out +=
      "complete -c accelerate -f -n '__fish_seen_subcommand_from completion' -a 'bash zsh fish'\n"
      "complete -c accelerate -n '__fish_seen_subcommand_from checkpoint; and not "
      "__fish_seen_subcommand_from show' -f -a show\n"
      "complete -c accelerate -n '__fish_seen_subcommand_from show' -l json -d 'one JSON object'\n"
      "complete -c accelerate -n '__fish_seen_subcommand_from merge-weights' -l "
      "unsafe_serialization -d 'write pytorch_model.bin'\n"
      "complete -c accelerate -n '__fish_seen_subcommand_from merge-weights' -l "
      "remove_checkpoint_dir -d 'remove the checkpoint after success'\n";
  for (const auto* who :
       {"accelerate -n '__fish_seen_subcommand_from launch'", "accelerate-launch"}) {
    for_each_shown_flag([&](const Flag& flag) {
      out += str("complete -c ", who, " -l ", flag.name);
      if (flag.short_name != '\0') out += str(" -s ", flag.short_name);
      const auto words = words_for(flag);
      if (flag.takes_value() && !words.empty()) out += str(" -x -a '", words, "'");
      const bool file = flag.value_name == "FILE" || flag.value_name == "DIR";
      if (flag.takes_value() && words.empty()) out += file ? " -r -F" : " -x";
      out += str(" -d '", without(flag.help, "'\\"), "'\n");
    });
  }
  return out;
}

}  // namespace

std::string completion_script(std::string_view shell) {
  if (shell == "bash") return bash_script();
  if (shell == "zsh") return zsh_script();
  if (shell == "fish") return fish_script();
  throw ConfigError(
      str("There is no completion for '", shell, "'. Choose one of: bash, zsh, ", "fish."));
}

}  // namespace accelerate::detail::launch
