// accelerate checkpoint show FILE [--json]
#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/progress.h"
#include "accelerate/value.h"
#include "cli/commands.h"
#include "core/bytes.h"
#include "core/json.h"
#include "core/progress_line.h"
#include "core/python_text.h"
#include "core/text.h"
#include "core/xxh3.h"
#include "formats/archive.h"
#include "formats/format_error.h"
#include "formats/mapped_file.h"
#include "formats/safetensors_header.h"
#include "formats/torch_dtypes.h"

namespace accelerate::cli {
namespace {

using detail::str;
using detail::formats::ArchiveReader;
using detail::formats::MappedFile;
using detail::formats::PickleTensor;

/// Instead of a sum: the elements do not lie in order.
constexpr std::string_view kView = "(a view)";

struct TensorRow {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::int64_t offset = 0;  // in the file
  std::int64_t bytes = 0;
  std::string sum = {};
};

/// Where a tensor lies in its file.
struct Place {
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
  auto operator<=>(const Place&) const = default;
};

struct FileSummary {
  std::string format;
  std::map<std::string, std::string> metadata;
  std::vector<TensorRow> tensors;
  std::int64_t bytes = 0;  // of all tensors
};

[[noreturn]] void refuse(const MappedFile& file, std::string_view reason) {
  throw detail::formats::format_error(file.path().string(), 0, reason);
}

FileSummary summarize_safetensors(const MappedFile& file) {
  auto header = detail::formats::read_safetensors_header(file);
  FileSummary summary{
      .format = "safetensors", .metadata = std::move(header.metadata), .tensors = {}};
  for (const auto i : header.by_name) {
    auto& tensor = header.tensors[i];
    summary.bytes += tensor.bytes();
    summary.tensors.push_back({.name = std::move(tensor.name),
                               .dtype = std::string(to_string(tensor.dtype)),
                               .shape = std::move(tensor.shape),
                               .offset = header.data_offset + tensor.begin,
                               .bytes = tensor.bytes()});
  }
  return summary;
}

// The bytes of a tensor whose elements lie in order; nullopt for other views.
std::optional<std::int64_t> bytes_in_order(const PickleTensor& tensor) {
  std::int64_t elements = 1;
  for (std::size_t i = tensor.sizes.size(); i-- > 0;) {
    if (tensor.sizes[i] != 1 && tensor.strides[i] != elements) return std::nullopt;
    elements *= tensor.sizes[i];
  }
  const auto* const dtype = detail::formats::find_torch_dtype(tensor.dtype);
  return dtype == nullptr ? std::nullopt : std::optional(elements * dtype->bytes);
}

// The tensors in a value, named by the keys and indices on the way to them. Names repeat what a
// file has once, so that a small one could ask for any amount of them.
class TensorFinder {
 public:
  TensorFinder(const MappedFile& file, const ArchiveReader& archive, FileSummary& summary)
      : file_(file),
        archive_(archive),
        summary_(summary),
        room_(64 * static_cast<std::uint64_t>(file.size())) {}

  void find(const Value& value, const std::string& name) {
    if (value.is_dict()) {
      for (const auto& [key, item] : value.as_dict()) find(item, below(name, key.to_string()));
    } else if (value.is_list() || value.is_tuple()) {
      std::size_t index = 0;
      for (const auto& item : value.items()) find(item, below(name, std::to_string(index++)));
    } else if (const auto* tensor = detail::formats::leaf_as<PickleTensor>(value)) {
      add(*tensor, name);
    }
  }

 private:
  std::string below(const std::string& name, const std::string& key) {
    const auto size = name.size() + 1 + key.size();
    if (size > detail::formats::kLongestName) {
      refuse(file_, str("a tensor has a name of ", size, " bytes; at most ",
                        detail::formats::kLongestName, " are shown"));
    }
    if (size > room_) refuse(file_, "the names of its tensors are too long to be shown");
    room_ -= size;
    return name.empty() ? key : str(name, ".", key);
  }

  void add(const PickleTensor& tensor, const std::string& name) {
    TensorRow row{.name = name, .dtype = tensor.dtype, .shape = tensor.sizes};
    if (const auto bytes = bytes_in_order(tensor)) {
      row.bytes = *bytes;
      row.offset = static_cast<std::int64_t>(archive_.entry(*tensor.storage).offset) +
                   tensor.offset * detail::formats::find_torch_dtype(tensor.dtype)->bytes;
    } else {
      row.sum = kView;
    }
    if (__builtin_add_overflow(summary_.bytes, row.bytes, &summary_.bytes)) {
      refuse(file_, "its tensors have more bytes than 64 bits count");
    }
    summary_.tensors.push_back(std::move(row));
  }

