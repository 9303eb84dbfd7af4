#include <algorithm>
#include <map>
#include <optional>

#include "core/text.h"
#include "formats/dcp.h"
#include "formats/format_error.h"
#include "formats/pickle.h"
#include "formats/pickle_value.h"

namespace accelerate::detail::formats {
namespace {

constexpr std::string_view kModule = "torch.distributed.checkpoint.metadata.";
/// Comparisons of chunks: 10,000 chunks of one tensor.
constexpr std::uint64_t kMaxComparisons = 100'000'000;
constexpr std::size_t kMaxRank = 64;
constexpr std::size_t kMaxPath = 64;

using Numbers = std::vector<std::int64_t>;

class MetadataReader {
 public:
  explicit MetadataReader(const std::string& name) : name_(name) {}

  std::vector<DcpEntry> read(const Value& root) {
    const auto& metadata = state_of(root, "Metadata");
    read_places(field(metadata, "storage_data"));
    const auto* paths = metadata.get("planner_data");
    std::vector<DcpEntry> entries;
    for (const auto& [key, value] : dict(field(metadata, "state_dict_metadata"))) {
      if (!key.is_string()) refuse(str("a tensor has the name ", key.repr()));
      entries.push_back(entry(key.as_string(), value));
      entries.back().path = path_of(paths, key.as_string());
    }
    check_places();
    return entries;
  }

 private:
  [[noreturn]] void refuse(std::string_view reason) const {
    throw format_error(name_, 0, str("the metadata of the checkpoint: ", reason));
  }

  /// The attributes of an object of a class of the metadata module.
  const Value::Dict& state_of(const Value& value, std::string_view type,
                              std::string_view module = kModule) const {
    const auto* call = call_of(value, str(module, type));
    if (call == nullptr || !(call->state.is_dict())) {
      refuse(str("expected an object of class ", type, ", found ", value.kind_name()));
    }
    return call->state.as_dict();
  }
  const Value& field(const Value::Dict& state, std::string_view name) const {
    const auto* value = state.get(name);
    if (value == nullptr) refuse(str("the field '", name, "' is missing"));
    return *value;
  }
  const Value::Dict& dict(const Value& value) const {
    if (!value.is_dict()) refuse(str("expected a dict, found ", value.kind_name()));
    return value.as_dict();
  }
  const std::string& text(const Value& value) const {
    if (!value.is_string()) refuse(str("expected a text, found ", value.kind_name()));
    return value.as_string();
  }
  /// No number below 0.
  std::int64_t number(const Value& value) const {
    if (!value.is_int() || value.as_int() < 0)
      refuse(str("expected a size, found ", value.kind_name()));
    return value.as_int();
  }
  Numbers numbers(const Value& value) const {
    if (!value.is_tuple() && !value.is_list())
      refuse(str("expected sizes, found ", value.kind_name()));
    if (value.items().size() > kMaxRank) {
      refuse(str("a tensor has ", value.items().size(), " dimensions; at most ", kMaxRank,
                 " are read"));
    }
    Numbers result;
    for (const auto& item : value.items()) result.push_back(number(item));
    return result;
  }

  /// Name and offsets of a chunk; other values have no offsets.
  using Index = std::pair<std::string, std::optional<Numbers>>;

  void read_places(const Value& data) {
    const auto* pairs = leaf_as<PickleDict>(data);
    if (pairs == nullptr) {
      if (!dict(data).empty()) refuse("the places have no index");
      return;
    }
    for (const auto& [key, value] : pairs->entries) {
      const auto& index = state_of(key, "MetadataIndex");
      const auto* offset = index.get("offset");
      std::optional<Numbers> offsets;
      if (offset != nullptr && !offset->is_none()) offsets = numbers(*offset);
      const auto& name = text(field(index, "fqn"));
      if (!places_.try_emplace({name, offsets}, place(value)).second) {
        refuse(str("'", name, "' has two places for one chunk"));
      }
    }
  }

