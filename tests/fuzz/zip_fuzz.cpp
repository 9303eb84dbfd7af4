// Any file is either a torch archive or refused with a FormatError; the entries of a zip file lie
// apart inside the file, and survive writing and reading.
#include <algorithm>
#include <string>

#include "accelerate/errors.h"
#include "formats/archive.h"
#include "fuzz.h"

namespace {

using namespace accelerate;
using namespace accelerate::detail::formats;

void check_entries(const ByteSource& source, const ZipDirectory& directory) {
  std::string again;
  ZipWriter writer([&](std::string_view bytes) { again += bytes; });
  std::uint64_t bytes = 0;
  for (const auto& entry : directory.entries()) {
    fuzz::check(entry.offset <= source.size() && entry.size <= source.size() - entry.offset,
                "entries lie inside the file");
    fuzz::check(directory.find(entry.name) == &entry, "each is found by its name");
    bytes += entry.size;
    writer.add(entry.name, source.read(entry.offset, entry.size));
  }
  fuzz::check(bytes <= source.size(), "entries do not overlap");
  writer.finish();
  const MemoryBytes copy(again, "copy");
  const auto read = read_zip(copy);
  fuzz::check(read.entries().size() == directory.entries().size(), "all entries survive");
  for (const auto& entry : read.entries()) check_crc(copy, entry);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const MemoryBytes source(fuzz::text(data, size), "file");
  try {
    check_entries(source, read_zip(source));
  } catch (const FormatError&) {
  }
  try {
    const ArchiveReader archive(source);
    (void)archive.value().repr();
    if (const auto* tensor = leaf_as<PickleTensor>(archive.value())) {
      const auto& entry = archive.entry(*tensor->storage);
      fuzz::check(entry.size <= source.size(), "a storage lies inside the file");
    }
  } catch (const FormatError&) {
  }
  return 0;
}
