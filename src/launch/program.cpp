#include "launch/program.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <limits>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>

#include "accelerate/errors.h"
#include "core/subprocess.h"
#include "core/text.h"
#include "launch/binfmt.h"
#include "launch/elf.h"

namespace accelerate::detail {
namespace {

namespace fs = std::filesystem;

// On a disk that does not answer we start without having looked at the libraries.
constexpr auto kLoaderLimit = std::chrono::seconds(20);
// A folder with more files than this is not searched for a similar name.
constexpr std::size_t kMostCandidates = 20'000;

class OpenFile {
 public:
  explicit OpenFile(const std::string& path)
      : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {}
  ~OpenFile() {
    if (fd_ >= 0) ::close(fd_);
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  [[nodiscard]] bool is_open() const { return fd_ >= 0; }

  [[nodiscard]] std::string read(std::uint64_t offset, std::size_t count) const {
    if (offset > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max())) return {};
    std::string bytes(count, '\0');
    std::size_t filled = 0;
    while (filled < count) {
      const ssize_t got =
          ::pread(fd_, bytes.data() + filled, count - filled, static_cast<off_t>(offset + filled));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) break;
      filled += static_cast<std::size_t>(got);
    }
    bytes.resize(filled);
    return bytes;
  }

 private:
  int fd_;
};

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

std::vector<std::string> folders_of_path(const Environment& environment) {
  auto folders = split(environment.get("PATH").value_or("/usr/local/bin:/usr/bin:/bin"), ':');
  for (auto& folder : folders) {
    if (folder.empty()) folder = ".";  // as execvp reads it
  }
  return folders;
}

std::optional<std::string> find_in_path(const std::string& name, const Environment& environment) {
  for (const auto& folder : folders_of_path(environment)) {
    if (const auto candidate = folder + "/" + name; can_execute(candidate)) return candidate;
  }
  return std::nullopt;
}

// A similar name among the files that `usable` takes.
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
  // Few names are similar, so only those are looked at on disk.
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
  const auto similar = similar_name(name, folders_of_path(environment), can_execute);
  refuse(name, "is in no folder of PATH",
         similar.empty() ? "Give its path, such as build/train."
                         : str("Did you mean '", similar, "'?"));
}

// What stat() says about a file that cannot be reached.
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
  if (S_ISDIR(facts.st_mode)) refuse(path, "is a folder", "Name the file in it that shall run.");
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

// The interpreter and its argument, in words, as the kernel cuts the line behind "#!".
std::vector<std::string> words_of(std::string line) {
  std::ranges::replace(line, '\t', ' ');
  auto words = split(line, ' ');
  std::erase(words, "");
  return words;
}

// The program that a "#!/usr/bin/env program" line asks for.
std::optional<std::string> program_of_env(const std::vector<std::string>& words) {
  if (words.size() != 2 || fs::path(words[0]).filename() != "env") return std::nullopt;
  const bool plain =
      !words[1].starts_with('-') && words[1].find_first_of("=/") == std::string::npos;
  return plain ? std::optional(words[1]) : std::nullopt;
}

void check_script(const std::string& path, const std::string& head,
                  const Environment& environment) {
  const std::string line = head.substr(2, head.find('\n') - 2);
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
  if (asked && !find_in_path(*asked, environment)) {
    refuse(path, str("asks for '", *asked, "' in its first line, which is in no folder of PATH"),
           "Install it, extend PATH or correct the line.");
  }
}

// ---- binaries -----------------------------------------------------------------------------------

struct Libraries {
  std::vector<std::string> missing;
  /// "libstdc++.so.6 has no version GLIBCXX_3.4.99"
  std::vector<std::string> too_old;
  bool accelerate = false;
};

// "/lib/libstdc++.so.6: version `GLIBCXX_3.4.99' not found (required by ./train)"
std::optional<std::string> version_complaint(const std::string& line) {
  constexpr std::string_view kVersion = ": version `";
  const auto at = line.find(kVersion);
  if (at == std::string::npos || line.find("not found") == std::string::npos) return std::nullopt;
  const std::string before = line.substr(0, at);
  const fs::path library = before.substr(before.rfind(' ') + 1);  // npos + 1 is 0
  const std::string version = split(line.substr(at + kVersion.size()), '\'').front();
  return str(library.filename().string(), " has no version ", version);
}

void read_loader_line(std::string_view text, Libraries& libraries) {
  const std::string line(trim(text));
  if (auto complaint = version_complaint(line)) {
    if (std::ranges::find(libraries.too_old, *complaint) == libraries.too_old.end()) {
      libraries.too_old.push_back(std::move(*complaint));
    }
    return;
  }
  const auto arrow = line.find(" => ");
  if (arrow == std::string::npos) return;
  const std::string name = line.substr(0, arrow);
  const std::string found = line.substr(arrow + 4);
  if (found.starts_with("not found")) {
    libraries.missing.push_back(name);
  } else if (fs::path(name).filename().string().starts_with("libaccelerate.so")) {
    libraries.accelerate = true;
  }
}

