#include <vector>

#include "accelerate/errors.h"
#include "commands/command_table.h"
#include "commands/help.h"
#include "core/text.h"

namespace accelerate::detail::commands {
namespace {

using launch::Flag;
using launch::FlagKind;

std::vector<std::string> names(std::string_view prefix = "") {
  std::vector<std::string> names;
  for (const auto& command : command_table()) names.push_back(str(prefix, command.name));
  return names;
}

std::vector<const Flag*> shown_flags(const Command& command) {
  std::vector<const Flag*> flags;
  for (const Flag& flag : command.flags()) {
    if (!flag.file_only) flags.push_back(&flag);
  }
  return flags;
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

// The words of one command: its flags, those that take a value, and its operand.
std::string bash_words(const Command& command) {
  std::vector<std::string> flags;
  std::string valued = " ";
  for (const Flag* flag : shown_flags(command)) {
    flags.push_back(str("--", flag->name));
    if (!flag->takes_value()) continue;
    valued += str("--", flag->name, " ");
    if (flag->short_name != '\0') valued += str("-", flag->short_name, " ");
  }
  return str("    ", command.name, ")\n      flags='", join(flags, " "), "'\n      valued='",
             valued, "'\n      operands='", command.operand.choices, "' ;;\n");
}

std::string bash_values(const Command& command) {
  std::string values;
  for (const Flag* flag : shown_flags(command)) {
    const auto words = words_for(*flag);
    if (words.empty()) continue;
    values += str("    ", command.name, ":--", flag->name);
    if (flag->short_name != '\0') values += str("|", command.name, ":-", flag->short_name);
    values += str(") words='", words, "' ;;\n");
  }
  return values;
}

std::string bash_script() {  // NOLINT(readability-function-size): the script is one text
  std::string words;
  std::string values;
  for (const auto& command : command_table()) {
    words += bash_words(command);
    values += bash_values(command);
  }
  return str(R"(# bash completion of accelerate: source <(accelerate completion bash)
_accelerate() {
  local cur=${COMP_WORDS[COMP_CWORD]} command=${COMP_WORDS[1]} i=2 word flag= words= flags= valued= operands=
  COMPREPLY=()
  [[ ${COMP_WORDS[0]##*/} == accelerate-* ]] && command=${COMP_WORDS[0]##*accelerate-} i=1
  if (( i == 2 && COMP_CWORD == 1 )); then
    COMPREPLY=($(compgen -W ')",
             join(names(), " "), R"(' -- "$cur"))
    return
  fi
  case $command in
)",
             words, R"(    *) return ;;
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
    if [[ $valued == *" $word "* ]]; then
      flag=$word
    elif [[ $word != -* ]]; then
      [[ $command == launch ]] && return
      operands=
    fi
  done
  if [[ $cur == = ]]; then
    flag=${flag:-${COMP_WORDS[COMP_CWORD-1]}}
    cur=
  fi
  case $command:$flag in
    *:)
      words=$operands
      [[ $cur == -* ]] && words=$flags ;;
)",
             values, R"(  esac
  [[ -n $words ]] && COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -o default -F _accelerate accelerate )",
             join(names("accelerate-"), " "), "\n");
}

std::string zsh_action(const Flag& flag) {
  if (const auto words = words_for(flag); !words.empty()) return str(":word:(", words, ")");
  if (flag.value_name == "FILE") return ":file:_files";
  if (flag.value_name == "DIR") return ":folder:_files -/";
  return ":value: ";
}

std::string zsh_function(const Command& command) {
  std::string specs;
  for (const Flag* flag : shown_flags(command)) {
    const std::string help = str("[", without(flag->help, "[]':`\"$\\"), "]");
    const std::string repeat = flag->kind == FlagKind::kTexts ? "*" : "";
    std::string tail;
    if (flag->takes_value()) tail = zsh_action(*flag);
    specs +=
        str("    '", repeat, "--", flag->name, flag->takes_value() ? "=" : "", help, tail, "'\n");
    if (flag->short_name != '\0') specs += str("    '-", flag->short_name, help, tail, "'\n");
  }
  std::string operand;
  if (command.operand.takes_rest) {
    operand = "'(-)1:program:_files' '*::arguments:_files'";
  } else if (!command.operand.choices.empty()) {
    operand = str("'1:word:(", command.operand.choices, ")'",
                  command.operand.count > 1 ? " '*:file:_files'" : "");
  } else if (!command.operand.name.empty()) {
    operand = "'1:file:_files'";
  }
  return str("_accelerate_", command.name, "() {\n  local -a flags=(\n", specs,
             "  )\n  _arguments -S -s $flags ", operand, "\n}\n");
}

std::string zsh_script() {
  std::string functions;
  for (const auto& command : command_table()) functions += zsh_function(command);
  return str("#compdef accelerate ", join(names("accelerate-"), " "), R"(
# zsh completion of accelerate: source <(accelerate completion zsh)
)",
             functions, R"(_accelerate() {
  if [[ ${words[1]:t} == accelerate-* ]]; then
    _accelerate_${${words[1]:t}#accelerate-}
  elif (( CURRENT == 2 )); then
    compadd -- )",
             join(names(), " "), R"(
  else
    shift words
    (( CURRENT-- ))
    (( $+functions[_accelerate_$words[1]] )) && _accelerate_$words[1]
  fi
}
if [[ ${funcstack[1]} == _accelerate ]]; then
  _accelerate "$@"
elif (( $+functions[compdef] )); then
  compdef _accelerate accelerate )",
             join(names("accelerate-"), " "), "\nfi\n");
}

// The flags of a command; `who` is "accelerate -n ..." or the name of a link.
std::string fish_flags(const Command& command, const std::string& who) {
  std::string out;
  if (!command.operand.choices.empty()) {
    out += str("complete -c ", who, " -f -a '", command.operand.choices, "'\n");
  }
  for (const Flag* flag : shown_flags(command)) {
    out += str("complete -c ", who, " -l ", flag->name);
    if (flag->short_name != '\0') out += str(" -s ", flag->short_name);
    const auto words = words_for(*flag);
    if (flag->takes_value() && !words.empty()) out += str(" -x -a '", words, "'");
    const bool file = flag->value_name == "FILE" || flag->value_name == "DIR";
    if (flag->takes_value() && words.empty()) out += file ? " -r -F" : " -x";
    out += str(" -d '", without(flag->help, "'\\"), "'\n");
  }
  return out;
}

std::string fish_script() {
  std::string out =
      "# fish completion of accelerate: accelerate completion fish | source\n"
      "complete -c accelerate -f -n __fish_use_subcommand\n";
  for (const auto& command : command_table()) {
    out += str("complete -c accelerate -n __fish_use_subcommand -a ", command.name, " -d '",
               without(command.help, "'\\"), "'\n");
  }
  for (const auto& command : command_table()) {
    out +=
        fish_flags(command, str("accelerate -n '__fish_seen_subcommand_from ", command.name, "'"));
    out += fish_flags(command, str("accelerate-", command.name));
  }
  return out;
}

}  // namespace

std::string completion_script(std::string_view shell) {
  if (shell == "bash") return bash_script();
  if (shell == "zsh") return zsh_script();
  if (shell == "fish") return fish_script();
  throw ConfigError(
      str("There is no completion for '", shell, "'. Choose one of: bash, zsh, fish."));
}

}  // namespace accelerate::detail::commands
