#include "commands/checkpoint_content.h"

#include <algorithm>
#include <optional>
#include <span>

#include "accelerate/value.h"
#include "core/bytes.h"
#include "core/text.h"
#include "core/xxh3.h"
#include "formats/archive.h"
#include "formats/file_hash.h"
#include "formats/format_error.h"
#include "formats/safetensors_header.h"
#include "formats/torch_dtypes.h"

namespace accelerate::detail::commands {
namespace {

using formats::ArchiveReader;
using formats::leaf_as;
using formats::MappedFile;
using formats::PickleTensor;

FileContent read_safetensors(const MappedFile& file) {
  auto header = formats::read_safetensors_header(file);
  FileContent content{.format = "safetensors", .metadata = std::move(header.metadata)};
  for (const auto i : header.by_name) {
    auto& tensor = header.tensors[i];
    content.bytes += tensor.bytes();
    content.tensors.push_back({.name = std::move(tensor.name),
                               .dtype = std::string(to_string(tensor.dtype)),
                               .shape = std::move(tensor.shape),
                               .offset = header.data_offset + tensor.begin,
                               .bytes = tensor.bytes()});
  }
  return content;
}

// The bytes of a tensor whose elements are contiguous; nullopt for other views.
std::optional<std::int64_t> contiguous_bytes(const PickleTensor& tensor) {
  std::int64_t elements = 1;
  for (std::size_t i = tensor.sizes.size(); i-- > 0;) {
    if (tensor.sizes[i] != 1 && tensor.strides[i] != elements) return std::nullopt;
    elements *= tensor.sizes[i];
  }
  const auto* const dtype = formats::find_torch_dtype(tensor.dtype);
  return dtype == nullptr ? std::nullopt : std::optional(elements * dtype->bytes);
}

bool is_plain(const Value& value) { return value.kind() <= Value::Kind::kBytes; }

// Names and texts repeat what a file has once, so that a small one could ask for any amount of
// them.
class ArchiveWalk {
 public:
  ArchiveWalk(const MappedFile& file, const ArchiveReader& archive, FileContent& content)
      : file_(file),
        archive_(archive),
        content_(content),
        room_(64 * static_cast<std::uint64_t>(file.size())) {}

  void visit(const Value& value, const std::string& name) {
    if (value.is_dict() && !value.as_dict().empty()) {
      for (const auto& [key, item] : value.as_dict()) visit(item, below(name, key.to_string()));
    } else if ((value.is_list() || value.is_tuple()) &&
               !std::ranges::all_of(value.items(), is_plain)) {
      visit_items(value.items(), name);
    } else if (const auto* tensor = leaf_as<PickleTensor>(value)) {
      add(*tensor, name);
    } else if (const auto* storage = leaf_as<formats::PickleStorage>(value)) {
      const auto bytes = static_cast<std::int64_t>(storage->bytes);
      add({.name = name,
           .dtype = "uint8",
           .shape = {bytes},
           .offset = static_cast<std::int64_t>(archive_.entry(*storage).offset),
           .bytes = bytes});
    } else if (const auto* call = leaf_as<formats::PickleCall>(value)) {
      visit_call(*call, name);
    } else if (const auto* dict = leaf_as<formats::PickleDict>(value)) {
      visit_entries(dict->entries, name);
    } else if (const auto* array = leaf_as<formats::PickleArray>(value)) {
      const auto sum = xxh3(std::as_bytes(std::span(array->bytes)));
      add(str(array->repr(), " with XXH3 ", formats::xxh3_text(sum)), name);
    } else {
      add(value.repr(), name);
    }
  }

 private:
  void visit_items(std::span<const Value> items, const std::string& name) {
    std::size_t index = 0;
    for (const auto& item : items) visit(item, below(name, std::to_string(index++)));
  }
  void visit_entries(const formats::PickleCall::Entries& entries, const std::string& name) {
    for (const auto& [key, item] : entries) visit(item, below(name, key.repr()));
  }
  void visit_call(const formats::PickleCall& call, const std::string& name) {
    add(call.function(), name);
    visit(Value(call.args), below(name, "args"));
    if (!call.kwargs.is_none()) visit(call.kwargs, below(name, "kwargs"));
    if (!call.state.is_none()) visit(call.state, below(name, "state"));
    visit_items(call.items, name);
    visit_entries(call.entries, name);
  }

