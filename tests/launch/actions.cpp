#include "launch/actions.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

extern char** environ;  // NOLINT

namespace accelerate::test {
namespace {

std::vector<std::string> parts_of(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

void write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = ::write(fd, text.data(), text.size());
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (count < 0) ::_exit(74);
    text.remove_prefix(static_cast<std::size_t>(count));
  }
}

[[noreturn]] void leave(int code) {
  std::fflush(nullptr);
  ::_exit(code);
}

// What the tests of the launcher name, by number or name.
int signal_from(const std::string& text) {
  const std::map<std::string, int> names = {
      {"SIGHUP", SIGHUP},   {"SIGINT", SIGINT},   {"SIGQUIT", SIGQUIT}, {"SIGABRT", SIGABRT},
      {"SIGKILL", SIGKILL}, {"SIGSEGV", SIGSEGV}, {"SIGTERM", SIGTERM}, {"SIGUSR1", SIGUSR1},
      {"SIGSTOP", SIGSTOP}, {"SIGPIPE", SIGPIPE}};
  const auto found = names.find(text);
  return found != names.end() ? found->second : std::stoi(text);
}

std::string variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value != nullptr ? value : "(unset)";
}

void print_json(const std::vector<std::string>& arguments) {
  nlohmann::json facts;
  facts["arguments"] = arguments;
  facts["pid"] = ::getpid();
  facts["group"] = ::getpgrp();
  facts["session"] = ::getsid(0);
  facts["folder"] = std::filesystem::current_path().string();
  auto& variables = facts["environment"] = nlohmann::json::object();
  for (char** each = environ; *each != nullptr; ++each) {
    const std::string text = *each;
    const auto equals = text.find('=');
    if (equals != std::string::npos) variables[text.substr(0, equals)] = text.substr(equals + 1);
  }
  say(STDOUT_FILENO,
      facts.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace));
}

void print_variables(const std::string& names) {
  std::string line;
  for (const auto& name : parts_of(names, ',')) {
    line += (line.empty() ? "" : " ") + name + "=" + variable(name);
  }
  say(STDOUT_FILENO, line);
}

// Lines on both streams, written in pieces with pauses in between, so that whoever merges them gets
// halves of lines at the same time from everybody.
void chatter(int count) {
  const std::string who = variable("RANK");
  for (int i = 0; i < count; ++i) {
    for (const int fd : {STDOUT_FILENO, STDERR_FILENO}) {
      const std::string line = "<line " + std::to_string(i) + " of rank " + who + " on " +
                               (fd == STDOUT_FILENO ? "stdout" : "stderr") + ">\n";
      const std::size_t cut = static_cast<std::size_t>(i) % line.size();
      write_all(fd, std::string_view(line).substr(0, cut));
      if (i % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      write_all(fd, std::string_view(line).substr(cut));
    }
  }
}

void print_descriptors() {
  std::vector<std::string> open;
  for (int fd = 0; fd < 256; ++fd) {
    std::array<char, 512> target{};
    const std::string link = "/proc/self/fd/" + std::to_string(fd);
    const ssize_t size = ::readlink(link.c_str(), target.data(), target.size() - 1);
    if (size > 0) open.push_back(std::to_string(fd) + "=" + target.data());
  }
  std::string line = "descriptors:";
  for (const auto& each : open) line += " " + each;
  say(STDOUT_FILENO, line);
}

void print_signals() {
  std::ifstream status("/proc/self/status");
  std::string line = "signals:";
  for (std::string text; std::getline(status, text);) {
    if (text.starts_with("SigBlk:") || text.starts_with("SigIgn:")) {
      line += " " + text.substr(0, 7) + text.substr(8);
    }
  }
  say(STDOUT_FILENO, line);
}

int exit_code_of_trap = 0;

void caught(int signal) {
  const char* name = ::sigabbrev_np(signal);
  std::array<char, 32> text{};
  std::strcpy(text.data(), "caught SIG");
  std::strncat(text.data(), name != nullptr ? name : "?", 8);
  std::strcat(text.data(), "\n");
  static_cast<void>(!::write(STDOUT_FILENO, text.data(), std::strlen(text.data())));
  ::_exit(exit_code_of_trap);
}

void trap(int code) {
  exit_code_of_trap = code;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) ::signal(signal, caught);
}

void heard(int) { static_cast<void>(!::write(STDOUT_FILENO, "heard it\n", 9)); }

