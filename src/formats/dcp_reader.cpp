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
  throw format_error(source.name(), source.origin(), str("'", entry.name, "': ", reason));
}

std::vector<std::int64_t> dense_strides(const std::vector<std::int64_t>& sizes) {
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i > 0; --i) {
    strides[i - 1] = stride;
    stride *= sizes[i - 1];
  }
  return strides;
}

/// Copies a box from one strided block of elements to another, in runs of the last dimension.
class BoxCopy {
 public:
  BoxCopy(std::string_view from, std::string& to, std::int64_t item)
      : from_(from), to_(to), item_(item) {}

  void copy(const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& from_strides,
            std::int64_t from_at, const std::vector<std::int64_t>& to_strides, std::int64_t to_at) {
    sizes_ = &sizes;
    from_strides_ = &from_strides;
    to_strides_ = &to_strides;
    // Dimensions that are dense on both sides make one run.
    run_ = 1;
    dimensions_ = sizes.size();
    while (dimensions_ > 0 && from_strides[dimensions_ - 1] == run_ &&
           to_strides[dimensions_ - 1] == run_) {
      run_ *= sizes[--dimensions_];
    }
    copy_from(0, from_at, to_at);
  }

 private:
  void copy_from(std::size_t dimension, std::int64_t from, std::int64_t to) {
    if (dimension == dimensions_) {
      std::memcpy(to_.data() + to * item_, from_.data() + from * item_,
                  static_cast<std::size_t>(run_ * item_));
      return;
    }
    for (std::int64_t i = 0; i < (*sizes_)[dimension]; ++i) {
      copy_from(dimension + 1, from + i * (*from_strides_)[dimension],
                to + i * (*to_strides_)[dimension]);
    }
  }

  std::string_view from_;
  std::string& to_;
  std::int64_t item_;
  const std::vector<std::int64_t>* sizes_ = nullptr;
  const std::vector<std::int64_t>* from_strides_ = nullptr;
  const std::vector<std::int64_t>* to_strides_ = nullptr;
  std::int64_t run_ = 1;
  std::size_t dimensions_ = 0;
};

/// "However, potential model and optimizer checkpoint directories exist.", in Python's words.
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
  if (has_model) {
    return str(" However, a potential model checkpoint directory exists. Please try passing in ",
               model.string(), " instead.");
  }
  if (has_optimizer) {
    return str(
        " However, a potential optimizer checkpoint directory exists. Please try passing in ",
        optimizer.string(), " instead.");
  }
  return " It is a folder that FSDP saves with SHARDED_STATE_DICT.";
}

/// True if all paths begin with the same key and go on behind it.
bool has_one_root(const std::vector<DcpEntry>& entries) {
  return !entries.empty() && std::ranges::all_of(entries, [&](const DcpEntry& entry) {
    return entry.path.size() > 1 && entry.path[0] == entries[0].path[0];
  });
}

}  // namespace

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
    BoxCopy(source.read(stored.offset, stored.size), bytes, entry.dtype->bytes)
        .copy(chunk.sizes, tensor->strides, tensor->offset, strides, at);
  }
  return bytes;
}

Value DcpReader::read_value(const DcpEntry& entry) {
  const auto source = part(entry, entry.place);
  return ArchiveReader(source).value();
}

}  // namespace accelerate::detail::formats
