// src/launch/elf.h - what the headers of an ELF file say about where it can run.
//
// The file comes from anywhere, so nothing in it is believed before it is compared with its size.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace accelerate::detail {

/// Up to `count` bytes of a file from `offset` on; fewer at its end.
using ReadAt = std::function<std::string(std::uint64_t offset, std::size_t count)>;

enum class ElfKind : std::uint8_t { kProgram, kLibrary, kObject, kOther };

struct ElfFacts {
  ElfKind kind = ElfKind::kOther;
  /// The number of the processor architecture, as in <elf.h>.
  int machine = 0;
  /// The program that loads the libraries of this one; "" when it needs none.
  std::string loader = {};
  /// The file must be at least this long for its segments to be there.
  std::uint64_t needed_bytes = 0;
};

/// Whether the file begins as an ELF file does.
[[nodiscard]] bool is_elf(const ReadAt& read);

/// Nothing when the headers are damaged or lie outside of the file.
[[nodiscard]] std::optional<ElfFacts> read_elf(const ReadAt& read);

/// "x86_64" for 62; "architecture 999" for what we have no name for.
[[nodiscard]] std::string machine_name(int machine);

/// Whether this computer executes programs of that architecture itself.
[[nodiscard]] bool machine_runs_here(int machine);

}  // namespace accelerate::detail
