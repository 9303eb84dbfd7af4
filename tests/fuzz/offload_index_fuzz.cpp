// Any text is read as the index of an offload folder or refused with a FormatError, and no tensor
// of an index has its file outside of the folder.
#include <string>

#include "accelerate/errors.h"
#include "formats/offload_index.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace accelerate;
  OffloadIndex index;
  try {
    index = detail::formats::parse_offload_index(fuzz::text(data, size), "index.json");
  } catch (const FormatError&) {
    return 0;
  }
  for (const auto& [name, weight] : index) {
    if (weight.safetensors_file) continue;
    fuzz::check(!name.empty() && name.find('/') == name.npos, "files are in the folder");
    fuzz::check(name != "." && name != "..", "files are no folders");
    fuzz::check(name.find('\0') == name.npos, "file names have no zero byte");
    std::int64_t elements = 1;
    for (const auto length : weight.shape) elements *= length;
    fuzz::check(elements >= 0 && elements <= std::int64_t{1} << 60, "sizes can be computed with");
  }
  const auto text = detail::formats::write_offload_index(index);
  const auto again = detail::formats::parse_offload_index(text, "");
  fuzz::check(detail::formats::write_offload_index(again) == text,
              "reading gives back what was written");
  return 0;
}