  std::string below(const std::string& name, const std::string& key) {
    const auto size = name.size() + 1 + key.size();
    if (size > formats::kLongestName) {
      refuse_content(file_, str("a tensor has a name of ", size, " bytes; at most ",
                                formats::kLongestName, " are shown"));
    }
    take_room(size);
    return name.empty() ? key : str(name, ".", key);
  }

  void take_room(std::uint64_t size) {
    if (size > room_) refuse_content(file_, "the names in it are too long to be shown");
    room_ -= size;
  }

  void add(std::string text, const std::string& name) {
    take_room(text.size());
    content_.values.push_back({.name = name, .text = std::move(text)});
  }

  void add(const PickleTensor& tensor, const std::string& name) {
    const auto* const dtype = formats::find_torch_dtype(tensor.dtype);
    StoredTensor stored{.name = name, .dtype = tensor.dtype, .shape = tensor.sizes};
    if (dtype != nullptr) {
      stored.offset = static_cast<std::int64_t>(archive_.entry(*tensor.storage).offset) +
                      tensor.offset * dtype->bytes;
    }
    if (const auto bytes = contiguous_bytes(tensor)) {
      stored.bytes = *bytes;
    } else {
      stored.strides = tensor.strides;
    }
    add(std::move(stored));
  }

  void add(StoredTensor stored) {
    if (__builtin_add_overflow(content_.bytes, stored.bytes, &content_.bytes)) {
      refuse_content(file_, "its tensors have more bytes than 64 bits count");
    }
    content_.tensors.push_back(std::move(stored));
  }

  const MappedFile& file_;
  const ArchiveReader& archive_;
  FileContent& content_;
  std::uint64_t room_;
};

FileContent read_archive(const MappedFile& file) {
  const formats::FileBytes bytes(file.path());
  const ArchiveReader archive(bytes);
  FileContent content{.format = "torch archive"};
  ArchiveWalk(file, archive, content).visit(archive.value(), "");
  return content;
}

enum class FileKind { kSafetensors, kArchive, kPickle, kOther };

FileKind kind_of(const MappedFile& file) {
  const auto start = file.read(0, std::min<std::int64_t>(file.size(), 9));
  if (start.size() == 9 && start[8] == '{') return FileKind::kSafetensors;
  // Archives of Torch before 1.6 begin with a number in a pickle.
  if (start.starts_with("PK") || start.starts_with("\x80\x02\x8a\x0a")) return FileKind::kArchive;
  return start.starts_with('\x80') ? FileKind::kPickle : FileKind::kOther;
}

}  // namespace

std::string FileContent::summary() const {
  const auto count = [](std::size_t n, std::string_view one) {
    return str(", ", n, " ", one, n == 1 ? "" : "s");
  };
  return str(format, count(tensors.size(), "tensor"),
             values.empty() ? "" : count(values.size(), "value"), ", ", convert_bytes(bytes));
}

bool has_tensors(const MappedFile& file) {
  const auto kind = kind_of(file);
  // Shards of distributed checkpoints are several archives in a row.
  return kind == FileKind::kSafetensors ||
         (kind == FileKind::kArchive && file.path().extension() != ".distcp");
}

FileContent read_content(const MappedFile& file) {
  // Each reader explains files that are none of its own: the one of archives pickles, the one of
  // safetensors the rest.
  const auto kind = kind_of(file);
  return kind == FileKind::kArchive || kind == FileKind::kPickle ? read_archive(file)
                                                                 : read_safetensors(file);
}

void refuse_content(const MappedFile& file, std::string_view reason) {
  throw formats::format_error(file.path().string(), 0, reason);
}

}  // namespace accelerate::detail::commands