  DcpPlace place(const Value& value) const {
    const auto& info = state_of(value, "_StorageInfo", "torch.distributed.checkpoint.filesystem.");
    const auto* transforms = info.get("transform_descriptors");
    if (transforms != nullptr && !transforms->is_none() &&
        !(transforms->is_list() && transforms->as_list().empty())) {
      refuse(str("the data was transformed when it was saved (", transforms->repr(),
                 "), which is not read. Save the checkpoint without transforms"));
    }
    DcpPlace place{.file = text(field(info, "relative_path")),
                   .offset = static_cast<std::uint64_t>(number(field(info, "offset"))),
                   .length = static_cast<std::uint64_t>(number(field(info, "length")))};
    const bool bare = !place.file.empty() && place.file != "." && place.file != ".." &&
                      place.file.find('/') == place.file.npos &&
                      place.file.find('\0') == place.file.npos;
    if (!bare) refuse(str("the file '", place.file, "' is not in the folder of the checkpoint"));
    return place;
  }

  /// Chunks that share bytes of a file would make a small checkpoint a large model.
  void check_places() const {
    std::vector<const DcpPlace*> order;
    for (const auto& [index, place] : places_) order.push_back(&place);
    std::ranges::sort(order, {}, [](const DcpPlace* place) {
      return std::pair(std::string_view(place->file), place->offset);
    });
    for (std::size_t i = 1; i < order.size(); ++i) {
      const auto& before = *order[i - 1];
      if (order[i]->file != before.file || order[i]->offset - before.offset >= before.length)
        continue;
      refuse(str("two places at byte ", order[i]->offset, " of '", before.file, "' overlap"));
    }
  }

  const DcpPlace& find(const std::string& name, const std::optional<Numbers>& offsets) const {
    const auto found = places_.find({name, offsets});
    if (found == places_.end()) {
      refuse(str("'", name, "' has a chunk without a place",
                 offsets ? str(", at (", join(*offsets), ")") : ""));
    }
    return found->second;
  }

  DcpEntry entry(const std::string& name, const Value& value) {
    DcpEntry entry;
    entry.name = name;
    if (call_of(value, str(kModule, "BytesStorageMetadata")) != nullptr) {
      entry.place = find(name, std::nullopt);
      return entry;
    }
    const auto& tensor = state_of(value, "TensorStorageMetadata");
    entry.dtype = dtype(name, field(tensor, "properties"));
    entry.sizes = numbers(field(tensor, "size"));
    const auto& chunks = field(tensor, "chunks");
    if (!chunks.is_list()) refuse(str("the chunks of '", name, "' are no list"));
    for (const auto& item : chunks.as_list()) {
      const auto& chunk = state_of(item, "ChunkStorageMetadata");
      DcpChunk box;
      box.offsets = numbers(field(chunk, "offsets"));
      box.sizes = numbers(field(chunk, "sizes"));
      box.place = find(name, box.offsets);
      entry.chunks.push_back(std::move(box));
    }
    check_chunks(entry);
    return entry;
  }

  /// The state of TensorProperties is a tuple that begins with the dtype.
  const TorchDtype* dtype(const std::string& name, const Value& properties) const {
    const auto* call = call_of(properties, str(kModule, "TensorProperties"));
    const bool has_state =
        call != nullptr && call->state.is_tuple() && !call->state.items().empty();
    const auto* found = has_state ? dtype_of(call->state.items()[0]) : nullptr;
    if (found == nullptr) refuse(str("the dtype of '", name, "' is not one of Torch"));
    return found;
  }

  std::uint64_t volume(const std::string& name, const Numbers& sizes, std::int64_t item) const {
    std::uint64_t result = static_cast<std::uint64_t>(item);
    for (const auto size : sizes) {
      if (__builtin_mul_overflow(result, static_cast<std::uint64_t>(size), &result) ||
          result > INT64_MAX) {
        refuse(str("the sizes (", join(sizes), ") of '", name, "' are too large"));
      }
    }
    return result;
  }

