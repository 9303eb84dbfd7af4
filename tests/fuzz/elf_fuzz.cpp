// Any bytes are read or refused; nothing is looked at outside of them.
#include "fuzz.h"
#include "launch/elf.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace accelerate;
  const auto bytes = fuzz::text(data, size);
  const detail::ReadAt read = [&](std::uint64_t offset, std::size_t count) {
    return std::string(offset >= bytes.size() ? "" : bytes.substr(offset, count));
  };
  const bool begins_so = detail::is_elf(read);
  const auto facts = detail::read_elf(read);
  fuzz::check(begins_so || !facts, "only ELF files have facts");
  if (!facts) return 0;
  fuzz::check(facts->loader.find('\0') == std::string::npos, "a loader is a path");
  fuzz::check(!detail::machine_name(facts->machine).empty(), "every machine can be named");
  return 0;
}
