#include "formats/archive.h"

#include <algorithm>

#include "core/python_text.h"
#include "core/text.h"
#include "formats/boxes.h"
#include "formats/legacy_archive.h"
#include "formats/pickle.h"

namespace accelerate::detail::formats {
namespace {

constexpr std::string_view kSaveAgain =
    ". Load it in Python and save its weights again with torch.save, or as safetensors";

/// Throws an error that says what kind of file it is instead of an archive.
[[noreturn]] void refuse_file(const ByteSource& source) {
  constexpr std::uint64_t kTarMagicAt = 257;
  const auto begin = source.read(0, std::min<std::uint64_t>(source.size(), 512));
  const std::string_view head = begin;
  if (head.empty()) source.refuse(0, "the file is empty");
  if (head.size() > kTarMagicAt + 5 && head.substr(kTarMagicAt, 5) == "ustar") {
    source.refuse(0,
                  str("the file is a tar archive of torch.save before version 0.1.10", kSaveAgain));
  }
  if (head[0] == '\x80') {
    source.refuse(0, str("the file is a bare pickle and no archive of torch.save", kSaveAgain));
  }
  if (head.size() > 8 && head[8] == '{') {
    source.refuse(0,
                  "the file looks like safetensors. Open it with accelerate::safetensors::File, "
                  "or give it the ending .safetensors");
  }
  source.refuse(0, "the file is no archive of torch.save: it does not begin as a zip file");
}

}  // namespace

ArchiveReader::ArchiveReader(const ByteSource& source) : source_(source) {
  if (is_zip(source)) {
    read_archive();
    return;
  }
  if (!is_legacy_archive(source)) refuse_file(source);
  auto legacy = read_legacy_archive(source);
  value_ = std::move(legacy.value);
  directory_ = ZipDirectory(std::move(legacy.storages));
}

void ArchiveReader::read_archive() {
  const auto& source = source_;
  directory_ = read_zip(source);
  if (directory_.entries().empty()) source.refuse(0, "the archive has no entries");
  const auto& first = directory_.entries().front().name;
  folder_ = first.substr(0, first.find('/') + 1);
  if (find("constants.pkl") != nullptr) {
    source.refuse(0,
                  "the archive is a TorchScript program, not data. Load it with "
                  "torch::jit::load, or save its state_dict() with torch.save");
  }
  if (const auto* order = find("byteorder")) {
    const auto text = source.read(order->offset, std::min<std::uint64_t>(order->size, 16));
    if (text != "little") {
      source.refuse(order->offset,
                    str("the byte order of the archive is ", python_repr(std::string_view(text)),
                        "; only 'little' is read"));
    }
  }
  const auto* pickle = find("data.pkl");
  if (pickle == nullptr) {
    source.refuse(0, str("the zip archive has no entry '", folder_,
                         "data.pkl', so it was not written by torch.save"));
  }
  PickleSource from{.name = source.name(), .origin = source.origin() + pickle->offset};
  if (pickle->size > from.max_bytes) {
    source.refuse(pickle->offset, str("the pickle has ", pickle->size, " bytes; at most ",
                                      from.max_bytes, " are read"));
  }
  value_ = pickle_loads(source.read(pickle->offset, pickle->size), from);
}

const ZipEntry* ArchiveReader::find(std::string_view name) const {
  return directory_.find(folder_ + std::string(name));
}

const ZipEntry& ArchiveReader::entry(const PickleStorage& storage) const {
  const auto* found = find("data/" + storage.key);
  if (found == nullptr) {
    source_.refuse(0, str("the archive has no entry for the storage ",
                          python_repr(std::string_view(storage.key))));
  }
  if (found->size != storage.bytes) {
    source_.refuse(found->offset,
                   str("the storage ", python_repr(std::string_view(storage.key)), " has ",
                       found->size, " bytes; its tensors need ", storage.bytes));
  }
  return *found;
}

ArchiveWriter::ArchiveWriter(ZipWriter::Write write, std::string name, std::string_view pickle)
    : zip_(std::move(write)), folder_(std::move(name) + "/") {
  zip_.add(folder_ + "data.pkl", pickle);
  zip_.add(folder_ + ".format_version", "1");
  zip_.add(folder_ + ".storage_alignment", "64");
  zip_.add(folder_ + "byteorder", "little");
}

void ArchiveWriter::begin_storage(std::string_view key, std::uint64_t bytes) {
  zip_.begin(str(folder_, "data/", key), bytes);
}

void ArchiveWriter::finish() {
  zip_.add(folder_ + "version", "3\n");
  // Torch tells files apart by it; equal contents have equal ids.
  auto id = std::to_string(zip_.fingerprint());
  id.insert(0, 40 - id.size(), '0');
  zip_.add(folder_ + ".data/serialization_id", id);
  zip_.finish();
}

Value described_tensor(const TorchDtype& dtype, const std::vector<std::int64_t>& sizes,
                       std::string key) {
  auto storage = std::make_shared<PickleStorage>();
  storage->key = std::move(key);
  storage->dtype = dtype.storage.empty() ? "" : dtype.name;
  storage->location = "cpu";
  storage->bytes = static_cast<std::uint64_t>(dtype.bytes * element_count(sizes));
  auto tensor = std::make_shared<PickleTensor>();
  tensor->storage = std::move(storage);
  tensor->dtype = dtype.name;
  tensor->sizes = sizes;
  tensor->strides = dense_strides(sizes);
  return Value(Value::Leaf(std::move(tensor)));
}

std::string archive_name(const std::filesystem::path& path) {
  auto name = path.filename().string();
  if (const auto dot = name.rfind('.'); dot != 0) name = name.substr(0, dot);
  const bool plain = std::ranges::all_of(
      name, [](char c) { return c >= ' ' && c <= '~' && c != '\\' && c != ':'; });
  return plain && name != ".." ? name : "archive";
}

}  // namespace accelerate::detail::formats
