#include "launch/program.h"

#include <link.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>

#include "accelerate/errors.h"
#include "core/subprocess.h"
#include "core/text.h"

namespace accelerate::detail::launch {
namespace {

namespace fs = std::filesystem;

// On a slow disk the libraries are not checked.
constexpr auto kLoaderLimit = std::chrono::seconds(20);
// A folder with more files than this is not searched for a similar name.
constexpr std::size_t kMostCandidates = 20'000;

[[noreturn]] void refuse(const std::string& path, std::string_view reason,
                         std::string_view remedy) {
  throw ConfigError(
      str("The program '", path, "' ", reason, ".", remedy.empty() ? "" : " ", remedy));
}

bool is_file(const std::string& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored);
}

bool can_execute(const std::string& path) {
  return is_file(path) && ::access(path.c_str(), X_OK) == 0;
}

// A similar name among the files for which `usable` returns true; "" if there is none.
template <class Usable>
std::string similar_name(const std::string& name, const std::vector<std::string>& folders,
                         Usable usable) {
  std::set<std::string> names;
  for (const auto& folder : folders) {
    std::error_code failed;
    for (fs::directory_iterator entry(folder, failed), end; !failed && entry != end;
         entry.increment(failed)) {
      if (names.size() >= kMostCandidates) return "";
      names.insert(entry->path().filename().string());
    }
  }
  // Only the few similar names are checked on disk.
  std::vector<std::string> left(names.begin(), names.end());
  for (int attempt = 0; attempt < 5; ++attempt) {
    auto candidate = nearest(name, left);
    if (candidate.empty()) return "";
    for (const auto& folder : folders) {
      if (usable(folder + "/" + candidate)) return candidate;
    }
    std::erase(left, candidate);
  }
  return "";
}

[[noreturn]] void refuse_missing_in_path(const std::string& name, const Environment& environment) {
  if (is_file("./" + name)) {
    refuse(name, "is in the current folder, which PATH does not contain",
           str("Write ./", name, " instead."));
  }
  const auto similar = similar_name(name, path_folders(environment), can_execute);
  refuse(name, "is in no folder of PATH",
         similar.empty() ? "Give its path, such as build/train."
                         : str("Did you mean '", similar, "'?"));
}

// Explains the error of stat().
[[noreturn]] void refuse_unreachable(const std::string& path, int error, bool must_be_executable) {
  std::error_code ignored;
  if (fs::is_symlink(path, ignored)) {
    refuse(
        path,
        str("is a link to '", fs::read_symlink(path, ignored).string(), "', which does not exist"),
        "Correct the link, or build what it names.");
  }
  if (error != ENOENT) refuse(path, str("cannot be reached: ", std::strerror(error)), "");
  const auto folder = fs::path(path).parent_path();
  const std::string here = folder.empty() ? "." : folder.string();
  if (!fs::is_directory(here, ignored)) {
    refuse(path, str("does not exist, nor does the folder '", here, "'"),
           "Paths count from the folder in which accelerate is called.");
  }
  const auto similar =
      similar_name(fs::path(path).filename().string(), {here}, [&](const std::string& candidate) {
        return must_be_executable ? can_execute(candidate) : is_file(candidate);
      });
  refuse(path, "does not exist",
         similar.empty() ? "Build it first, or correct the path."
                         : str("Did you mean '", (folder / similar).string(), "'?"));
}

void require_executable_file(const std::string& path) {
  struct stat facts = {};
  if (::stat(path.c_str(), &facts) != 0) refuse_unreachable(path, errno, true);
  if (S_ISDIR(facts.st_mode)) refuse(path, "is a folder", "Name the file in it to run.");
  if (!S_ISREG(facts.st_mode)) refuse(path, "is not a file", "");
  if (::access(path.c_str(), X_OK) == 0) return;
  if ((facts.st_mode & (S_IXUSR | S_IXGRP | S_IXOTH)) == 0) {
    const bool python = path.ends_with(".py");
    refuse(path, "is not executable",
           str("Run chmod +x ", path, python ? ", or leave out --no_python." : "."));
  }
  refuse(path, "may not be executed by this user, or lies on a disk that forbids it",
         "Look at its permissions (ls -l) and at the mount options (noexec).");
}

// ---- scripts ------------------------------------------------------------------------------------

// The words of a #! line: the interpreter and its arguments.
std::vector<std::string> words_of(std::string line) {
  std::ranges::replace(line, '\t', ' ');
  auto words = split(line, ' ');
  std::erase(words, "");
  return words;
}

// The program in a "#!/usr/bin/env program" line; nullopt for other lines.
std::optional<std::string> program_of_env(const std::vector<std::string>& words) {
  if (words.size() != 2 || fs::path(words[0]).filename() != "env") return std::nullopt;
  const bool plain =
      !words[1].starts_with('-') && words[1].find_first_of("=/") == std::string::npos;
  return plain ? std::optional(words[1]) : std::nullopt;
}

// Checks the interpreter of a script; does nothing for other files.
void check_script(const std::string& path, const Environment& environment) {
  std::ifstream file(path, std::ios::binary);
  std::string line;
  if (file.get() != '#' || file.get() != '!' || !std::getline(file, line)) return;
  if (line.ends_with('\r')) {
    refuse(path, "has Windows line ends, which the system takes for a part of the #! line",
           str("Run sed -i 's/\\r$//' ", path, "."));
  }
  const auto words = words_of(line);
  if (words.empty()) {
    refuse(path, "has an empty #! line", "Begin it with a line such as #!/bin/sh.");
  }
  if (!can_execute(words[0])) {
    refuse(path,
           str("names the interpreter '", words[0], "' in its first line, which is not there"),
           "Install it or correct the line.");
  }
  const auto asked = program_of_env(words);
  if (asked && find_in_path(*asked, environment).empty()) {
    refuse(path, str("asks for '", *asked, "' in its first line, which is in no folder of PATH"),
           "Install it, extend PATH or correct the line.");
  }
}

// ---- binaries -----------------------------------------------------------------------------------

std::string loader_of_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return loader_of(file);
}

