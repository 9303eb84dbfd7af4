// Any text is read as the manifest of a checkpoint or refused with a FormatError, no file that a
// manifest names is outside of its folder, and what was read is written and read again.
#include <algorithm>
#include <string>

#include "accelerate/errors.h"
#include "formats/manifest.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace accelerate;
  detail::formats::Manifest manifest;
  try {
    manifest = detail::formats::parse_manifest(fuzz::text(data, size), "m.json");
  } catch (const FormatError&) {
    return 0;
  }
  for (const auto& file : manifest.files) {
    fuzz::check(!file.name.empty() && file.name.front() != '/', "file names are relative");
    fuzz::check(("/" + file.name + "/").find("/../") == std::string::npos,
                "no file is in a parent");
    fuzz::check(file.size >= 0, "sizes are not negative");
  }
  fuzz::check(std::ranges::is_sorted(manifest.files, {}, &detail::formats::ManifestFile::name),
              "files are sorted");
  const auto again =
      detail::formats::parse_manifest(detail::formats::write_manifest(manifest), "m.json");
  fuzz::check(again == manifest, "reading gives back what was written");
  return 0;
}
