// Any text is read as the index of shards or refused with a FormatError, and no file that an index
// names is outside of its folder.
#include <string>

#include "accelerate/errors.h"
#include "formats/shard_index.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace accelerate;
  detail::formats::ShardIndex index;
  try {
    index = detail::formats::read_shard_index(fuzz::text(data, size), "index.json");
  } catch (const FormatError&) {
    return 0;
  }
  for (const auto& file : index.files) {
    fuzz::check(!file.empty() && file.front() != '/', "file names are relative");
    fuzz::check(("/" + file + "/").find("/../") == std::string::npos, "no file is in a parent");
    fuzz::check(file.find('\0') == std::string::npos, "file names have no zero byte");
  }
  StateDictSplit split{.is_sharded = true};
  for (const auto& [name, file] : index.weight_map) split.tensor_to_filename.set(name, file);
  const auto again =
      detail::formats::read_shard_index(detail::formats::write_shard_index(split), "");
  fuzz::check(again.weight_map == index.weight_map, "reading gives back what was written");
  return 0;
}