// Asks the loader which libraries it would load, as ldd does. That executes nothing of the program.
//
// Nothing when the loader is none that we know: one without this switch would run the program.
std::optional<Libraries> list_libraries(const std::string& path, const std::string& loader,
                                        const Environment& environment) {
  const auto name = fs::path(loader).filename().string();
  if (!name.starts_with("ld-linux") && !name.starts_with("ld64.so")) return std::nullopt;

  auto variables = environment.variables();
  // Switches that would change the answer.
  for (const auto* name : {"LD_DEBUG", "LD_VERBOSE", "LD_WARN", "LD_SHOW_AUXV"}) {
    variables.erase(name);
  }
  variables["LD_TRACE_LOADED_OBJECTS"] = "1";
  variables["LC_ALL"] = "C";
  std::vector<std::string> settings;
  for (const auto& [variable, value] : variables) settings.push_back(variable + "=" + value);
  // $ORIGIN counts from where the file is, not from a link to it.
  std::error_code failed;
  const auto real_path = fs::canonical(path, failed);
  if (failed) return std::nullopt;

  Libraries libraries;
  ProcessSet processes([&](std::size_t, ProcessSet::Stream, std::string_view line) {
    read_loader_line(line, libraries);
  });
  processes.spawn({.argv = {loader, real_path.string()},
                   .environment = settings,
                   .output = StreamTarget::kPipe,
                   .error = StreamTarget::kWithOutput});
  if (!processes.wait_all(ProcessSet::Clock::now() + kLoaderLimit)) return std::nullopt;
  return libraries;
}

void refuse_incomplete(const std::string& path, const Libraries& libraries) {
  if (!libraries.missing.empty()) {
    const bool one = libraries.missing.size() == 1;
    refuse(path,
           str("needs ", one ? "the library " : "libraries ", join(libraries.missing),
               one ? ", which is not found" : ", which are not found"),
           str("Add the folder that holds ", one ? "it" : "them",
               " to LD_LIBRARY_PATH, or build the program with an RPATH."));
  }
  if (!libraries.too_old.empty()) {
    refuse(path, str("needs newer libraries than this machine has: ", join(libraries.too_old)),
           "Build it on this machine, or set LD_LIBRARY_PATH to the libraries it was built with.");
  }
}

// Whether the program loads libaccelerate.so.
bool check_binary(const std::string& path, const OpenFile& file, const std::string& head,
                  const Environment& environment) {
  const auto read = [&](std::uint64_t offset, std::size_t count) {
    return file.read(offset, count);
  };
  const auto elf = read_elf(read);
  std::error_code failed;
  const auto size = fs::file_size(path, failed);
  if (!elf || (!failed && size < elf->needed_bytes)) {
    refuse(
        path,
        elf ? str("is cut off: it should have ", elf->needed_bytes, " bytes or more and has ", size)
            : "is damaged or cut off",
        "Build or copy it again.");
  }
  if (elf->kind == ElfKind::kObject || elf->kind == ElfKind::kLibrary) {
    refuse(path, elf->kind == ElfKind::kObject ? "is an object file" : "is a library",
           "Name the program that was linked from it.");
  }
  if (!machine_runs_here(elf->machine)) {
    if (runs_by_binfmt(path, head)) return false;
    refuse(path, str("was built for ", machine_name(elf->machine), ", not for this machine"),
           "Build it here.");
  }
  if (elf->loader.empty()) return false;
  if (!can_execute(elf->loader)) {
    refuse(path, str("needs the loader '", elf->loader, "', which is not on this machine"),
           "Build it here, or run it in the container it was built for.");
  }
  const auto libraries = list_libraries(path, elf->loader, environment);
  if (!libraries) return false;
  refuse_incomplete(path, *libraries);
  return libraries->accelerate;
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

// The script in the arguments of Python; nothing for a module, a text or standard input.
std::optional<std::string> python_script(const std::vector<std::string>& argv) {
  for (std::size_t i = 1; i < argv.size(); ++i) {
    const auto& word = argv[i];
    if (word == "-") return std::nullopt;
    if (!word.starts_with('-')) return word;
    if (word.starts_with("--")) {
      if (word == "--check-hash-based-pycs") ++i;
      continue;
    }
    // Short options may be written in one word, and the last may have its value in the next.
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
    refuse(path, "is a folder without a __main__.py", "Name the script in it that shall run.");
  }
  if (::access(path.c_str(), R_OK) != 0) {
    refuse(path, "cannot be read by this user", str("Look at its permissions: ls -l ", path, "."));
  }
}

}  // namespace

ProgramFacts inspect_program(const std::vector<std::string>& argv, const Environment& environment) {
  if (argv.empty() || argv[0].empty()) throw ConfigError("There is no program to start.");
  ProgramFacts facts{.path = argv[0]};
  if (argv[0].find('/') == std::string::npos) {
    const auto found = find_in_path(argv[0], environment);
    if (!found) refuse_missing_in_path(argv[0], environment);
    facts.path = *found;
  }
  require_executable_file(facts.path);
  facts.is_python = is_python_interpreter(facts.path);

  // What may be executed but not read, the kernel has to judge.
  if (const OpenFile file(facts.path); file.is_open()) {
    const std::string head = file.read(0, kBinfmtHead);
    if (head.empty()) refuse(facts.path, "is an empty file", "Build or copy it again.");
    const auto read = [&](std::uint64_t offset, std::size_t count) {
      return file.read(offset, count);
    };
    if (is_elf(read)) {
      facts.takes_listen_fd = check_binary(facts.path, file, head, environment);
    } else if (head.starts_with("#!")) {
      check_script(facts.path, head, environment);
    } else if (!runs_by_binfmt(facts.path, head)) {
      refuse(facts.path, "is neither a binary nor a script with a #! line",
             "Begin a script with a line such as #!/bin/sh.");
    }
  }
  if (facts.is_python) {
    if (const auto script = python_script(argv)) check_python_script(*script);
  }
  return facts;
}

}  // namespace accelerate::detail
