#include "support/hosts.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "support/command.h"

namespace accelerate::test {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFolder = "/run/netns";
// "acc<pid>x<number>": the pid tells whether the test that made it still lives.
constexpr const char* kBeginning = "acc";

void call(const std::vector<std::string>& argv) {
  const auto outcome = run({.argv = argv});
  if (outcome.shell_code() == 0) return;
  std::string command;
  for (const auto& word : argv) command += word + " ";
  throw std::runtime_error(command + "failed: " + outcome.error);
}

// Many commands of `ip` in one process.
void batch(const std::string& space, const std::string& lines) {
  const Folder folder;
  const std::string file = folder / "batch";
  std::ofstream(file) << lines;
  call({"ip", "-netns", space, "-batch", file});
}

// A test that was killed could not clean up; the next one does.
void remove_what_dead_tests_left() {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(kFolder, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kBeginning)) continue;
    const pid_t owner = std::atoi(name.c_str() + std::string(kBeginning).size());
    if (owner > 0 && !is_alive(owner))
      static_cast<void>(run({.argv = {"ip", "netns", "del", name}}));
  }
}

}  // namespace

std::optional<std::string> Hosts::why_not() {
  static const std::optional<std::string> answer = []() -> std::optional<std::string> {
    if (::geteuid() != 0) return "this needs root";
    try {
      const Hosts trial(1);
      call(trial.on(0, {"true"}));
    } catch (const std::runtime_error& error) {
      return std::string(error.what()) + " (is iproute2 installed?)";
    }
    return std::nullopt;
  }();
  return answer;
}

Hosts::Hosts(int count) : count_(count) {
  static std::atomic<int> number = 0;
  prefix_ = kBeginning + std::to_string(::getpid()) + "x" + std::to_string(number++);
  remove_what_dead_tests_left();
  try {
    build();
  } catch (...) {
    remove();
    throw;
  }
}

Hosts::~Hosts() { remove(); }

std::string Hosts::name(int host) { return "n" + std::to_string(host + 1); }
std::string Hosts::address(int host) { return "10.77.0." + std::to_string(host + 1); }
std::string Hosts::address6(int host) { return "fd77::" + std::to_string(host + 1); }

std::string Hosts::space(int host) const { return prefix_ + (host < 0 ? "switch" : name(host)); }

void Hosts::build() const {
  std::ostringstream cables;
  cables << "link add switch type bridge\nlink set switch up\n";
  for (int host = -1; host < count_; ++host) call({"ip", "netns", "add", space(host)});
  for (int host = 0; host < count_; ++host) {
    const std::string port = "port" + std::to_string(host);
    cables << "link add " << port << " type veth peer name eth0 netns " << space(host) << "\n"
           << "link set " << port << " master switch\nlink set " << port << " up\n";
  }
  batch(space(-1), cables.str());
  for (int host = 0; host < count_; ++host) {
    std::ostringstream lines;
    lines << "link set lo up\nlink set eth0 up\n"
          << "addr add " << address(host)
          << "/24 dev eth0\n"
          // Without the seconds in which the kernel asks whether somebody else has the address.
          << "addr add " << address6(host) << "/64 dev eth0 nodad\n";
    batch(space(host), lines.str());
  }
}

void Hosts::remove() const noexcept {
  for (int host = -1; host < count_; ++host) {
    try {
      for (const pid_t pid : processes(host)) ::kill(pid, SIGKILL);
      static_cast<void>(run({.argv = {"ip", "netns", "del", space(host)}}));
    } catch (const std::exception&) {
      // The others shall be removed all the same.
    }
  }
}

std::vector<std::string> Hosts::on(int host, const std::vector<std::string>& argv) const {
  // A name of its own needs a namespace too.
  std::vector<std::string> command = {
      "nsenter", "--net=" + std::string(kFolder) + "/" + space(host), "unshare", "--uts",   "sh",
      "-c",      "hostname \"$1\" && shift && exec \"$@\"",           "sh",      name(host)};
  command.insert(command.end(), argv.begin(), argv.end());
  return command;
}

void Hosts::cut(int host) const {
  call({"ip", "-netns", space(-1), "link", "set", "port" + std::to_string(host), "down"});
}

void Hosts::restore(int host) const {
  call({"ip", "-netns", space(-1), "link", "set", "port" + std::to_string(host), "up"});
}

std::vector<pid_t> Hosts::processes(int host) const {
  std::vector<pid_t> pids;
  const auto outcome = run({.argv = {"ip", "netns", "pids", space(host)}});
  for (const auto& line : lines_of(outcome.output)) pids.push_back(std::stoi(line));
  return pids;
}

std::vector<int> Hosts::listening_ports(int host) const {
  const auto outcome = run({.argv = on(host, {"cat", "/proc/net/tcp", "/proc/net/tcp6"})});
  return ports_in_tables(outcome.output);
}

}  // namespace accelerate::test
