#include <algorithm>
#include <cstring>

#include "core/text.h"
#include "formats/archive.h"
#include "formats/dcp.h"
#include "formats/format_error.h"
#include "formats/pickle.h"

namespace accelerate::detail::formats {
namespace {

namespace fs = std::filesystem;

/// Checkpoints of many processes have as many files.
constexpr std::size_t kMaxOpenFiles = 64;

[[noreturn]] void refuse(const ByteSource& source, const DcpEntry& entry, std::string_view reason) {
  source.refuse(0, str("'", entry.name, "': ", reason));
}

/// A box of elements in a block of them.
struct Box {
  const std::vector<std::int64_t>& strides;
  std::int64_t at;  ///< of the first element
};

/// Copies a box from one block to another, in runs of the last dimensions.
void copy_box(std::string_view from_bytes, const Box& from, std::string& to_bytes, const Box& to,
              std::span<const std::int64_t> sizes, std::int64_t item) {
  // Dimensions that are dense on both sides make one run.
  std::int64_t run = 1;
  std::size_t dimensions = sizes.size();
  while (dimensions > 0 && from.strides[dimensions - 1] == run &&
         to.strides[dimensions - 1] == run) {
    run *= sizes[--dimensions];
  }
  const auto copy = [&](const auto& self, std::size_t dimension, std::int64_t source,
                        std::int64_t target) -> void {
    if (dimension == dimensions) {
      std::memcpy(to_bytes.data() + target * item, from_bytes.data() + source * item,
                  static_cast<std::size_t>(run * item));
      return;
    }
    for (std::int64_t i = 0; i < sizes[dimension]; ++i) {
      self(self, dimension + 1, source + i * from.strides[dimension],
           target + i * to.strides[dimension]);
    }
  };
  copy(copy, 0, from.at, to.at);
}

/// Which folders inside may be meant, in Python's words.
std::string hint(const fs::path& folder) {
  const auto model = folder / "pytorch_model_fsdp_0";
  const auto optimizer = folder / "optimizer_0";
  const bool has_model = fs::is_directory(model);
  const bool has_optimizer = fs::is_directory(optimizer);
  if (has_model && has_optimizer) {
    return str(
        " However, potential model and optimizer checkpoint directories exist. Please pass in "
        "either ",
        model.string(), " or ", optimizer.string(), " instead.");
  }
  if (!has_model && !has_optimizer) {
    return " It is a folder that FSDP saves with SHARDED_STATE_DICT.";
  }
  return str(" However, a potential ", has_model ? "model" : "optimizer",
             " checkpoint directory exists. Please try passing in ",
             (has_model ? model : optimizer).string(), " instead.");
}

/// True if all paths begin with the same key and go on behind it.
bool has_one_root(const std::vector<DcpEntry>& entries) {
  return !entries.empty() && std::ranges::all_of(entries, [&](const DcpEntry& entry) {
    return entry.path.size() > 1 && entry.path[0] == entries[0].path[0];
  });
}

}  // namespace

std::vector<std::int64_t> dense_strides(const std::vector<std::int64_t>& sizes) {
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i > 0; --i) {
    strides[i - 1] = stride;
    stride *= std::max<std::int64_t>(sizes[i - 1], 1);
  }
  return strides;
}

DcpReader::DcpReader(fs::path folder) : folder_(std::move(folder)) {
  const auto path = folder_ / ".metadata";
  if (!fs::is_regular_file(path)) {
    throw CheckpointError(str("Tried to load from ", folder_.string(),
                              " but couldn't find a valid metadata file.", hint(folder_)),
                          folder_);
  }
  const FileBytes file(path);
  const auto limit = PickleSource().max_bytes;
  if (file.size() > limit) {
    throw format_error(file.name(), 0,
                       str("the file has ", file.size(), " bytes; at most ", limit, " are read"));
  }
  entries_ = read_dcp_metadata(file.read(0, file.size()), file.name());
  one_root_ = has_one_root(entries_);
}

std::span<const Value> DcpReader::path_of(const DcpEntry& entry) const {
  return std::span(entry.path).subspan(one_root_ ? 1 : 0);
}

PartBytes DcpReader::part(const DcpEntry& entry, const DcpPlace& place) {
  if (files_.size() == kMaxOpenFiles && !files_.contains(place.file)) files_.clear();
  auto& file = files_[place.file];
  if (file == nullptr) file = std::make_unique<FileBytes>(folder_ / place.file);
  if (place.offset > file->size() || place.length > file->size() - place.offset) {
    refuse(*file, entry,
           str("its ", place.length, " bytes at byte ", place.offset,
               " are not inside the file, which has ", file->size()));
  }
  return {*file, place.offset, place.length};
}

std::string DcpReader::read_tensor(const DcpEntry& entry) {
  // Before memory is allocated: chunks are not longer than their places, so that the tensor is no
  // larger than the files if these have the places.
  for (const auto& chunk : entry.chunks) (void)part(entry, chunk.place);
  std::string bytes(entry.bytes(), '\0');
  const auto strides = dense_strides(entry.sizes);
  for (const auto& chunk : entry.chunks) {
    const auto source = part(entry, chunk.place);
    const ArchiveReader archive(source);
    const auto* tensor = leaf_as<PickleTensor>(archive.value());
    if (tensor == nullptr || tensor->sizes != chunk.sizes || tensor->dtype != entry.dtype->name) {
      refuse(source, entry,
             str("the chunk is ", archive.value().repr(), ", expected sizes (", join(chunk.sizes),
                 ") and dtype torch.", entry.dtype->name));
    }
    const auto& stored = archive.entry(*tensor->storage);
    std::int64_t at = 0;
    for (std::size_t i = 0; i < strides.size(); ++i) at += strides[i] * chunk.offsets[i];
    copy_box(source.read(stored.offset, stored.size), {tensor->strides, tensor->offset}, bytes,
             {strides, at}, chunk.sizes, entry.dtype->bytes);
  }
  return bytes;
}

Value DcpReader::read_value(const DcpEntry& entry) {
  const auto source = part(entry, entry.place);
  return ArchiveReader(source).value();
}

}  // namespace accelerate::detail::formats
