#include "launch/failure.h"

#include <sys/stat.h>

#include <algorithm>
#include <ctime>
#include <iterator>
#include <map>
#include <string_view>
#include <tuple>

#include "accelerate/errors.h"
#include "core/cpu_features.h"
#include "core/files.h"
#include "core/json.h"
#include "core/numbers.h"
#include "core/system.h"
#include "core/text.h"
#include "launch/terminal_text.h"

namespace accelerate::detail::launch {
namespace {

namespace fs = std::filesystem;

constexpr int kLostPeers = 70;
constexpr std::size_t kWidth = 80;
// A larger error file was not written by `record`.
constexpr std::size_t kLargestErrorFile = std::size_t{4} << 20;
// Messages may hold whole tensors; the error file has the rest.
constexpr std::size_t kMostMessageLines = 20;
constexpr std::size_t kLongestLine = 1000;
constexpr std::size_t kMostStackLines = 20;
// If the launcher ended more workers than this, the report lists only their ranks.
constexpr std::size_t kMostListed = 8;

// ---- what workers that lost their peers tell ----------------------------------------------------

// The worker's words about the cause, from its exception or the end of its output; "" if there are
// none, or if it did not lose its peers.
std::string account_of(const WorkerFailure& failure) {
  constexpr std::string_view kType = "accelerate::CommError: ";
  constexpr std::string_view kOurs = "accelerate: ";
  if (!failure.is_consequence() || failure.terminated_by_launcher) return "";
  if (failure.message.starts_with(kType)) return failure.message.substr(kType.size());
  if (!failure.message.empty()) return failure.message;
  const auto& lines = failure.last_lines;
  const auto ours = std::find_if(lines.rbegin(), lines.rend(),
                                 [&](const auto& line) { return line.starts_with(kOurs); });
  if (ours == lines.rend()) return "";
  return join(std::vector(std::prev(ours.base()), lines.end()), "\n").substr(kOurs.size());
}

// The rank that an account begins with, which is at fault: "rank 2 died in ...".
std::optional<int> rank_blamed_by(std::string_view account) {
  constexpr std::string_view kRank = "rank ";
  if (!account.starts_with(kRank)) return std::nullopt;
  account.remove_prefix(kRank.size());
  const auto end = account.find_first_not_of("0123456789");
  const auto rank = parse_number<int>(account.substr(0, end));
  if (end == account.npos || account.substr(end).find(" has waited for ") < account.find('\n')) {
    return std::nullopt;  // it begins with the rank that waits
  }
  return rank;
}

// The rank that most workers blame; nullopt if none does.
std::optional<int> rank_blamed(const std::vector<WorkerFailure>& failures) {
  std::map<int, int> votes;
  for (const auto& failure : failures) {
    if (const auto rank = rank_blamed_by(account_of(failure))) ++votes[*rank];
  }
  const auto most =
      std::ranges::max_element(votes, {}, [](const auto& vote) { return vote.second; });
  return most == votes.end() ? std::nullopt : std::optional(most->first);
}

// What the others tell about a failure: the first account of it without the teller's own place.
std::string told_about(const WorkerFailure& root, const std::vector<WorkerFailure>& failures) {
  for (const auto& failure : failures) {
    const auto account = account_of(failure);
    if (failure.rank == root.rank || rank_blamed_by(account) != root.rank) continue;
    return str("Rank ", failure.rank,
               " reports: ", account.substr(0, account.find("\n  this is rank ")));
  }
  return "";
}

// The root cause first: a failure of its own, then the rank that the others blame, those that lost
// their peers, those that saved their state, and those that the launcher ended.
void sort_by_cause(std::vector<WorkerFailure>& failures) {
  const auto blamed = rank_blamed(failures);
  const auto order_of = [&](const WorkerFailure& failure) {
    int place = 0;
    if (failure.is_consequence()) place = 2;
    if (failure.is_preempted()) place = 3;
    if (failure.terminated_by_launcher) place = 4;
    if (place > 0 && failure.rank == blamed && !failure.is_preempted()) place = 1;
    return std::make_tuple(place, failure.time_us, failure.rank);
  };
  std::ranges::sort(failures, {}, order_of);
}

// ---- the error file -----------------------------------------------------------------------------

// The entry of a dict; nullptr if the value is not a dict or has no such key.
const Value* entry(const Value* value, std::string_view key) {
  if (value == nullptr || !value->is_dict() || !value->as_dict().contains(key)) return nullptr;
  return &value->at(key);
}

std::string text_of(const Value* value) {
  return value != nullptr && value->is_string() ? value->as_string() : "";
}

// Seconds since 1970, written as a text or as a number.
std::optional<std::int64_t> seconds_of(const Value* value) {
  if (value != nullptr && value->is_int()) return value->as_int();
  return parse_number<std::int64_t>(text_of(value));
}

// The time of the exception. The file has whole seconds, but failures follow each other within
// milliseconds, so the time of writing the file is used if it agrees.
std::optional<std::int64_t> moment_of(std::optional<std::int64_t> seconds,
                                      const struct stat& written) {
  constexpr std::int64_t kMicro = 1'000'000;
  if (!seconds) return written.st_mtim.tv_sec * kMicro + written.st_mtim.tv_nsec / 1000;
  if (*seconds <= 0 || *seconds > std::int64_t{1} << 40) return std::nullopt;
  const bool agree = written.st_mtim.tv_sec == *seconds || written.st_mtim.tv_sec == *seconds + 1;
  return agree ? written.st_mtim.tv_sec * kMicro + written.st_mtim.tv_nsec / 1000
               : *seconds * kMicro;
}

// The last lines of a Python stack. C++ stacks mostly show LibTorch's functions and are left out.
std::vector<std::string> end_of_stack(const std::string& stack) {
  if (!stack.starts_with("Traceback")) return {};
  auto lines = split(trim(stack), '\n');
  const auto surplus = lines.size() - std::min(lines.size(), kMostStackLines);
  lines.erase(lines.begin(), lines.begin() + static_cast<std::ptrdiff_t>(surplus));
  return lines;
}

// ---- the report ---------------------------------------------------------------------------------

std::string shown(std::string_view line) {
  std::string text = printable_line(line.substr(0, kLongestLine));
  return line.size() > kLongestLine ? text + " ..." : text;
}

std::string rule(char sign) { return std::string(kWidth, sign) + "\n"; }

std::string time_text(std::int64_t time_us) {
  const std::time_t seconds = time_us / 1'000'000;
  std::tm parts = {};
  ::localtime_r(&seconds, &parts);
  char text[32] = {};
  std::strftime(text, sizeof text, "%Y-%m-%d_%H:%M:%S", &parts);
  const auto milliseconds = str(1000 + time_us / 1000 % 1000).substr(1);
  return str(text, ".", milliseconds);
}

std::string tenths_text(std::int64_t time_us) {
  char text[32] = {};
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(time_us) / 1e6);
  return text;
}

// As torchrun writes it: signals are negative.
std::string exit_code_text(const WorkerFailure& failure) {
  const int code = failure.status.signal != 0 ? -failure.status.signal : failure.status.code;
  return str(code, " (pid: ", failure.pid, ")");
}

std::string rank_text(const WorkerFailure& failure) {
  return str(failure.rank, " (local_rank: ", failure.local_rank, ")");
}

// A frequent cause of a signal.
std::string signal_hint(int signal) {
  if (signal == SIGKILL) {
    return "\nIf it was not killed by hand, the machine ran out of memory: look at dmesg.";
  }
  if (signal == SIGILL) {
    return str(
        "\nThe processor does not have an instruction of the program. If it computes in "
        "bfloat16 on a virtual machine that hides a part of AMX, set ",
        kOnednnIsaVariable, "=", kOnednnIsaWithoutAmx,
        " (libaccelerate does so by itself, Python's torch does not).");
  }
  return "";
}

std::string message_text(const WorkerFailure& failure) {
  if (const auto account = account_of(failure); !account.empty()) return account;
  if (!failure.message.empty()) return failure.message;
  if (failure.is_consequence()) return "It lost its peers.";
  if (failure.is_preempted()) return "It was asked to stop and saved its state; others did not.";
  if (failure.status.signal == 0) return "";
  const int signal = failure.status.signal;
  return str("Signal ", signal, " (", signal_name(signal), ") received by PID ", failure.pid,
             signal_hint(signal));
}

std::string field(std::string_view name, std::string_view value) {
  return str("  ", name, std::string(10 - name.size(), ' '), ": ", value, "\n");
}

// All lines of a text, wrapped and aligned.
std::string message_field(const std::string& message) {
  constexpr std::size_t kIndent = 14;
  std::vector<std::string> lines;
  for (const auto& line : split(trim(message), '\n')) {
    for (auto& part : wrap_line(shown(line), kWidth - kIndent)) lines.push_back(std::move(part));
  }
  const auto hidden = lines.size() - std::min(lines.size(), kMostMessageLines);
  if (hidden > 0) {
    lines.resize(kMostMessageLines);
    lines.push_back(str("... and ", hidden, " more lines"));
  }
  return field("message", join(lines, "\n" + std::string(kIndent, ' ')));
}

// The last lines without the message, which a worker prints as well.
std::vector<std::string> lines_before_message(const WorkerFailure& failure,
                                              const std::string& message) {
  auto lines = failure.last_lines;
  const auto end = split(trim(message), '\n');
  if (end.front().empty() || lines.size() < end.size()) return lines;
  const auto echo = lines.end() - static_cast<std::ptrdiff_t>(end.size());
  const bool same = std::equal(echo + 1, lines.end(), end.begin() + 1) &&
                    echo->starts_with("accelerate: ") && end.front().ends_with(echo->substr(12));
  if (same) lines.erase(echo, lines.end());
  return lines;
}

std::string root_cause_text(const std::vector<WorkerFailure>& failures) {
  const WorkerFailure& failure = failures.front();
  std::string text = "Root cause (first failure):\n";
  text += field("time", time_text(failure.time_us));
  text += field("host", shown(failure.host));
  text += field("rank", rank_text(failure));
  text += field("exitcode", failure.terminated_by_launcher ? "terminated by launcher"
                                                           : exit_code_text(failure));
  if (!failure.error_file.empty()) text += field("error_file", failure.error_file);
  const std::string own = failure.terminated_by_launcher ? "" : message_text(failure);
  const auto last_lines = lines_before_message(failure, own);
  // An exception explains itself; a signal does not tell where it came.
  const bool silent = failure.message.empty() && account_of(failure).empty();
  const std::string told = silent ? told_about(failure, failures) : "";
  const std::string message = str(own, own.empty() || told.empty() ? "" : "\n", told);
  if (!message.empty()) {
    text += message_field(message);
  } else if (last_lines.empty()) {
    text += message_field(
        "none. accelerate::record around main (torch's @record in Python) brings exceptions here.");
  }
  if (!last_lines.empty()) text += "  last lines:\n";
  for (const auto& line : last_lines) text += str("    ", shown(line), "\n");
  return text;
}

std::string later(const WorkerFailure& failure, const WorkerFailure& root) {
  const auto difference = failure.time_us - root.time_us;
  return difference < 0 ? tenths_text(-difference) + " earlier"
                        : tenths_text(difference) + " later";
}

std::string other_text(const WorkerFailure& failure, const WorkerFailure& root) {
  const std::string who = str("  rank ", rank_text(failure), " on ", shown(failure.host), ": ");
  if (failure.terminated_by_launcher) return who + "terminated by launcher\n";
  std::string text = str(who, "exitcode ", exit_code_text(failure), ", ", later(failure, root));
  // The root cause has been shown: those that only lost it do not repeat it.
  if (rank_blamed_by(account_of(failure)) == root.rank) {
    return str(text, ", because of rank ", root.rank, "\n");
  }
  text += "\n";
  const std::string first_line = shown(split(message_text(failure), '\n').front());
  if (first_line.empty()) return text;
  for (const auto& line : wrap_line(first_line, kWidth - 4)) text += str("    ", line, "\n");
  return text;
}

std::string others_text(const std::vector<WorkerFailure>& failures) {
  std::string text = "Other failures:\n";
  std::vector<int> terminated;
  for (std::size_t i = 1; i < failures.size(); ++i) {
    if (failures[i].terminated_by_launcher) terminated.push_back(failures[i].rank);
  }
  const bool listed = terminated.size() <= kMostListed;
  for (std::size_t i = 1; i < failures.size(); ++i) {
    if (listed || !failures[i].terminated_by_launcher) text += other_text(failures[i], failures[0]);
  }
  if (listed) return text;
  std::ranges::sort(terminated);
  const std::string summary =
      str("ranks ", format_cpulist(terminated, ", "), ": terminated by launcher");  // 0, 2-63
  for (const auto& line : wrap_line(summary, kWidth - 2)) text += str("  ", line, "\n");
  return text;
}

}  // namespace