// Throws if execve() refuses the file. A traced child stops before its first instruction and is
// killed there. Where tracing is not allowed, the start itself reports the error.
void require_accepted_by_kernel(const std::string& path) {
  std::string program = path;
  std::array<char*, 2> argv = {program.data(), nullptr};
  char* no_variables = nullptr;
  const pid_t child = ::fork();
  if (child < 0) return;
  if (child == 0) {
    if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(0);
    ::execve(program.c_str(), argv.data(), &no_variables);
    ::_exit(errno);
  }
  int status = 0;
  const auto wait = [&] {
    while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
  };
  wait();
  const int error = WIFEXITED(status) ? WEXITSTATUS(status) : 0;
  int signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  if (WIFSTOPPED(status)) {
    signal = WSTOPSIG(status);  // SIGTRAP after a successful execve
    ::kill(child, SIGKILL);
    wait();
  }
  // The kernel could not map all segments.
  if (signal == SIGSEGV) refuse(path, "is damaged or cut off", "Build or copy it again.");
  if (error == ENOEXEC) {
    utsname machine = {};
    ::uname(&machine);
    refuse(path, str("is neither a binary for ", machine.machine, " nor a script with a #! line"),
           "Build it on this machine, or begin a script with a line such as #!/bin/sh.");
  }
  if (error == ENOENT) {
    refuse(path, str("needs the loader '", loader_of_file(path), "', which is not on this machine"),
           "Build it here, or run it in the container it was built for.");
  }
  if (error != 0) refuse(path, str("cannot be executed: ", std::strerror(error)), "");
}

// Asks the loader, as ldd does, whether a binary loads libaccelerate.so, or else the kernel whether
// it can execute the file. Executes nothing of the program. Throws if the file cannot be executed,
// and with the loader's words if a library or a version of one is missing.
bool loads_accelerate(const std::string& path, const Environment& environment) {
  const std::string loader = loader_of_file(path);
  const auto name = fs::path(loader).filename().string();
  std::error_code failed;
  // $ORIGIN is the folder of the file, not of a link to it.
  const auto real_path = fs::canonical(path, failed);
  // A loader without LD_TRACE_LOADED_OBJECTS (musl's) would run the program.
  const bool known = name.starts_with("ld-linux") || name.starts_with("ld64.so");
  if (failed || !known || !can_execute(loader)) {
    require_accepted_by_kernel(path);
    return false;
  }

  auto variables = environment.variables();
  // Switches that would change the answer.
  for (const auto* variable : {"LD_DEBUG", "LD_VERBOSE", "LD_WARN", "LD_SHOW_AUXV"}) {
    variables.erase(variable);
  }
  variables["LD_TRACE_LOADED_OBJECTS"] = "1";
  variables["LC_ALL"] = "C";
  std::vector<std::string> settings;
  for (const auto& [variable, value] : variables) settings.push_back(variable + "=" + value);
  bool found = false;
  std::set<std::string> missing;
  ProcessSet processes([&](std::size_t, ProcessSet::Stream, std::string_view text) {
    const auto line = trim(text);
    if (line.find("not found") != std::string_view::npos ||
        line.find("error while loading") != std::string_view::npos) {
      missing.emplace(line);
    } else if (line.starts_with("libaccelerate.so")) {
      found = true;
    }
  });
  processes.spawn({.argv = {loader, real_path.string()},
                   .environment = settings,
                   .output = StreamTarget::kPipe,
                   .error = StreamTarget::kWithOutput});
  if (!processes.wait_all(ProcessSet::Clock::now() + kLoaderLimit)) return false;
  // What the loader lists without an error, the kernel executes.
  if (missing.empty() && processes.status(0).ok()) return found;
  require_accepted_by_kernel(path);
  if (missing.empty()) return found;
  refuse(path, str("cannot load its libraries: ", join(missing, "; ")),
         "Add their folders to LD_LIBRARY_PATH, build the program with an RPATH, or build it on "
         "this machine.");
}

