#include "launch/arguments.h"

#include <algorithm>
#include <array>
#include <utility>

#include "accelerate/errors.h"
#include "core/text.h"
#include "launch/flags.h"

namespace accelerate::detail::launch {
namespace {

// Flags of torchrun with another name here.
constexpr std::array<std::pair<std::string_view, std::string_view>, 10> kTorchrunWords{{
    {"nproc_per_node", "num_processes (of all machines together)"},
    {"nproc", "num_processes"},
    {"nnodes", "num_machines"},
    {"node_rank", "machine_rank"},
    {"master_addr", "main_process_ip"},
    {"master_port", "main_process_port"},
    {"rdzv_endpoint", "main_process_ip and --main_process_port"},
    {"standalone", "main_process_port 0"},
    {"fsdp", "use_fsdp"},
    {"deepspeed", "use_deepspeed"},
}};

[[noreturn]] void refuse_unknown(const std::string& typed, const std::string& name) {
  std::string hint;
  for (const auto& [other, ours] : kTorchrunWords) {
    if (name == other) hint = ours;
  }
  if (hint.empty()) {
    std::vector<std::string> known;
    for_each_flag([&](const Flag& flag) {
      if (!flag.file_only) known.emplace_back(flag.name);
    });
    hint = nearest(name, known);
  }
  throw ConfigError(str(typed, " is not a flag of accelerate launch",
                        hint.empty() ? str(". `accelerate launch --help` lists them all.")
                                     : str("; did you mean --", hint, "?")));
}

// "--num-processes" and "--num_processes" are the same flag; a mixture of both is not accepted.
std::string underscored(std::string_view name) {
  std::string result(name);
  if (name.find('_') == std::string_view::npos) std::ranges::replace(result, '-', '_');
  return result;
}

class Parser {
 public:
  explicit Parser(std::span<const std::string> words) : words_(words) {}

  LaunchArguments run() {
    while (next_ < words_.size()) {
      const std::string& word = words_[next_];
      if (word == "--") {
        ++next_;
        break;
      }
      if (word.size() < 2 || word.front() != '-') break;
      ++next_;
      if (word.starts_with("--")) {
        long_flag(word);
      } else {
        short_flags(word);
      }
      if (arguments_.help) return std::move(arguments_);
    }
    program();
    return std::move(arguments_);
  }

 private:
  void long_flag(const std::string& word) {
    const auto cut = word.find('=');
    const std::string typed = word.substr(0, cut);
    const std::string name = underscored(std::string_view(typed).substr(2));
    std::optional<std::string> value;
    if (cut != std::string::npos) value = word.substr(cut + 1);
    if (const Flag* flag = find_flag(name); flag != nullptr && !flag->file_only) {
      store(*flag, typed, std::move(value));
      return;
    }
    if (name.starts_with("no_")) {
      const Flag* flag = find_flag(std::string_view(name).substr(3));
      if (flag != nullptr && flag->kind == FlagKind::kSwitch && flag->name != "help") {
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
      const Flag* flag = find_short_flag(word[i]);
      if (flag == nullptr) {
        throw ConfigError(str(word, " is not a flag of accelerate launch. `accelerate launch ",
                              "--help` lists them all."));
      }
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

  void store(const Flag& flag, const std::string& typed, std::optional<std::string> value) {
    if (flag.name == "help") {
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
  static bool is_flag(const std::string& word) {
    if (word.size() < 2 || word.front() != '-') return false;
    return word.starts_with("--") || (word.size() == 2 && find_short_flag(word[1]) != nullptr);
  }

  void program() {
    if (next_ == words_.size()) {
      throw ConfigError(
          "There is no program to start. Name it behind the flags, and its arguments behind it: "
          "accelerate launch --num_processes 2 ./train --epochs 3");
    }
    arguments_.program = words_[next_];
    arguments_.program_arguments.assign(words_.begin() + static_cast<std::ptrdiff_t>(next_) + 1,
                                        words_.end());
  }

  std::span<const std::string> words_;
  std::size_t next_ = 0;
  LaunchArguments arguments_;
};

}  // namespace

bool LaunchArguments::on(std::string_view name) const {
  const auto found = values.find(name);
  return found != values.end() && found->second == "true";
}

LaunchArguments parse_launch_arguments(std::span<const std::string> words) {
  return Parser(words).run();
}

}  // namespace accelerate::detail::launch