bool WorkerFailure::is_consequence() const noexcept { return status.code == kLostPeers; }
bool WorkerFailure::is_preempted() const noexcept { return status.code == kPreemptedExitCode; }

bool is_preemption(const std::vector<WorkerFailure>& failures) {
  return !failures.empty() && std::ranges::all_of(failures, &WorkerFailure::is_preempted);
}

std::optional<WorkerFailure> root_cause(const std::vector<WorkerFailure>& failures) {
  if (failures.empty()) return std::nullopt;
  auto sorted = failures;
  sort_by_cause(sorted);
  return std::move(sorted.front());
}

bool read_error_file(const fs::path& path, WorkerFailure& failure) {
  struct stat written = {};
  if (::stat(path.c_str(), &written) != 0 || !S_ISREG(written.st_mode) || written.st_size == 0) {
    return false;
  }
  std::string content;
  try {
    content = read_whole_file(path, kLargestErrorFile);
  } catch (const ConfigError&) {
    return false;
  }
  failure.error_file = path.string();
  Value root;
  try {
    root = json_loads(content);
  } catch (const ConfigError&) {
    // The file is incomplete or written by another program: show it as it is.
    failure.message = content;
    return true;
  }
  const Value* message = entry(&root, "message");
  const Value* extra = entry(message, "extraInfo");
  const bool is_text = message != nullptr && message->is_string();
  failure.message = text_of(is_text ? message : entry(message, "message"));
  const auto moment = moment_of(
      seconds_of(is_text ? entry(&root, "timestamp") : entry(extra, "timestamp")), written);
  // The exception is earlier than the end of the process.
  if (moment && (failure.time_us == 0 || *moment < failure.time_us)) failure.time_us = *moment;
  if (failure.last_lines.empty()) {
    failure.last_lines = end_of_stack(text_of(entry(extra, "py_callstack")));
  }
  return true;
}

std::string failure_report(const std::string& program, const std::vector<WorkerFailure>& failures) {
  if (failures.empty()) return "";
  std::vector<WorkerFailure> sorted = failures;
  sort_by_cause(sorted);
  std::string text =
      str(rule('='), shown(program), " FAILED\n", rule('-'), root_cause_text(sorted));
  if (sorted.size() > 1) text += str(rule('-'), others_text(sorted));
  return text + rule('=');
}

}  // namespace accelerate::detail::launch
