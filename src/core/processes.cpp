#include "core/processes.h"

#include <pthread.h>
#include <sys/stat.h>

#include <atomic>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <tuple>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

std::atomic<int> forks = 0;

/// What a launcher told a process, in the variables that it was started with.
struct Launched {
  std::string rank;
  std::tuple<std::string, std::string, std::string> run;  // its size, and where it meets

  /// Texts are empty if the process is gone, belongs to another user, or was not told.
  static Launched of(const std::string& process) {
    std::map<std::string, std::string> variables;
    std::ifstream file("/proc/" + process + "/environ");
    for (std::string line; std::getline(file, line, '\0');) {
      const auto equals = line.find('=');
      if (equals != std::string::npos) variables[line.substr(0, equals)] = line.substr(equals + 1);
    }
    return {variables["RANK"],
            {variables["WORLD_SIZE"], variables["MASTER_ADDR"], variables["MASTER_PORT"]}};
  }
  [[nodiscard]] bool knows_its_run() const {
    const auto& [size, address, port] = run;
    return !size.empty() && !address.empty() && !port.empty();
  }
};

/// What /proc says behind the name of the process: its state, its parent. "" if it is gone.
std::string facts_of_process(const std::string& process) {
  std::ifstream file("/proc/" + process + "/stat");
  std::string text;
  std::getline(file, text);  // an iterator would throw when the process goes meanwhile
  // The name stands in parentheses and may contain any letter.
  const auto end = text.rfind(')');
  return end == std::string::npos || end + 2 >= text.size() ? "" : text.substr(end + 2);
}

const bool kCountsForks = ::pthread_atfork(nullptr, nullptr, [] { ++forks; }) == 0;

}  // namespace

std::string process_state(int pid) {
  const auto facts = facts_of_process(str(pid));
  if (facts.empty()) return "gone";
  const char state = facts.front();
  if (state == 'T' || state == 't') return "stopped";
  if (state == 'Z' || state == 'X') return "a zombie";
  return state == 'D' ? "waiting for a device" : "running";
}

std::map<int, int> sibling_ranks(int rank, int size) {
  const auto own = Launched::of("self");
  if (!own.knows_its_run() || own.rank != str(rank) || std::get<0>(own.run) != str(size)) return {};
  const auto parent = str(::getppid());
  std::map<int, int> siblings;
  std::error_code error;
  using Entries = std::filesystem::directory_iterator;
  for (Entries entry("/proc", error); !error && entry != Entries(); entry.increment(error)) {
    const auto process = entry->path().filename().string();
    if (process.find_first_not_of("0123456789") != std::string::npos) continue;
    const auto facts = split(facts_of_process(process), ' ');  // state, parent, ...
    if (facts.size() < 2 || facts[1] != parent) continue;
    const auto other = Launched::of(process);
    int number = rank;
    std::from_chars(other.rank.data(), other.rank.data() + other.rank.size(), number);
    if (other.run == own.run && number != rank) siblings[number] = std::stoi(process);
  }
  return siblings;
}

int OwnerProcess::forks_so_far() noexcept { return forks.load(std::memory_order_relaxed); }

void OwnerProcess::throw_forked_copy(std::string_view what) const {
  throw StateError(
      str(what, ": process ", ::getpid(), " was forked from process ", pid_,
          ", to which the process group and the workers of data loaders belong. A forked copy "
          "cannot communicate or load data in its name. Make this call in process ",
          pid_, "; in the child run another program with exec, or compute without such calls."));
}

std::string host_identity() {
  std::ifstream boot("/proc/sys/kernel/random/boot_id");
  std::string identity;
  std::getline(boot, identity);
  struct stat processes{};
  if (::stat("/proc/self/ns/pid", &processes) == 0) identity += str("/", processes.st_ino);
  return identity;
}

}  // namespace accelerate::detail::inline core
