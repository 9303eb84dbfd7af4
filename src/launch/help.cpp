#include "launch/help.h"

#include <algorithm>

#include "core/text.h"
#include "launch/flags.h"
#include "launch/terminal_text.h"

namespace accelerate::detail::launch {
namespace {

constexpr std::array<Subcommand, 11> kSubcommands{{
    {"launch", "Start a program on one or more accelerators, CPUs and machines."},
    {"checkpoint", "Show the tensors of a file: names, dtypes, shapes, sizes, checksums."},
    {"completion", "Print the completion script for bash, zsh or fish."},
    {"merge-weights", "Merge the shards of a checkpoint into one file."},
    {"config", "Ask for the settings of this machine and write them to a file.",
     "Write the file by hand, with `write_basic_config` of the library, or with Python's "
     "accelerate."},
    {"env", "Show what a report of a problem should contain.", "Python's accelerate has it."},
    {"estimate-memory", "Estimate the memory that a model needs.", "Python's accelerate has it."},
    {"test", "Run the self-test under the configured launch.",
     "`accelerate launch` any program of your own."},
    {"to-fsdp2", "Convert a configuration from FSDP 1 to 2.", "Python's accelerate has it."},
    {"tpu-config", "Run commands on the machines of a TPU pod.", "Python's accelerate has it."},
    {"monitor", "Watch a running job.",
     "--tee and --log_dir of `accelerate launch` keep its output."},
}};

// "  -t, --tee STREAMS"
std::string left_side(const Flag& flag) {
  std::string text = flag.short_name != '\0' ? str("  -", flag.short_name, ", ") : "      ";
  text += str("--", flag.name);
  if (flag.kind == FlagKind::kOptional) return text + "[=json]";
  if (!flag.takes_value()) return text;
  if (!flag.value_name.empty()) return str(text, " ", flag.value_name);
  if (!flag.choices.empty()) return str(text, " {", join(flag.choice_list(), ","), "}");
  switch (flag.kind) {
    case FlagKind::kInteger:
    case FlagKind::kIntegerOrAuto:
    case FlagKind::kMachines:
      return text + " N";
    case FlagKind::kNumber:
    case FlagKind::kNumberOrAuto:
      return text + " X";
    case FlagKind::kTruth:
      return text + " TRUTH";
    default:
      return text + " TEXT";
  }
}

std::string right_side(const Flag& flag) {
  std::string text(flag.help);
  if (!flag.choices.empty() && !flag.value_name.empty()) {
    text += str(" One of: ", join(flag.choice_list()), ".");
  }
  const bool shown = !flag.fallback.empty() && flag.kind != FlagKind::kSwitch;
  if (shown) text += str(" Default: ", flag.fallback, ".");
  if (!flag.variable.empty()) text += str(" [", flag.variable, "]");
  return text;
}

// Text broken at `width`; all lines but the first are indented.
std::string wrapped(std::string_view text, std::size_t indent, std::size_t width) {
  return join(wrap_line(text, width - indent), "\n" + std::string(indent, ' ')) + "\n";
}

void append_flag(std::string& out, const Flag& flag, std::size_t width) {
  constexpr std::size_t kIndent = 34;
  const std::string left = left_side(flag);
  out += left;
  if (left.size() + 2 > kIndent) {
    out += str("\n", std::string(kIndent, ' '));
  } else {
    out += std::string(kIndent - left.size(), ' ');
  }
  out += wrapped(right_side(flag), kIndent, width);
}

}  // namespace

const std::array<Subcommand, 11>& subcommands() { return kSubcommands; }

std::string main_help() {
  std::string available;
  std::string planned;
  for (const auto& command : kSubcommands) {
    (command.instead.empty() ? available : planned) +=
        str("  ", command.name, std::string(18 - command.name.size(), ' '), command.help, "\n");
  }
  return str(
      "usage: accelerate <command> [flags]\n\nCommands:\n", available, "\nNot available yet:\n",
      planned,
      "\n`accelerate <command> --help` explains a command, `accelerate --version` prints the "
      "version.\n");
}

std::string launch_help(std::size_t width) {
  width = std::clamp<std::size_t>(width, 60, 120);
  std::string out = "usage: accelerate launch [flags] program [arguments of the program]\n\n";
  out += wrapped(
      "Starts a program: an executable, a Python script (its name ends in .py) or, with -m, a "
      "Python "
      "module. Flags stand before the program; every word behind it belongs to the program. Each "
      "flag is also known with hyphens and as --flag=value, each switch as --no_<switch>. A flag "
      "counts more than its [VARIABLE], and this more than the configuration file; --dry_run shows "
      "which of them was taken.",
      0, width);
  for (int group = 0; group < kFlagGroupCount; ++group) {
    const auto [title, about] = group_text(static_cast<FlagGroup>(group));
    out += '\n';
    out += wrapped(str(title, ". ", about), 0, width);
    for_each_flag([&](const Flag& flag) {
      if (static_cast<int>(flag.group) == group && !flag.file_only) append_flag(out, flag, width);
    });
  }
  out +=
      "\nExamples:\n"
      "  accelerate launch --num_processes 2 ./train --epochs 3\n"
      "  accelerate launch --cpu --num_processes 4 train.py\n"
      "  accelerate launch --num_processes 16 --num_machines 2 --machine_rank 0 \\\n"
      "      --main_process_ip 10.0.0.1 ./train\n";
  return out;
}

}  // namespace accelerate::detail::launch
