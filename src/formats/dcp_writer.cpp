#include "formats/dcp_writer.h"

#include <algorithm>
#include <map>
#include <random>
#include <utility>

#include "accelerate/errors.h"
#include "core/python_text.h"
#include "core/text.h"
#include "formats/archive.h"
#include "formats/pickle.h"
#include "formats/pickle_value.h"

namespace accelerate::detail::formats {
namespace {

constexpr std::string_view kMetadata = "torch.distributed.checkpoint.metadata";
constexpr std::string_view kFilesystem = "torch.distributed.checkpoint.filesystem";

using Numbers = std::vector<std::int64_t>;

bool is_container(const Value& value) { return value.is_dict() || value.is_list(); }

/// Python writes it as one value.
bool is_leaf(const Value& value) {
  if (value.is_dict()) return false;
  if (!value.is_list()) return true;
  return std::ranges::none_of(value.as_list(), [](const Value& item) {
    return item.is_tensor() || (is_container(item) && !is_leaf(item));
  });
}

Value size_of(const Numbers& numbers) {
  auto call = std::make_shared<PickleCall>();
  call->module = "torch";
  call->name = "Size";
  call->args = {Value::tuple(Value::List(numbers.begin(), numbers.end()))};
  return Value(Value::Leaf(std::move(call)));
}

Value called(std::string_view module, std::string_view name, Value argument) {
  auto call = std::make_shared<PickleCall>();
  call->module = module;
  call->name = name;
  call->args = {std::move(argument)};
  return Value(Value::Leaf(std::move(call)));
}

/// An object whose attributes are set, as Python pickles those of plain classes.
Value object(std::string_view module, std::string_view name, Value state) {
  auto call = std::make_shared<PickleCall>();
  call->module = module;
  call->name = name;
  call->by_new = true;
  call->state = std::move(state);
  return Value(Value::Leaf(std::move(call)));
}

Value tensor_properties(const TorchDtype& dtype) {
  return object(
      kMetadata, "TensorProperties",
      Value::tuple({Value(std::make_shared<PickleGlobal>("torch", std::string(dtype.name))),
                    called("torch.serialization", "_get_layout", "torch.strided"),
                    /*requires_grad=*/false, called(kMetadata, "_MEM_FORMAT_ENCODING", 0),
                    /*pin_memory=*/false}));
}

Value storage_info(const DcpPlace& place) {
  return object(kFilesystem, "_StorageInfo",
                Value::Dict{{"relative_path", place.file},
                            {"offset", static_cast<std::int64_t>(place.offset)},
                            {"length", static_cast<std::int64_t>(place.length)}});
}

Value tensor_metadata(const DcpEntry& entry, PickleCall::Entries& places) {
  Value::List chunks;
  for (const auto& chunk : entry.chunks) {
    // The hint is the position in the list of chunks.
    places.emplace_back(object(kMetadata, "MetadataIndex",
                               Value::Dict{{"fqn", entry.name},
                                           {"index", std::ssize(chunks)},
                                           {"offset", size_of(chunk.offsets)}}),
                        storage_info(chunk.place));
    chunks.push_back(
        object(kMetadata, "ChunkStorageMetadata",
               Value::Dict{{"offsets", size_of(chunk.offsets)}, {"sizes", size_of(chunk.sizes)}}));
  }
  return object(kMetadata, "TensorStorageMetadata",
                Value::Dict{{"properties", tensor_properties(*entry.dtype)},
                            {"size", size_of(entry.sizes)},
                            {"chunks", std::move(chunks)}});
}

Value bytes_metadata(const DcpEntry& entry, PickleCall::Entries& places) {
  places.emplace_back(
      object(kMetadata, "MetadataIndex", Value::Dict{{"fqn", entry.name}, {"index", nullptr}}),
      storage_info(entry.place));
  return object(kMetadata, "BytesStorageMetadata", Value::Dict{});
}

/// A random UUID, as Python has it.
std::string save_id() {
  std::random_device random;
  std::string text;
  for (int i = 0; i < 4; ++i) append_hex(text, random(), 8);
  text[12] = '4';
  text[16] = 'a';
  for (const std::size_t at : {20, 16, 12, 8}) text.insert(at, "-");
  return text;
}

/// "optimizer.param_groups.0.lr".
std::string name_of(const Value::List& path) {
  std::vector<std::string> steps;
  for (const auto& step : path) {
    steps.push_back(step.is_string() ? step.as_string() : std::to_string(step.as_int()));
  }
  return join(steps, ".");
}

std::string text_of(const DcpEntry& entry) {
  return entry.dtype == nullptr ? std::string("no tensor")
                                : str("(", join(entry.sizes), ") of torch.", entry.dtype->name);
}

/// All chunks of all processes, in the order in which tensors are first met.
std::vector<DcpEntry> merged(std::span<const std::vector<DcpEntry>> parts) {
  std::vector<DcpEntry> entries;
  std::map<std::string, std::pair<std::size_t, std::size_t>> known;  // position, process
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    for (const auto& entry : parts[rank]) {
      const auto [found, is_new] = known.try_emplace(entry.name, entries.size(), rank);
      if (is_new) {
        entries.push_back(entry);
        continue;
      }
      auto& first = entries[found->second.first];
      if (entry.dtype != first.dtype || entry.sizes != first.sizes) {
        throw CheckpointError(str("'", entry.name, "' is ", text_of(first), " on rank ",
                                  found->second.second, " and ", text_of(entry), " on rank ", rank,
                                  ". All processes must save the same model."));
      }
      if (entry.dtype == nullptr) {
        throw CheckpointError(str("The value '", entry.name, "' is saved by rank ",
                                  found->second.second, " and by rank ", rank, "."));
      }
      first.chunks.insert(first.chunks.end(), entry.chunks.begin(), entry.chunks.end());
    }
  }
  return entries;
}

Numbers numbers_in(const Value& value) {
  Numbers numbers;
  for (const auto& item : value.items()) numbers.push_back(item.as_int());
  return numbers;
}

Value place_value(const DcpPlace& place) {
  return Value::tuple({place.file, static_cast<std::int64_t>(place.offset),
                       static_cast<std::int64_t>(place.length)});
}

DcpPlace place_from(const Value& value) {
  const auto items = value.items();
  return {.file = items[0].as_string(),
          .offset = static_cast<std::uint64_t>(items[1].as_int()),
          .length = static_cast<std::uint64_t>(items[2].as_int())};
}

}  // namespace

