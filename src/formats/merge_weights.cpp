#include "formats/merge_weights.h"

#include <algorithm>
#include <functional>
#include <map>
#include <span>
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
#include "formats/zero_folder.h"

namespace accelerate::detail::formats {
namespace {

namespace fs = std::filesystem;

/// A folder of DeepSpeed with the functions of a `DcpReader`.
class ZeroReader {
 public:
  explicit ZeroReader(const fs::path& folder) : tensors_(read_zero_folder(folder)) {
    for (const auto& tensor : tensors_) {
      entries_.push_back({.name = tensor.name,
                          .path = {tensor.name},
                          .dtype = tensor.dtype,
                          .sizes = tensor.sizes});
    }
  }

  [[nodiscard]] const std::vector<DcpEntry>& entries() const { return entries_; }
  [[nodiscard]] static std::span<const Value> path_of(const DcpEntry& entry) { return entry.path; }
  [[nodiscard]] std::string read_tensor(const DcpEntry& entry) {
    const auto& tensor = tensors_[static_cast<std::size_t>(&entry - entries_.data())];
    std::string bytes(entry.bytes(), '\0');
    read_zero_range(files_, tensor, {0, element_count(entry.sizes)}, bytes);
    return bytes;
  }
  [[nodiscard]] static Value read_value(const DcpEntry&) { return {}; }
  [[nodiscard]] Value nested(const std::function<Value(const DcpEntry& entry)>& leaf) const {
    Value::Dict root;
    for (const auto& entry : entries_) root.set(entry.name, leaf(entry));
    return Value(std::move(root));
  }

 private:
  OpenFiles files_;
  std::vector<ZeroTensor> tensors_;
  std::vector<DcpEntry> entries_;
};

std::int64_t bytes_of(const std::vector<DcpEntry>& entries) {
  std::int64_t bytes = 0;
  for (const auto& entry : entries) {
    if (entry.dtype != nullptr) bytes += static_cast<std::int64_t>(entry.bytes());
  }
  return bytes;
}

// safetensors

/// The entry in the header. Throws if the format cannot hold the value.
TensorEntry header_entry(const DcpEntry& entry, std::span<const Value> path) {
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

template <class Reader>
void write_safetensors(Reader& reader, const fs::path& path, const MergeOptions& options) {
  const auto& entries = reader.entries();
  std::vector<TensorEntry> tensors;
  std::map<std::string, const DcpEntry*> sources;
  for (const auto& entry : entries) {
    tensors.push_back(header_entry(entry, reader.path_of(entry)));
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

template <class Reader>
void write_archive(Reader& reader, const fs::path& path, const MergeOptions& options) {
  std::vector<const DcpEntry*> tensors;
  const Value root = reader.nested([&](const DcpEntry& entry) {
    if (entry.dtype == nullptr) return reader.read_value(entry);
    tensors.push_back(&entry);
    return described_tensor(*entry.dtype, entry.sizes, std::to_string(tensors.size() - 1));
  });
  ByteBar bar("merging", bytes_of(reader.entries()), options.progress);
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

template <class Reader>
fs::path merge(Reader reader, const fs::path& folder, const fs::path& output,
               const MergeOptions& options) {
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

}  // namespace

fs::path merge_weights(const fs::path& folder, const fs::path& output,
                       const MergeOptions& options) {
  std::error_code error;
  const bool is_dcp = fs::exists(folder / ".metadata", error);
  if (const auto zero = is_dcp ? std::nullopt : find_zero_folder(folder)) {
    return merge(ZeroReader(*zero), folder, output, options);
  }
  return merge(DcpReader(folder), folder, output, options);
}

}  // namespace accelerate::detail::formats