// ---- Python -------------------------------------------------------------------------------------

bool is_python_interpreter(const std::string& path) {
  std::string name = fs::path(path).filename().string();
  for (const std::string_view start : {"python", "pypy"}) {
    if (name.starts_with(start) &&
        name.find_first_not_of("0123456789.", start.size()) == std::string::npos) {
      return true;
    }
  }
  return false;
}

// The script in Python's arguments; nullopt for a module, -c or standard input.
std::optional<std::string> python_script(const std::vector<std::string>& argv) {
  for (std::size_t i = 1; i < argv.size(); ++i) {
    const auto& word = argv[i];
    if (word == "-") return std::nullopt;
    if (!word.starts_with('-')) return word;
    if (word.starts_with("--")) {
      if (word == "--check-hash-based-pycs") ++i;
      continue;
    }
    // Short options may share a word; the value of the last may be the next word.
    const auto with_value = word.find_first_of("cmXW", 1);
    if (with_value == std::string::npos) continue;
    if (word[with_value] == 'c' || word[with_value] == 'm') return std::nullopt;
    if (with_value + 1 == word.size()) ++i;
  }
  return std::nullopt;
}

void check_python_script(const std::string& path) {
  struct stat facts = {};
  if (::stat(path.c_str(), &facts) != 0) refuse_unreachable(path, errno, false);
  if (S_ISDIR(facts.st_mode)) {
    if (is_file(path + "/__main__.py")) return;
    refuse(path, "is a folder without a __main__.py", "Name the script in it to run.");
  }
  if (::access(path.c_str(), R_OK) != 0) {
    refuse(path, "cannot be read by this user", str("Look at its permissions: ls -l ", path, "."));
  }
}

}  // namespace

std::string loader_of(std::istream& file) {
  const auto read_at = [&](std::uint64_t offset, char* bytes, std::size_t count) {
    file.seekg(static_cast<std::streamoff>(offset));
    return static_cast<bool>(file.read(bytes, static_cast<std::streamsize>(count)));
  };
  ElfW(Ehdr) header = {};
  if (!read_at(0, reinterpret_cast<char*>(&header), sizeof header)) return "";
  constexpr int kClass = sizeof(void*) == 8 ? ELFCLASS64 : ELFCLASS32;
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != kClass) {
    return "";
  }
  for (std::uint64_t i = 0; i < header.e_phnum; ++i) {
    ElfW(Phdr) segment = {};
    const auto offset = header.e_phoff + i * header.e_phentsize;
    if (!read_at(offset, reinterpret_cast<char*>(&segment), sizeof segment)) return "";
    if (segment.p_type != PT_INTERP || segment.p_filesz > PATH_MAX) continue;
    std::string loader(segment.p_filesz, '\0');
    return read_at(segment.p_offset, loader.data(), loader.size()) ? loader.c_str() : "";
  }
  return "";
}

ProgramFacts inspect_program(const std::vector<std::string>& argv, const Environment& environment) {
  if (argv.empty() || argv[0].empty()) throw ConfigError("There is no program to start.");
  ProgramFacts facts{.path = argv[0]};
  if (argv[0].find('/') == std::string::npos) {
    facts.path = find_in_path(argv[0], environment);
    if (facts.path.empty()) refuse_missing_in_path(argv[0], environment);
  }
  require_executable_file(facts.path);
  check_script(facts.path, environment);
  facts.takes_listen_fd = loads_accelerate(facts.path, environment);
  facts.is_python = is_python_interpreter(facts.path);
  if (facts.is_python) {
    if (const auto script = python_script(argv)) check_python_script(*script);
  }
  return facts;
}

}  // namespace accelerate::detail::launch