std::string dcp_file_name(int process_index, int number) {
  return str("__", process_index, "_", number, ".distcp");
}

void for_each_dcp_leaf(
    const Value& state, Value::List path,
    const std::function<void(const Value::List& path, const Value& leaf)>& visit) {
  if (is_leaf(state)) return visit(path, state);
  const auto descend = [&](Value step, const Value& item) {
    path.push_back(std::move(step));
    for_each_dcp_leaf(item, path, visit);
    path.pop_back();
  };
  if (state.is_dict()) {
    for (const auto& [key, item] : state.as_dict()) descend(key.to_string(), item);
  } else {
    for (std::size_t i = 0; i < state.as_list().size(); ++i) descend(i, state.as_list()[i]);
  }
}

DcpFileWriter::DcpFileWriter(std::string file, ZipWriter::Write write)
    : file_(std::move(file)), write_(std::move(write)) {}

void DcpFileWriter::begin_tensor(const Value::List& path, const TorchDtype& dtype,
                                 const std::vector<std::int64_t>& sizes) {
  entries_.push_back({.name = name_of(path), .path = path, .dtype = &dtype, .sizes = sizes});
}

void DcpFileWriter::add_chunk(const Box& box, std::string_view bytes) {
  auto& entry = entries_.back();
  const auto place = add_archive(described_tensor(*entry.dtype, box.sizes, "0"), &bytes);
  entry.chunks.push_back({box, place});
}

void DcpFileWriter::add_value(const Value::List& path, const Value& value) {
  entries_.push_back(
      {.name = name_of(path), .path = path, .place = add_archive(value, /*storage=*/nullptr)});
}

DcpPlace DcpFileWriter::add_archive(const Value& content, const std::string_view* storage) {
  const auto begin = position_;
  const auto write = [&](std::string_view bytes) {
    write_(bytes);
    position_ += bytes.size();
  };
  ArchiveWriter archive(write, "archive", pickle_dumps(content));
  if (storage != nullptr) {
    archive.begin_storage("0", storage->size());
    archive.append(*storage);
    archive.end_storage();
  }
  archive.finish();
  return {.file = file_, .offset = begin, .length = position_ - begin};
}

Value dcp_entries_to_value(std::span<const DcpEntry> entries) {
  Value::List list;
  for (const auto& entry : entries) {
    Value::List chunks;
    for (const auto& chunk : entry.chunks) {
      chunks.push_back(
          Value::tuple({Value(chunk.offsets), Value(chunk.sizes), place_value(chunk.place)}));
    }
    list.push_back(Value::tuple(
        {Value(entry.path), entry.dtype == nullptr ? Value() : Value(entry.dtype->name),
         Value(entry.sizes), Value(std::move(chunks)), place_value(entry.place)}));
  }
  return Value(std::move(list));
}

std::vector<DcpEntry> dcp_entries_from(const Value& value) {
  std::vector<DcpEntry> entries;
  for (const auto& item : value.items()) {
    const auto fields = item.items();
    DcpEntry entry;
    entry.path = fields[0].as_list();
    entry.name = name_of(entry.path);
    entry.dtype = fields[1].is_none() ? nullptr : find_torch_dtype(fields[1].as_string());
    entry.sizes = numbers_in(fields[2]);
    for (const auto& chunk : fields[3].items()) {
      const auto parts = chunk.items();
      entry.chunks.push_back(
          {{.offsets = numbers_in(parts[0]), .sizes = numbers_in(parts[1])}, place_from(parts[2])});
    }
    entry.place = place_from(fields[4]);
    entries.push_back(std::move(entry));
  }
  return entries;
}

std::string dcp_metadata(std::span<const std::vector<DcpEntry>> parts,
                         const std::string& checkpoint_id) {
  const auto entries = merged(parts);
  Value::Dict tensors;
  Value::Dict paths;
  PickleCall::Entries places;
  for (const auto& entry : entries) {
    tensors.set(entry.name, entry.dtype == nullptr ? bytes_metadata(entry, places)
                                                   : tensor_metadata(entry, places));
    paths.set(entry.name, Value::tuple(Value::List(entry.path)));
  }
  auto bytes = pickle_dumps(
      object(kMetadata, "Metadata",
             Value::Dict{{"state_dict_metadata", std::move(tensors)},
                         {"planner_data", std::move(paths)},
                         {"storage_data", Value(std::make_shared<PickleDict>(std::move(places)))},
                         {"storage_meta", object(kMetadata, "StorageMeta",
                                                 Value::Dict{{"checkpoint_id", checkpoint_id},
                                                             {"save_id", save_id()},
                                                             {"load_id", nullptr},
                                                             {"modules", Value::List{}}})},
                         {"version", "1.0.0"}}));
  try {
    (void)read_dcp_metadata(bytes, checkpoint_id);
  } catch (const FormatError& error) {
    throw CheckpointError(
        str("What the processes have saved does not fit together: ", error.what()), checkpoint_id);
  }
  return bytes;
}

}  // namespace accelerate::detail::formats