// Somebody who holds neither our pipes nor our name, only our group (or not even that).
void start_grandchild(bool escapes) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    if (escapes) ::setsid();
    const int null = ::open("/dev/null", O_RDWR);
    for (const int fd : {0, 1, 2}) ::dup2(null, fd);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) ::signal(signal, SIG_IGN);
    std::this_thread::sleep_for(std::chrono::seconds(300));
    ::_exit(0);
  }
  say(STDOUT_FILENO, "grandchild " + std::to_string(pid));
}

void touch(const std::string& path, const std::string& text) {
  const std::string temporary = path + ".part";
  std::ofstream(temporary) << text;
  std::filesystem::rename(temporary, path);
}

void wait_for_file(const std::string& path) {
  while (!std::filesystem::exists(path)) std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

[[noreturn]] void wait_forever() {
  for (;;) ::poll(nullptr, 0, -1);
}

void print_terminal() {
  const auto is = [](int fd) { return ::isatty(fd) == 1 ? "terminal" : "no terminal"; };
  say(STDOUT_FILENO, std::string("stdout: ") + is(STDOUT_FILENO) +
                         ", stderr: " + is(STDERR_FILENO) + ", stdin: " + is(STDIN_FILENO));
}

void write_file(const std::string& value) {
  const auto colon = value.find(':');
  touch(value.substr(0, colon), value.substr(colon + 1));
}

std::map<std::string, Action> actions_for(const std::vector<std::string>& arguments) {
  return {
      {"json", [&](const std::string&) { print_json(arguments); }},
      {"env", print_variables},
      {"say", [](const std::string& text) { say(STDOUT_FILENO, text); }},
      {"err", [](const std::string& text) { say(STDERR_FILENO, text); }},
      {"part", [](const std::string& text) { write_all(STDOUT_FILENO, text); }},
      {"terminal", [](const std::string&) { print_terminal(); }},
      {"descriptors", [](const std::string&) { print_descriptors(); }},
      {"signals", [](const std::string&) { print_signals(); }},
      {"folder",
       [](const std::string&) { say(STDOUT_FILENO, std::filesystem::current_path().string()); }},
      {"chatter", [](const std::string& count) { chatter(std::stoi(count)); }},
      {"write", write_file},
      {"ready",
       [](const std::string& path) {
         touch(path + "." + variable("RANK"), std::to_string(::getpid()) + "\n");
       }},
      {"until", wait_for_file},
      {"sleep",
       [](const std::string& seconds) {
         std::this_thread::sleep_for(std::chrono::duration<double>(std::stod(seconds)));
       }},
      {"wait", [](const std::string&) { wait_forever(); }},
      {"trap", [](const std::string& code) { trap(std::stoi(code)); }},
      {"ignore", [](const std::string& name) { ::signal(signal_from(name), SIG_IGN); }},
      {"hear", [](const std::string& name) { ::signal(signal_from(name), heard); }},
      {"grandchild", [](const std::string&) { start_grandchild(false); }},
      {"escaped_grandchild", [](const std::string&) { start_grandchild(true); }},
      {"flaky",
       [](const std::string& restarts) {
         if (number_from("TORCHELASTIC_RESTART_COUNT", 0) < std::stoi(restarts)) leave(1);
       }},
      {"signal",
       [](const std::string& name) {
         ::signal(signal_from(name), SIG_DFL);
         ::kill(::getpid(), signal_from(name));
       }},
      {"exit", [](const std::string& code) { leave(std::stoi(code)); }},
  };
}

// "1:exit=3" is for rank 1 only.
bool is_for_us(std::string& word) {
  const auto colon = word.find(':');
  if (colon == std::string::npos || colon == 0) return true;
  int rank = 0;
  const auto [stop, error] = std::from_chars(word.data(), word.data() + colon, rank);
  if (error != std::errc() || stop != word.data() + colon) return true;
  word.erase(0, colon + 1);
  return rank == number_from("RANK", 0);
}

}  // namespace

int number_from(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr && *text != '\0' ? std::atoi(text) : otherwise;
}

void say(int fd, const std::string& line) { write_all(fd, line + "\n"); }

int act(const std::vector<std::string>& arguments, const std::map<std::string, Action>& more) {
  const auto known = actions_for(arguments);
  for (std::string word : arguments) {
    if (!is_for_us(word)) continue;
    const auto equals = word.find('=');
    const std::string name = word.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : word.substr(equals + 1);
    if (const auto found = more.find(name); found != more.end()) {
      found->second(value);
    } else if (const auto own = known.find(name); own != known.end()) {
      own->second(value);
    } else {
      say(STDERR_FILENO, "unknown action '" + word + "'");
      return 64;
    }
  }
  return 0;
}

}  // namespace accelerate::test
