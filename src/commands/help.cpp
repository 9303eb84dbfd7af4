#include "commands/help.h"

#include <algorithm>
#include <map>
#include <vector>

#include "accelerate/version.h"
#include "commands/command_table.h"
#include "core/text.h"
#include "launch/terminal_text.h"

namespace accelerate::detail::commands {
namespace {

using launch::Flag;
using launch::FlagGroup;
using launch::FlagKind;

// What follows the name of a flag: " N", " {no,fp16}", "[=json]", or nothing.
std::string value_part(const Flag& flag) {
  if (flag.kind == FlagKind::kOptional) return "[=json]";
  if (!flag.takes_value()) return "";
  if (!flag.value_name.empty()) return str(" ", flag.value_name);
  if (!flag.choices.empty()) return str(" {", join(flag.choice_list(), ","), "}");
  using enum FlagKind;
  if (flag.kind == kInteger || flag.kind == kIntegerOrAuto || flag.kind == kMachines) return " N";
  if (flag.kind == kNumber || flag.kind == kNumberOrAuto) return " X";
  return flag.kind == kTruth ? " TRUTH" : " TEXT";
}

// "  -t, --tee STREAMS"
std::string left_side(const Flag& flag) {
  const std::string letter =
      flag.short_name != '\0' ? str("  -", flag.short_name, ", ") : std::string(6, ' ');
  return str(letter, "--", flag.name, value_part(flag));
}

std::string right_side(const Flag& flag) {
  std::string text(flag.help);
  if (!flag.choices.empty() && !flag.value_name.empty()) {
    text += str(flag.kind == FlagKind::kWords ? " One or more of: " : " One of: ",
                join(flag.choice_list()), ".");
  }
  const bool shown = !flag.fallback.empty() && flag.kind != FlagKind::kSwitch;
  if (shown) text += str(" Default: ", flag.fallback, ".");
  if (!flag.variable.empty()) text += str(" [", flag.variable, "]");
  return text;
}

// Text broken at `width`; all lines but the first are indented.
std::string wrapped(std::string_view text, std::size_t indent, std::size_t width) {
  return join(launch::wrap_line(text, width - indent), "\n" + std::string(indent, ' ')) + "\n";
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

// The title of the flags of a command with one group.
constexpr std::string_view kOnlyGroup = "Flags:";

struct ShownGroup {
  std::string title;
  std::vector<const Flag*> flags;
};

std::vector<ShownGroup> shown_groups(const Command& command) {
  std::map<FlagGroup, ShownGroup> groups;
  for (const Flag& flag : command.flags()) {
    if (!flag.file_only) groups[flag.group].flags.push_back(&flag);
  }
  std::vector<ShownGroup> result;
  for (auto& [group, shown] : groups) {
    const auto [title, about] = launch::group_text(group);
    shown.title = groups.size() == 1 ? std::string(kOnlyGroup) : str(title, ". ", about);
    result.push_back(std::move(shown));
  }
  return result;
}

// Text for roff: a backslash is an escape, a hyphen would become a dash, and a line that begins
// with a dot or a quote would be a request.
std::string roff(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (c == '\\') {
      result += "\\e";
    } else if (c == '-') {
      result += "\\-";
    } else if ((c == '.' || c == '\'') && (result.empty() || result.back() == '\n')) {
      result += str("\\&", c);
    } else {
      result += c;
    }
  }
  return result;
}

std::string page_header(std::string_view name) {
  return str(".TH ", to_upper(name), " 1 \"\" \"accelerate ", kVersion,
             "\" \"Accelerate for C++\"\n");
}

void append_man_flag(std::string& out, const Flag& flag) {
  out += ".TP\n";
  if (flag.short_name != '\0') out += str("\\fB\\-", flag.short_name, "\\fR, ");
  out += str("\\fB", roff(str("--", flag.name)), "\\fR", roff(value_part(flag)), "\n");
  out += roff(right_side(flag)) + "\n";
}

}  // namespace

std::string main_help() {
  std::string commands;
  for (const auto& command : command_table()) {
    commands +=
        str("  ", command.name, std::string(18 - command.name.size(), ' '), command.help, "\n");
  }
  return str(
      "usage: accelerate <command> [flags]\n\nCommands:\n", commands,
      "\n`accelerate <command> --help` explains a command, `accelerate --version` prints the "
      "version.\n");
}

std::string command_help(const Command& command, std::size_t width) {
  width = std::clamp<std::size_t>(width, 60, 120);
  std::string out = str("usage: accelerate ", command.name, " ", command.usage, "\n\n");
  out += wrapped(command.about, 0, width);
  for (const auto& group : shown_groups(command)) {
    out += '\n';
    out += wrapped(group.title, 0, width);
    for (const Flag* flag : group.flags) append_flag(out, *flag, width);
  }
  if (!command.examples.empty()) out += str("\nExamples:\n", command.examples);
  return out;
}

std::string main_man_page() {
  std::string out = page_header("accelerate") +
                    ".SH NAME\naccelerate \\- train on any number of devices\n"
                    ".SH SYNOPSIS\n\\fBaccelerate\\fR \\fIcommand\\fR [flags]\n.SH COMMANDS\n";
  std::string pages;
  for (const auto& command : command_table()) {
    out += str(".TP\n\\fB", roff(command.name), "\\fR\n", roff(command.help), "\n");
    pages +=
        str(pages.empty() ? "" : ",\n", ".BR ", roff(str("accelerate-", command.name)), " (1)");
  }
  out +=
      ".SH EXIT STATUS\n"
      "0 success; 1 failure; 2 wrong flags, files or variables; 70 a process is gone or processes "
      "disagree; 128+n signal n. \\fBlaunch\\fR passes on the code of the process that failed "
      "first.\n.SH SEE ALSO\n";
  return out + pages + "\n";
}

std::string command_man_page(const Command& command) {
  const std::string page = str("accelerate-", command.name);
  std::string out = page_header(page);
  out += str(".SH NAME\n", roff(page), " \\- ", roff(command.help), "\n");
  out +=
      str(".SH SYNOPSIS\n\\fBaccelerate ", roff(command.name), "\\fR ", roff(command.usage), "\n");
  out += str(".SH DESCRIPTION\n", roff(command.about), "\n");
  for (const auto& group : shown_groups(command)) {
    out += group.title == kOnlyGroup ? std::string(".SH OPTIONS\n")
                                     : str(".SH OPTIONS: ", roff(group.title), "\n");
    for (const Flag* flag : group.flags) append_man_flag(out, *flag);
  }
  if (!command.examples.empty()) out += str(".SH EXAMPLES\n.nf\n", roff(command.examples), ".fi\n");
  return out + ".SH SEE ALSO\n.BR accelerate (1)\n";
}

}  // namespace accelerate::detail::commands
