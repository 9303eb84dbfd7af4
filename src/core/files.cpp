#include "core/files.h"

#include <fcntl.h>
#include <pwd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <system_error>

#include "accelerate/errors.h"
#include "core/descriptor.h"
#include "core/output_file.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse_to_read(const fs::path& path, int error) {
  throw ConfigError(
      str("Cannot read '", path.string(), "': ", std::generic_category().message(error), "."));
}

}  // namespace

std::string read_whole_file(const fs::path& path, std::size_t max_bytes) {
  const Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) refuse_to_read(path, errno);
  std::string content;
  std::array<char, 65536> buffer{};
  for (;;) {
    const auto count = ::read(fd.get(), buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) refuse_to_read(path, errno);
    if (count == 0) return content;
    content.append(buffer.data(), static_cast<std::size_t>(count));
    if (content.size() > max_bytes) {
      throw ConfigError(
          str("Cannot read '", path.string(), "': it is larger than ", max_bytes, " bytes."));
    }
  }
}

void write_file_atomically(const fs::path& path, std::string_view content) {
  try {
    OutputFile file(path);
    file.write(content);
    file.publish();
  } catch (const CheckpointError& error) {
    throw ConfigError(error.what());
  }
}

fs::path expand_user(const std::string& path, const Environment& environment) {
  if (path != "~" && !path.starts_with("~/")) return path;
  std::string home = environment.get("HOME").value_or("");
  if (home.empty()) {
    const passwd* entry =
        ::getpwuid(::getuid());  // NOLINT(concurrency-mt-unsafe): nothing edits it
    if (entry == nullptr || entry->pw_dir == nullptr) return path;
    home = entry->pw_dir;
  }
  return home + path.substr(1);
}

}  // namespace accelerate::detail::inline core
