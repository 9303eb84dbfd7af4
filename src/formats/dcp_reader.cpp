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

[[noreturn]] void refuse(const ByteSource& source, const DcpEntry& entry, std::string_view reason) {
  source.refuse(0, str("'", entry.name, "': ", reason));
}

/// Shorter runs are cut out of one read.
constexpr std::int64_t kRunBytes = 64 << 10;

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

/// Puts `value` at `path`; lists grow as positions come, together by `room` items.
void set_at(Value& root, std::span<const Value> path, Value value, const DcpEntry& entry,
            std::size_t& room) {
  Value* at = &root;
  for (const auto& step : path) {
    if (step.is_string()) {
      if (at->is_none()) *at = Value(Value::Dict());
      if (at->is_dict()) {
        at = &at->as_dict()[step.as_string()];
        continue;
      }
    } else {
      if (at->is_none()) *at = Value(Value::List());
      const auto position = static_cast<std::uint64_t>(step.as_int());  // negative: too large
      if (at->is_list() && position < at->as_list().size() + room) {
        auto& list = at->as_list();
        if (position >= list.size()) {
          room -= position + 1 - list.size();
          list.resize(position + 1);
        }
        at = &list[position];
        continue;
      }
    }
    throw CheckpointError(str("The path of '", entry.name, "' in the checkpoint, ",
                              Value(entry.path).repr(), ", does not fit the other paths."));
  }
  *at = std::move(value);
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
  const auto& file = files_.open(folder_ / place.file);
  if (place.offset > file.size() || place.length > file.size() - place.offset) {
    refuse(file, entry,
           str("its ", place.length, " bytes at byte ", place.offset,
               " are not inside the file, which has ", file.size()));
  }
  return {file, place.offset, place.length};
}

void DcpReader::check_places(const DcpEntry& entry) {
  // The metadata has no chunk that is longer than its place, and no places that overlap.
  for (const auto& chunk : entry.chunks) (void)part(entry, chunk.place);
}

std::string DcpReader::read_tensor(const DcpEntry& entry) {
  check_places(entry);
  std::string bytes(entry.bytes(), '\0');
  read_range(entry, {.begin = 0, .end = element_count(entry.sizes)}, bytes);
  return bytes;
}

void DcpReader::read_range(const DcpEntry& entry, FlatRange range, std::span<char> out) {
  for (const auto& chunk : entry.chunks) {
    const auto extent = extent_of(entry.sizes, chunk);
    if (extent.begin < range.end && range.begin < extent.end) read_chunk(entry, chunk, range, out);
  }
}

void DcpReader::read_chunk(const DcpEntry& entry, const DcpChunk& chunk, FlatRange range,
                           std::span<char> out) {
  const auto source = part(entry, chunk.place);
  const ArchiveReader archive(source);
  const auto* tensor = leaf_as<PickleTensor>(archive.value());
  if (tensor == nullptr || tensor->sizes != chunk.sizes || tensor->dtype != entry.dtype->name ||
      !tensor->has_plain_values()) {
    refuse(source, entry,
           str("the chunk is ", archive.value().repr(), ", expected sizes (", join(chunk.sizes),
               ") and dtype torch.", entry.dtype->name));
  }
  const auto item = entry.dtype->bytes;
  const auto begin = archive.entry(*tensor->storage).offset;
  const auto place_of = [&](std::int64_t element) {
    return begin + static_cast<std::uint64_t>((tensor->offset + element) * item);
  };
  const auto target_of = [&](const SharedRun& run) {
    return out.subspan(static_cast<std::size_t>((run.flat - range.begin) * item),
                       static_cast<std::size_t>(run.count * item));
  };
  const auto for_each_run = [&](const std::function<void(const SharedRun&)>& visit) {
    for_each_shared_run(entry.sizes, chunk, tensor->strides, range, visit);
  };

  FlatRange stored{.begin = INT64_MAX, .end = 0};  // from the first to the last that is needed
  bool short_runs = false;
  for_each_run([&](const SharedRun& run) {
    stored.begin = std::min(stored.begin, run.stored);
    stored.end = std::max(stored.end, run.stored + run.count);
    short_runs = short_runs || run.count * item < kRunBytes;
  });
  if (stored.begin > stored.end) return;
  if (!short_runs) {
    return for_each_run(
        [&](const SharedRun& run) { source.read(place_of(run.stored), target_of(run)); });
  }
  const auto window =
      source.read(place_of(stored.begin), static_cast<std::uint64_t>(stored.count() * item));
  for_each_run([&](const SharedRun& run) {
    const auto target = target_of(run);
    std::memcpy(target.data(), window.data() + (run.stored - stored.begin) * item, target.size());
  });
}

Value DcpReader::read_value(const DcpEntry& entry) {
  const auto source = part(entry, entry.place);
  auto value = ArchiveReader(source).value();
  if (leaf_as<PickleTensor>(value) != nullptr) {
    refuse(source, entry, "it is a tensor in its file and none in the metadata");
  }
  return value;
}

Value DcpReader::nested(const std::function<Value(const DcpEntry& entry)>& leaf) const {
  Value root = Value(Value::Dict());
  std::size_t room = 0;  // a list has an item for each position in a path, or fewer
  for (const auto& entry : entries_) room += entry.path.size();
  for (const auto& entry : entries_) set_at(root, path_of(entry), leaf(entry), entry, room);
  return root;
}

}  // namespace accelerate::detail::formats
