// Any bytes are either the metadata of a distributed checkpoint or refused with a FormatError; the
// chunks of a tensor fill it, and no place leaves the folder.
#include "accelerate/errors.h"
#include "formats/dcp.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace accelerate;
  using namespace accelerate::detail::formats;
  try {
    for (const auto& entry : read_dcp_metadata(fuzz::text(data, size), "file")) {
      if (entry.dtype == nullptr) continue;
      std::uint64_t bytes = 0;
      for (const auto& chunk : entry.chunks) {
        auto volume = static_cast<std::uint64_t>(entry.dtype->bytes);
        for (const auto extent : chunk.sizes) volume *= static_cast<std::uint64_t>(extent);
        bytes += volume;
        const auto extent = extent_of(entry.sizes, chunk);
        fuzz::check(extent.begin >= 0 && extent.begin < extent.end &&
                        extent.end <= element_count(entry.sizes),
                    "a chunk is in its tensor");
        fuzz::check(volume <= chunk.place.length, "a chunk is not larger than its place");
        fuzz::check(chunk.place.file.find('/') == std::string::npos, "a place is in the folder");
      }
      fuzz::check(bytes == entry.bytes(), "chunks fill their tensor");
    }
  } catch (const FormatError&) {
  }
  return 0;
}
