#include "formats/merge_weights.h"

#include <algorithm>
#include <string>
#include <system_error>
#include <vector>

#include "accelerate/constants.h"
#include "accelerate/errors.h"
#include "core/byte_bar.h"
#include "core/output_file.h"
#include "core/text.h"
#include "formats/archive.h"
#include "formats/dcp.h"
#include "formats/pickle.h"
#include "formats/safetensors_header.h"

namespace accelerate::detail::formats {
namespace {

namespace fs = std::filesystem;

std::int64_t bytes_of(const std::vector<DcpEntry>& entries) {
  std::int64_t bytes = 0;
  for (const auto& entry : entries) {
    if (entry.dtype != nullptr) bytes += static_cast<std::int64_t>(entry.bytes());
  }
  return bytes;
}

// safetensors

/// The entry in the header. Throws if the format cannot hold the value.
TensorEntry header_entry(const DcpReader& reader, const DcpEntry& entry) {
  const auto path = reader.path_of(entry);
  if (entry.dtype == nullptr || path.size() != 1 || !path[0].is_string()) {
    throw ArgumentError(
        str("'", entry.name, "' is ", entry.dtype == nullptr ? "no tensor" : "nested deeper",
            ", and safetensors files hold tensors by name only. Merge the checkpoint with "
            "--unsafe_serialization (safe_serialization = false), which writes ",
            kWeightsName, "."));
  }
  const auto dtype = find_dtype(entry.dtype->safetensors);
  if (!dtype) {
    throw ArgumentError(str("'", entry.name, "' is of dtype torch.", entry.dtype->name,
                            ", which safetensors does not have. Merge the checkpoint with "
                            "--unsafe_serialization (safe_serialization = false)."));
  }
  TensorEntry tensor{.name = path[0].as_string(), .dtype = *dtype, .shape = entry.sizes};
  // Two numbers of 4 bits in an element.
  if (*dtype == Dtype::kF4 && !tensor.shape.empty()) tensor.shape.back() *= 2;
  return tensor;
}

void write_safetensors(DcpReader& reader, const fs::path& path, const MergeOptions& options) {
  const auto& entries = reader.entries();
  std::vector<TensorEntry> tensors;
  std::map<std::string, const DcpEntry*> sources;
  for (const auto& entry : entries) {
    tensors.push_back(header_entry(reader, entry));
    sources.emplace(tensors.back().name, &entry);
  }
  const auto header = plan_safetensors(std::move(tensors), {{"format", "pt"}});
  const auto head = safetensors_header_bytes(header);
  ByteBar bar("merging", bytes_of(entries), options.progress);
  OutputFile file(path);
  file.reserve(static_cast<std::int64_t>(head.size()) +
               (header.tensors.empty() ? 0 : header.tensors.back().end));
  file.write(head);
  for (const auto& tensor : header.tensors) {
    file.write(reader.read_tensor(*sources.at(tensor.name)));
    bar.add(tensor.bytes());
  }
  file.publish();
}

// torch.save

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

Value described_tensor(const DcpEntry& entry, std::size_t key) {
  auto storage = std::make_shared<PickleStorage>();
  storage->key = std::to_string(key);
  storage->dtype = entry.dtype->storage.empty() ? "" : entry.dtype->name;
  storage->location = "cpu";
  storage->bytes = entry.bytes();
  auto tensor = std::make_shared<PickleTensor>();
  tensor->storage = std::move(storage);
  tensor->dtype = entry.dtype->name;
  tensor->sizes = entry.sizes;
  tensor->strides = dense_strides(entry.sizes);
  return Value(Value::Leaf(std::move(tensor)));
}

void write_archive(DcpReader& reader, const fs::path& path, const MergeOptions& options) {
  const auto& entries = reader.entries();
  Value root = Value(Value::Dict());
  std::vector<const DcpEntry*> tensors;
  std::size_t room = 0;  // a list has an item for each position in a path, or fewer
  for (const auto& entry : entries) room += entry.path.size();
  for (const auto& entry : entries) {
    Value value;
    if (entry.dtype != nullptr) {
      value = described_tensor(entry, tensors.size());
      tensors.push_back(&entry);
    } else {
      value = reader.read_value(entry);
      if (leaf_as<PickleTensor>(value) != nullptr) {
        throw CheckpointError(
            str("'", entry.name, "' is a tensor in its file and none in the metadata."));
      }
    }
    set_at(root, reader.path_of(entry), std::move(value), entry, room);
  }
  ByteBar bar("merging", bytes_of(entries), options.progress);
  OutputFile file(path);
  ArchiveWriter archive([&](std::string_view bytes) { file.write(bytes); }, archive_name(path),
                        pickle_dumps(root));
  for (std::size_t key = 0; key < tensors.size(); ++key) {
    const auto bytes = reader.read_tensor(*tensors[key]);
    archive.begin_storage(std::to_string(key), bytes.size());
    archive.append(bytes);
    archive.end_storage();
    bar.add(std::ssize(bytes));
  }
  archive.finish();
  file.publish();
}

/// True if `path`, which need not exist, is `folder` or below it.
bool lies_inside(const fs::path& path, const fs::path& folder) {
  const auto inner = fs::weakly_canonical(fs::absolute(path));
  const auto outer = fs::canonical(folder);
  return std::ranges::mismatch(outer, inner).in1 == outer.end();
}

}  // namespace

fs::path merge_weights(const fs::path& folder, const fs::path& output,
                       const MergeOptions& options) {
  DcpReader reader(folder);
  std::error_code error;
  if (options.remove_checkpoint_dir && lies_inside(output, folder)) {
    throw ArgumentError(str("The merged weights would be written to '", output.string(),
                            "' and removed with the checkpoint '", folder.string(),
                            "'. Name an output folder outside of it, or do not ask for "
                            "--remove_checkpoint_dir (remove_checkpoint_dir = true)."));
  }
  fs::create_directories(output, error);
  if (error) {
    throw CheckpointError(
        str("The folder '", output.string(), "' cannot be created: ", error.message(), "."),
        output);
  }
  const auto path = output / (options.safe_serialization ? kSafeWeightsName : kWeightsName);
  if (options.safe_serialization) {
    write_safetensors(reader, path, options);
  } else {
    write_archive(reader, path, options);
  }
  if (options.remove_checkpoint_dir) fs::remove_all(folder, error);
  if (error) {
    throw CheckpointError(str("The merged weights are in '", path.string(), "', but the folder '",
                              folder.string(), "' cannot be removed: ", error.message(), "."),
                          folder);
  }
  return path;
}

}  // namespace accelerate::detail::formats