  const MappedFile& file_;
  const ArchiveReader& archive_;
  FileSummary& summary_;
  std::uint64_t room_;
};

FileSummary summarize_archive(const MappedFile& file) {
  const detail::formats::FileBytes bytes(file.path());
  const ArchiveReader archive(bytes);
  FileSummary summary{.format = "torch archive", .metadata = {}, .tensors = {}};
  TensorFinder(file, archive, summary).find(archive.value(), "");
  return summary;
}

// By content, because names of files may say anything.
FileSummary summarize(const MappedFile& file) {
  const auto start = file.read(0, std::min<std::int64_t>(file.size(), 9));
  const bool is_safetensors = start.size() == 9 && start[8] == '{';
  const bool is_archive = start.starts_with("PK") || start.starts_with('\x80');
  return is_archive && !is_safetensors ? summarize_archive(file) : summarize_safetensors(file);
}

std::string sum_of(const MappedFile& file, const Place& place, ProgressBar& bar) {
  constexpr std::int64_t kChunk = 8 << 20;
  std::vector<std::byte> buffer(static_cast<std::size_t>(std::min(kChunk, place.bytes)));
  detail::Xxh3 hash;
  for (std::int64_t at = 0; at < place.bytes; at += kChunk) {
    const auto part =
        std::span(buffer).first(static_cast<std::size_t>(std::min(kChunk, place.bytes - at)));
    file.read(place.offset + at, part);
    hash.update(part);
    bar.update(static_cast<std::int64_t>(part.size()));
  }
  const auto digest = hash.digest();
  std::string text;
  detail::append_hex(text, static_cast<std::uint32_t>(digest >> 32), 8);
  detail::append_hex(text, static_cast<std::uint32_t>(digest), 8);
  return text;
}

// Each place is read once, however many tensors lie there; overlapping ones are read several times.
void add_sums(const MappedFile& file, FileSummary& summary) {
  std::map<Place, std::string> sums;
  std::int64_t total = 0;
  for (const auto& tensor : summary.tensors) {
    if (tensor.sum == kView || !sums.try_emplace({tensor.offset, tensor.bytes}).second) continue;
    total += tensor.bytes;
    if (total / 4 > file.size()) refuse(file, "its tensors overlap too often to be hashed");
  }
  ProgressBar bar({.main_process_only = false,
                   .desc = "hashing",
                   .total = total,
                   .leave = false,
                   .unit = "B",
                   .unit_scale = true});
  for (auto& [place, sum] : sums) sum = sum_of(file, place, bar);
  for (auto& tensor : summary.tensors) {
    if (tensor.sum != kView) tensor.sum = sums.at({tensor.offset, tensor.bytes});
  }
}

std::string as_json(const MappedFile& file, const FileSummary& summary) {
  Value::Dict metadata;
  for (const auto& [key, value] : summary.metadata) metadata.set(key, value);
  Value::List tensors;
  for (const auto& tensor : summary.tensors) {
    Value::Dict row;
    row.set("name", tensor.name);
    row.set("dtype", tensor.dtype);
    row.set("shape", Value(Value::List(tensor.shape.begin(), tensor.shape.end())));
    row.set("bytes", tensor.bytes);
    row.set("xxh3", tensor.sum);
    tensors.emplace_back(std::move(row));
  }
  Value::Dict dict;
  dict.set("file", file.path().string());
  dict.set("format", summary.format);
  dict.set("metadata", std::move(metadata));
  dict.set("bytes", summary.bytes);
  dict.set("tensors", std::move(tensors));
  return detail::json_dumps(Value(std::move(dict)), {.indent = 2, .replace_invalid = true}) + "\n";
}

// Text of a file, fit for a terminal.
std::string shown(const std::string& text) {
  for (std::size_t at = 0; at < text.size();) {
    const auto point = detail::next_code_point(text, at);
    if (!point.valid || !detail::is_printable(point.value)) return detail::python_repr(text);
    at += point.length;
  }
  return text;
}

// The last column but one, which has numbers, is aligned at the right. Longer cells stick out, so
// that one of them does not fill the table with blanks.
std::string as_table(const FileSummary& summary) {
  constexpr int kWidest = 120;
  std::vector<std::array<std::string, 5>> rows{{"name", "dtype", "shape", "bytes", "xxh3"}};
  for (const auto& tensor : summary.tensors) {
    rows.push_back({shown(tensor.name), tensor.dtype, str("[", detail::join(tensor.shape), "]"),
                    std::to_string(tensor.bytes), tensor.sum});
  }
  std::array<int, 4> widths{};
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < widths.size(); ++i) {
      widths.at(i) = std::max(widths.at(i), std::min(kWidest, detail::display_width(row.at(i))));
    }
  }
  std::string out;
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < widths.size(); ++i) {
      const auto& cell = row.at(i);
      const auto room = std::max(0, widths.at(i) - detail::display_width(cell));
      const std::string blanks(static_cast<std::size_t>(room), ' ');
      out += i == 3 ? blanks + cell : cell + blanks;
      out += "  ";
    }
    out += row.back() + "\n";
  }
  out += str("\n", summary.format, ", ", summary.tensors.size(),
             summary.tensors.size() == 1 ? " tensor, " : " tensors, ",
             detail::convert_bytes(summary.bytes), "\n");
  for (const auto& [key, value] : summary.metadata) {
    out += str("metadata ", shown(key), " = ", shown(value), "\n");
  }
  return out;
}

}  // namespace

int checkpoint(const detail::launch::Arguments& arguments) {
  if (arguments.operands.size() != 2) {
    throw ConfigError("Name one file: accelerate checkpoint show model.safetensors.");
  }
  const auto file = MappedFile::open(arguments.operands.back());
  auto summary = summarize(*file);
  add_sums(*file, summary);
  print(arguments.on("json") ? as_json(*file, summary) : as_table(summary));
  return 0;
}

}  // namespace accelerate::cli
