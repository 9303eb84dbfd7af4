#include "formats/legacy_archive.h"

#include <algorithm>
#include <map>

#include "core/text.h"
#include "formats/little_endian.h"
#include "formats/pickle.h"
#include "formats/pickle_value.h"

namespace accelerate::detail::formats {
namespace {

// The pickle of 0x1950a86a20f9469cfc6c, the first of five: this number, the version of the format,
// facts of the machine, the value, and the keys of the storages.
constexpr std::string_view kMagic("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.", 15);
constexpr std::int64_t kVersion = 1001;

using Storages = std::map<std::string, const PickleStorage*, std::less<>>;

/// The storages of all tensors in `value`.
void collect(const Value& value, Storages& storages) {
  if (value.is_list() || value.is_tuple()) {
    for (const auto& item : value.items()) collect(item, storages);
  } else if (value.is_dict()) {
    for (const auto& [key, item] : value.as_dict()) collect(item, storages);
  } else if (const auto* tensor = leaf_as<PickleTensor>(value)) {
    storages.emplace(tensor->storage->key, tensor->storage.get());
  }
}

}  // namespace

bool is_legacy_archive(const ByteSource& source) {
  return source.size() >= kMagic.size() && source.read(0, kMagic.size()) == kMagic;
}

LegacyArchive read_legacy_archive(const ByteSource& source) {
  const auto bytes = source.read(0, std::min(source.size(), PickleSource().max_bytes));
  std::string_view rest = bytes;
  const auto position = [&] { return std::uint64_t{bytes.size() - rest.size()}; };
  const auto next = [&] {
    return pickle_load_first(rest, {.name = source.name(), .origin = source.origin() + position()});
  };
  (void)next();  // the magic number
  if (next() != Value(kVersion)) {
    source.refuse(kMagic.size(), str("the version of the format is not ", kVersion));
  }
  const Value machine = next();
  const auto* little = machine.is_dict() ? machine.as_dict().get("little_endian") : nullptr;
  if (little == nullptr || *little != Value(true)) {
    source.refuse(position(), "the file was not written on a little-endian machine");
  }
  LegacyArchive archive{.value = next(), .storages = {}};
  const Value keys = next();
  if (!keys.is_list()) source.refuse(position(), "the keys of the storages are no list");

  Storages storages;
  collect(archive.value, storages);
  auto at = position();
  for (const auto& key : keys.as_list()) {
    const auto found = key.is_string() ? storages.find(key.as_string()) : storages.end();
    if (found == storages.end()) {
      source.refuse(at, str("the storage ", key.repr(),
                            " belongs to no tensor, so that its size is unknown"));
    }
    const auto bytes = found->second->bytes;
    if (source.size() - at < 8 || source.size() - at - 8 < bytes) {
      source.refuse(at, str("the storage ", key.repr(), " reaches beyond the end of the file"));
    }
    // The number of elements precedes them; the pickle has it, too.
    const auto count = read_little<std::uint64_t>(source.read(at, 8), 0);
    if (count != found->second->elements()) {
      source.refuse(at, str("the storage ", key.repr(), " has ", count,
                            " elements; its tensors need ", found->second->elements()));
    }
    archive.storages.push_back(
        {.name = "data/" + key.as_string(), .offset = at + 8, .size = bytes, .crc = 0});
    at += 8 + bytes;
    storages.erase(found);
  }
  if (at != source.size()) {
    source.refuse(at, str(source.size() - at, " bytes follow the last storage"));
  }
  return archive;
}

}  // namespace accelerate::detail::formats
