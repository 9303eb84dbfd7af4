#include "launch/binfmt.h"

#include <charconv>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <system_error>

#include "core/text.h"

namespace accelerate::detail {
namespace {

namespace fs = std::filesystem;

std::optional<std::string> bytes_of_hex(std::string_view hex) {
  if (hex.size() % 2 != 0) return std::nullopt;
  std::string bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2) {
    std::uint8_t byte = 0;
    const auto [end, error] = std::from_chars(hex.data() + i, hex.data() + i + 2, byte, 16);
    if (error != std::errc() || end != hex.data() + i + 2) return std::nullopt;
    bytes.push_back(static_cast<char>(byte));
  }
  return bytes;
}

bool fits_magic(std::string_view head, std::size_t offset, const std::string& magic,
                const std::string& mask) {
  if (magic.empty() || offset > head.size() || head.size() - offset < magic.size()) return false;
  for (std::size_t i = 0; i < magic.size(); ++i) {
    const auto mask_byte = static_cast<unsigned char>(i < mask.size() ? mask[i] : '\xff');
    const auto difference = static_cast<unsigned char>(head[offset + i] ^ magic[i]);
    if ((difference & mask_byte) != 0) return false;
  }
  return true;
}

}  // namespace

bool fits_binfmt_rule(std::string_view rule, std::string_view file_name, std::string_view head) {
  bool enabled = false;
  std::size_t offset = 0;
  std::string magic;
  std::string mask;
  for (const auto& line : split(rule, '\n')) {
    const auto blank = line.find(' ');
    const std::string name = line.substr(0, blank);
    const std::string value = blank == std::string::npos ? "" : line.substr(blank + 1);
    if (name == "enabled") enabled = true;
    if (name == "extension") return enabled && file_name.ends_with(value);
    if (name == "offset") std::from_chars(value.data(), value.data() + value.size(), offset);
    if (name == "magic") magic = bytes_of_hex(value).value_or("");
    if (name == "mask") mask = bytes_of_hex(value).value_or("");
  }
  return enabled && fits_magic(head, offset, magic, mask);
}

bool runs_by_binfmt(const fs::path& file, std::string_view head) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator("/proc/sys/fs/binfmt_misc", ignored)) {
    const auto name = entry.path().filename();
    if (name == "register" || name == "status") continue;
    std::ifstream stream(entry.path());
    const std::string rule{std::istreambuf_iterator<char>(stream), {}};
    if (fits_binfmt_rule(rule, file.filename().string(), head)) return true;
  }
  return false;
}

}  // namespace accelerate::detail
