#include "launch/command.h"

#include <algorithm>
#include <optional>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::launch {
namespace {

// "--num-processes" and "--num_processes" are the same flag; a mixture of both is not accepted.
std::string underscored(std::string_view name) {
  std::string result(name);
  if (name.find('_') == std::string_view::npos) std::ranges::replace(result, '-', '_');
  return result;
}

class Parser {
 public:
  Parser(const Command& command, std::span<const std::string> words)
      : command_(command), flags_(command.flags()), words_(words) {}

  Arguments run() {
    bool flags_end = false;
    while (next_ < words_.size() && !arguments_.help) {
      const std::string& word = words_[next_++];
      if (flags_end || word.size() < 2 || word.front() != '-') {
        operand(word);
      } else if (word == "--") {
        flags_end = true;
      } else if (word.starts_with("--")) {
        long_flag(word);
      } else {
        short_flags(word);
      }
    }
    if (arguments_.operands.empty() && !command_.operand.missing.empty() && !arguments_.help) {
      throw ConfigError(std::string(command_.operand.missing));
    }
    return std::move(arguments_);
  }

 private:
  void long_flag(const std::string& word) {
    const auto cut = word.find('=');
    const std::string typed = word.substr(0, cut);
    const std::string name = underscored(std::string_view(typed).substr(2));
    std::optional<std::string> value;
    if (cut != std::string::npos) value = word.substr(cut + 1);
    if (const Flag* flag = find_flag(flags_, name); flag != nullptr && !flag->file_only) {
      store(*flag, typed, std::move(value));
      return;
    }
    if (name.starts_with("no_")) {
      const Flag* flag = find_flag(flags_, std::string_view(name).substr(3));
      if (flag != nullptr && flag->kind == FlagKind::kSwitch && flag->name != kHelpFlag.name) {
        if (value) throw ConfigError(str(typed, " takes no value, but has '", *value, "'."));
        arguments_.values[std::string(flag->name)] = "false";
        return;
      }
    }
    refuse_unknown(typed, name);
  }

  // -q, -qm, -t 3, -t3
  void short_flags(const std::string& word) {
    for (std::size_t i = 1; i < word.size(); ++i) {
      const std::string typed{'-', word[i]};
      const Flag* flag = find_short_flag(flags_, word[i]);
      if (flag == nullptr) refuse_unknown(word, "");
      if (!flag->takes_value()) {
        store(*flag, typed, std::nullopt);
        continue;
      }
      std::optional<std::string> value;
      if (i + 1 < word.size()) value = word.substr(word[i + 1] == '=' ? i + 2 : i + 1);
      store(*flag, typed, std::move(value));
      return;
    }
  }

  [[noreturn]] void refuse_unknown(const std::string& typed, const std::string& name) const {
    std::string hint;
    for (const auto& [other, ours] : command_.hints) {
      if (name == other) hint = ours;
    }
    if (hint.empty() && !name.empty()) {
      std::vector<std::string> known;
      for (const Flag& flag : flags_) {
        if (!flag.file_only) known.emplace_back(flag.name);
      }
      hint = nearest(name, known);
    }
    throw ConfigError(str(typed, " is not a flag of accelerate ", command_.name,
                          hint.empty()
                              ? str(". `accelerate ", command_.name, " --help` lists them all.")
                              : str("; did you mean --", hint, "?")));
  }

  void store(const Flag& flag, const std::string& typed, std::optional<std::string> value) {
    if (flag.name == kHelpFlag.name) {
      arguments_.help = true;
      return;
    }
    if (!value) {
      if (flag.takes_value()) {
        value = next_word(flag, typed);
      } else {
        value = flag.kind == FlagKind::kOptional ? "text" : "true";
      }
    }
    auto text = canonical_value(flag, *value, typed);
    auto& stored = arguments_.values[std::string(flag.name)];
    if (flag.kind == FlagKind::kWords) {
      stored = text;
      const auto choices = flag.choice_list();
      while (next_ < words_.size() && std::ranges::find(choices, words_[next_]) != choices.end()) {
        stored += "," + words_[next_++];
      }
      return;
    }
    stored = flag.kind == FlagKind::kTexts && !stored.empty() ? str(stored, ",", text) : text;
  }

  std::string next_word(const Flag& flag, const std::string& typed) {
    if (next_ == words_.size() || is_flag(words_[next_])) {
      throw ConfigError(
          str(typed, " needs a value",
              flag.choices.empty() ? "" : str(": one of ", join(flag.choice_list())),
              next_ == words_.size() ? "." : str(", but ", words_[next_], " follows.")));
    }
    return words_[next_++];
  }

  // -1 is a value, --cpu is not.
  [[nodiscard]] bool is_flag(const std::string& word) const {
    if (word.size() < 2 || word.front() != '-') return false;
    return word.starts_with("--") ||
           (word.size() == 2 && find_short_flag(flags_, word[1]) != nullptr);
  }

  void operand(const std::string& word) {
    const Operand& operand = command_.operand;
    if (operand.name.empty() || arguments_.operands.size() == operand.count) {
      throw ConfigError(str("'", word, "' is one word too many for `accelerate ", command_.name,
                            "`. Usage: accelerate ", command_.name, " ", command_.usage));
    }
    if (!operand.choices.empty() && arguments_.operands.empty()) {
      (void)canonical_value({.name = operand.name, .choices = operand.choices}, word,
                            str("The word after `accelerate ", command_.name, "`"));
    }
    arguments_.operands.push_back(word);
    if (!operand.takes_rest) return;
    const auto rest = words_.subspan(next_);
    arguments_.operands.insert(arguments_.operands.end(), rest.begin(), rest.end());
    next_ = words_.size();
  }

  const Command& command_;
  std::span<const Flag> flags_;
  std::span<const std::string> words_;
  std::size_t next_ = 0;
  Arguments arguments_;
};

}  // namespace

bool Arguments::on(std::string_view name) const { return value(name) == "true"; }

std::string Arguments::value(std::string_view name) const {
  const auto found = values.find(name);
  return found != values.end() ? found->second : std::string();
}

Arguments parse_arguments(const Command& command, std::span<const std::string> words) {
  return Parser(command, words).run();
}

}  // namespace accelerate::detail::launch
