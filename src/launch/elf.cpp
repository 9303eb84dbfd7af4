#include "launch/elf.h"

#include <elf.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "core/text.h"

namespace accelerate::detail {
namespace {

// A path longer than this is none.
constexpr std::uint64_t kLongestLoader = 4096;

// Numbers at fixed places of one header. The caller has checked that the header is complete.
class Header {
 public:
  Header(std::string bytes, bool little_endian)
      : bytes_(std::move(bytes)), little_endian_(little_endian) {}

  [[nodiscard]] std::size_t size() const { return bytes_.size(); }

  [[nodiscard]] std::uint64_t number(std::size_t offset, std::size_t width) const {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < width; ++i) {
      const std::size_t at = offset + (little_endian_ ? width - 1 - i : i);
      value = value << 8 | static_cast<unsigned char>(bytes_.at(at));
    }
    return value;
  }

 private:
  std::string bytes_;
  bool little_endian_;
};

// Where the two widths of the format keep what we look at.
struct Layout {
  std::size_t header_bytes;
  std::size_t entry, table, table_entry_bytes, table_entries;  // in the header
  std::size_t word;
  std::size_t segment_bytes;
  std::size_t segment_offset, segment_file_bytes;  // in an entry of the table
};
constexpr Layout k64Bits = {.header_bytes = sizeof(Elf64_Ehdr),
                            .entry = offsetof(Elf64_Ehdr, e_entry),
                            .table = offsetof(Elf64_Ehdr, e_phoff),
                            .table_entry_bytes = offsetof(Elf64_Ehdr, e_phentsize),
                            .table_entries = offsetof(Elf64_Ehdr, e_phnum),
                            .word = 8,
                            .segment_bytes = sizeof(Elf64_Phdr),
                            .segment_offset = offsetof(Elf64_Phdr, p_offset),
                            .segment_file_bytes = offsetof(Elf64_Phdr, p_filesz)};
constexpr Layout k32Bits = {.header_bytes = sizeof(Elf32_Ehdr),
                            .entry = offsetof(Elf32_Ehdr, e_entry),
                            .table = offsetof(Elf32_Ehdr, e_phoff),
                            .table_entry_bytes = offsetof(Elf32_Ehdr, e_phentsize),
                            .table_entries = offsetof(Elf32_Ehdr, e_phnum),
                            .word = 4,
                            .segment_bytes = sizeof(Elf32_Phdr),
                            .segment_offset = offsetof(Elf32_Phdr, p_offset),
                            .segment_file_bytes = offsetof(Elf32_Phdr, p_filesz)};

constexpr std::array<std::pair<int, std::string_view>, 10> kMachines = {
    {{EM_X86_64, "x86_64"},
     {EM_386, "i386"},
     {EM_AARCH64, "aarch64"},
     {EM_ARM, "arm"},
     {EM_PPC64, "ppc64"},
     {EM_RISCV, "riscv"},
     {EM_S390, "s390"},
     {EM_MIPS, "mips"},
     {EM_LOONGARCH, "loongarch"},
     {EM_SPARCV9, "sparc64"}}};

// What `read` gives may end early; a path in it ends at its zero.
std::optional<std::string> read_loader(const ReadAt& read, std::uint64_t offset,
                                       std::uint64_t bytes) {
  if (bytes < 2 || bytes > kLongestLoader) return std::nullopt;
  std::string text = read(offset, static_cast<std::size_t>(bytes));
  if (text.size() != bytes || text.find('\0') == std::string::npos) return std::nullopt;
  text.resize(text.find('\0'));
  return text;
}

ElfKind kind_of(std::uint64_t type, std::uint64_t entry, bool has_loader) {
  if (type == ET_REL) return ElfKind::kObject;
  if (type == ET_EXEC) return ElfKind::kProgram;
  // A program that can be loaded anywhere looks like a library, except that it begins somewhere.
  if (type == ET_DYN) return has_loader || entry != 0 ? ElfKind::kProgram : ElfKind::kLibrary;
  return ElfKind::kOther;
}

}  // namespace

bool is_elf(const ReadAt& read) { return read(0, SELFMAG) == ELFMAG; }

std::optional<ElfFacts> read_elf(const ReadAt& read) {
  const std::string identity = read(0, EI_NIDENT);
  if (identity.size() != EI_NIDENT || !identity.starts_with(ELFMAG)) return std::nullopt;
  if (identity[EI_CLASS] != ELFCLASS64 && identity[EI_CLASS] != ELFCLASS32) return std::nullopt;
  const Layout& layout = identity[EI_CLASS] == ELFCLASS64 ? k64Bits : k32Bits;
  const bool little_endian = identity[EI_DATA] != ELFDATA2MSB;

  const Header header(read(0, layout.header_bytes), little_endian);
  if (header.size() != layout.header_bytes) return std::nullopt;
  const auto table = header.number(layout.table, layout.word);
  const auto stride = header.number(layout.table_entry_bytes, 2);
  const auto count = header.number(layout.table_entries, 2);
  if (count > 0 && stride < layout.segment_bytes) return std::nullopt;

  ElfFacts facts;
  facts.machine = static_cast<int>(header.number(offsetof(Elf64_Ehdr, e_machine), 2));
  for (std::uint64_t i = 0; i < count; ++i) {
    const auto at = table + i * stride;
    if (at < table) return std::nullopt;  // beyond 64 bits
    const Header segment(read(at, layout.segment_bytes), little_endian);
    if (segment.size() != layout.segment_bytes) return std::nullopt;
    const auto type = segment.number(0, 4);
    const auto offset = segment.number(layout.segment_offset, layout.word);
    const auto bytes = segment.number(layout.segment_file_bytes, layout.word);
    if (offset + bytes < offset) return std::nullopt;
    if (type == PT_LOAD) facts.needed_bytes = std::max(facts.needed_bytes, offset + bytes);
    if (type != PT_INTERP) continue;
    const auto loader = read_loader(read, offset, bytes);
    if (!loader) return std::nullopt;
    facts.loader = *loader;
  }
  facts.kind = kind_of(header.number(offsetof(Elf64_Ehdr, e_type), 2),
                       header.number(layout.entry, layout.word), !facts.loader.empty());
  return facts;
}

std::string machine_name(int machine) {
  for (const auto& [number, name] : kMachines) {
    if (number == machine) return std::string(name);
  }
  return str("architecture ", machine);
}

bool machine_runs_here(int machine) {
#if defined(__x86_64__)
  return machine == EM_X86_64 || machine == EM_386;
#elif defined(__aarch64__)
  return machine == EM_AARCH64 || machine == EM_ARM;
#else
  static_cast<void>(machine);
  return true;
#endif
}

}  // namespace accelerate::detail