  void check_chunks(DcpEntry& entry) {
    const auto bytes = volume(entry.name, entry.sizes, entry.dtype->bytes);
    std::uint64_t covered = 0;
    for (const auto& chunk : entry.chunks) {
      if (chunk.offsets.size() != entry.sizes.size() || chunk.sizes.size() != entry.sizes.size()) {
        refuse(str("a chunk of '", entry.name, "' has another rank than the tensor"));
      }
      for (std::size_t i = 0; i < entry.sizes.size(); ++i) {
        if (chunk.sizes[i] > entry.sizes[i] || chunk.offsets[i] > entry.sizes[i] - chunk.sizes[i]) {
          refuse(str("a chunk of '", entry.name, "' at (", join(chunk.offsets), ") with sizes (",
                     join(chunk.sizes), ") is not inside (", join(entry.sizes), ")"));
        }
      }
      const auto chunk_bytes = volume(entry.name, chunk.sizes, entry.dtype->bytes);
      if (chunk_bytes > chunk.place.length) {
        refuse(str("a chunk of '", entry.name, "' of ", chunk_bytes, " bytes lies in ",
                   chunk.place.length, " bytes"));
      }
      covered += chunk_bytes;
    }
    std::erase_if(entry.chunks, [](const DcpChunk& chunk) {
      return std::ranges::find(chunk.sizes, 0) != chunk.sizes.end();
    });
    check_overlaps(entry);
    if (covered != bytes) {
      refuse(str("the chunks of '", entry.name, "' have ", covered, " of its ", bytes, " bytes"));
    }
  }

  void check_overlaps(const DcpEntry& entry) {
    std::vector<const DcpChunk*> order;
    for (const auto& chunk : entry.chunks) order.push_back(&chunk);
    std::ranges::sort(order, {}, &DcpChunk::offsets);
    for (std::size_t i = 0; i < order.size(); ++i) {
      for (std::size_t j = i + 1; j < order.size(); ++j) {
        if (++comparisons_ > kMaxComparisons) refuse("there are too many chunks");
        // Sorted by the first offset: all that follow begin behind the end of this chunk.
        if (!entry.sizes.empty() &&
            order[j]->offsets[0] >= order[i]->offsets[0] + order[i]->sizes[0]) {
          break;
        }
        if (overlap(*order[i], *order[j])) {
          refuse(
              str("two chunks of '", entry.name, "' overlap at (", join(order[j]->offsets), ")"));
        }
      }
    }
  }

  static bool overlap(const DcpChunk& a, const DcpChunk& b) {
    for (std::size_t i = 0; i < a.sizes.size(); ++i) {
      if (a.offsets[i] + a.sizes[i] <= b.offsets[i] || b.offsets[i] + b.sizes[i] <= a.offsets[i]) {
        return false;
      }
    }
    return true;
  }

  Value::List path_of(const Value* paths, const std::string& name) const {
    // Checkpoints of other planners have no paths: their dicts were flat.
    const auto* path = paths != nullptr && paths->is_dict() ? paths->as_dict().get(name) : nullptr;
    if (path == nullptr) return {Value(name)};
    const bool valid = path->is_tuple() && !path->items().empty() &&
                       std::ranges::all_of(path->items(), [](const Value& item) {
                         return item.is_string() || item.is_int();
                       });
    if (!valid) refuse(str("the path of '", name, "' is no tuple of texts and numbers"));
    if (path->items().size() > kMaxPath) {
      refuse(str("the path of '", name, "' has ", path->items().size(), " steps; at most ",
                 kMaxPath, " are read"));
    }
    return path->as_tuple();
  }

  const std::string& name_;
  std::map<Index, DcpPlace> places_;
  std::uint64_t comparisons_ = 0;
};

}  // namespace

std::uint64_t DcpEntry::bytes() const {
  return static_cast<std::uint64_t>(dtype->bytes * element_count(sizes));
}

std::vector<DcpEntry> read_dcp_metadata(std::string_view bytes, const std::string& name) {
  return MetadataReader(name).read(pickle_loads(bytes, {.name = name}));
}

}  // namespace accelerate::detail::formats
