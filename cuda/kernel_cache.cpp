#include "kernel_cache.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <ios>
#include <span>
#include <sstream>
#include <system_error>

#include "core/text.h"
#include "core/xxh3.h"

namespace accelerate::detail::cuda {
namespace {

namespace fs = std::filesystem;

/// At the start of a file; the binary follows.
struct CacheHeader {
  std::array<char, 8> magic{'A', 'C', 'C', 'K', 'R', 'N', '0', '1'};
  std::uint64_t key = 0;  // sum of it
  std::uint64_t key_bytes = 0;
  std::uint64_t bytes = 0;
  std::uint64_t sum = 0;

  bool operator==(const CacheHeader&) const = default;
};

std::uint64_t sum_of(std::string_view text) { return xxh3(std::as_bytes(std::span(text))); }

CacheHeader header_of(std::string_view key, std::string_view binary) {
  return {
      .key = sum_of(key), .key_bytes = key.size(), .bytes = binary.size(), .sum = sum_of(binary)};
}

/// Empty if the user has no folder.
fs::path cache_folder() {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  if (cache != nullptr && *cache == '/') return fs::path(cache) / "accelerate/kernels";
  const char* home = std::getenv("HOME");
  if (home == nullptr || *home != '/') return {};
  return fs::path(home) / ".cache/accelerate/kernels";
}

fs::path cache_file(const fs::path& folder, std::string_view key) {
  std::ostringstream name;
  name << std::hex << sum_of(key) << ".cubin";
  return folder / std::move(name).str();
}

}  // namespace

std::optional<std::string> find_cached_kernel(std::string_view key) {
  const auto folder = cache_folder();
  if (folder.empty()) return std::nullopt;
  std::ifstream file(cache_file(folder, key), std::ios::binary);
  CacheHeader header;
  if (!file.read(reinterpret_cast<char*>(&header), sizeof header)) return std::nullopt;
  constexpr std::uint64_t kMostBytes = std::uint64_t{64} << 20;
  if (header.bytes == 0 || header.bytes > kMostBytes) return std::nullopt;
  std::string binary(header.bytes, '\0');
  if (!file.read(binary.data(), static_cast<std::streamsize>(binary.size()))) return std::nullopt;
  if (header != header_of(key, binary)) return std::nullopt;
  return binary;
}

void cache_kernel(std::string_view key, std::string_view binary) noexcept {
  try {
    const auto folder = cache_folder();
    if (folder.empty()) return;
    std::error_code failed;
    fs::create_directories(folder, failed);
    if (failed) return;
    static std::atomic<int> count = 0;
    const auto target = cache_file(folder, key);
    const auto temporary =
        folder / str(target.filename().string(), ".", ::getpid(), ".", ++count, ".tmp");
    const auto header = header_of(key, binary);
    std::ofstream file(temporary, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&header), sizeof header);
    file.write(binary.data(), static_cast<std::streamsize>(binary.size()));
    file.close();
    if (file) fs::rename(temporary, target, failed);
    if (!file || failed) fs::remove(temporary, failed);
  } catch (const std::exception&) {
    // The next process compiles again.
  }
}

}  // namespace accelerate::detail::cuda
