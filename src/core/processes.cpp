#include "core/processes.h"

#include <sys/stat.h>

#include <fstream>

#include "core/text.h"

namespace accelerate::detail::inline core {

std::string process_state(int pid) {
  std::ifstream file(str("/proc/", pid, "/stat"));
  std::string text;
  std::getline(file, text);  // an iterator would throw when the process goes meanwhile
  // The name stands in parentheses and may contain any letter.
  const auto end = text.rfind(')');
  if (end == std::string::npos || end + 2 >= text.size()) return "gone";
  switch (text[end + 2]) {
    case 'T':
    case 't':
      return "stopped";
    case 'Z':
    case 'X':
      return "a zombie";
    case 'D':
      return "waiting for a device";
    default:
      return "running";
  }
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
