#include "commands/checkpoint_diff.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <span>
#include <tuple>

#include "accelerate/errors.h"
#include "commands/checkpoint_content.h"
#include "commands/checkpoint_folders.h"
#include "commands/stored_numbers.h"
#include "core/text.h"
#include "formats/mapped_file.h"
#include "formats/torch_dtypes.h"

namespace accelerate::detail::commands {
namespace {

namespace fs = std::filesystem;
using formats::MappedFile;
using Kind = Difference::Kind;

constexpr std::int64_t kChunk = 1 << 20;

// The elements of a tensor in the order of its indices.
class Elements {
 public:
  Elements(const MappedFile& file, const StoredTensor& tensor)
      : file_(file), tensor_(tensor), index_(tensor.shape.size()) {
    const auto* const dtype = formats::find_torch_dtype(torch_name(tensor.dtype));
    if (dtype != nullptr) width_ = dtype->bytes;
    if (tensor.strides.empty()) {
      count_ = tensor.bytes / width_;
      return;
    }
    for (const auto size : tensor.shape) {
      if (__builtin_mul_overflow(count_, size, &count_)) refuse();
    }
    // A view may repeat its elements without end.
    if (count_ / 4 > file.size()) refuse();
  }

  [[nodiscard]] std::int64_t count() const { return count_; }
  [[nodiscard]] std::int64_t width() const { return width_; }

  void next(std::span<std::byte> out) {
    if (tensor_.strides.empty()) {
      file_.read(tensor_.offset + at_, out);
      at_ += static_cast<std::int64_t>(out.size());
      return;
    }
    for (std::size_t to = 0; to < out.size(); to += static_cast<std::size_t>(width_)) {
      const auto from = static_cast<std::size_t>(tensor_.offset + at_ * width_);
      std::memcpy(&out[to], &file_.bytes()[from], static_cast<std::size_t>(width_));
      advance();
    }
  }

 private:
  [[noreturn]] void refuse() const {
    refuse_content(file_, "a tensor repeats its elements too often to be compared");
  }
  void advance() {
    for (std::size_t i = index_.size(); i-- > 0;) {
      at_ += tensor_.strides[i];
      if (++index_[i] < tensor_.shape[i]) return;
      at_ -= tensor_.strides[i] * index_[i];
      index_[i] = 0;
    }
  }

  const MappedFile& file_;
  const StoredTensor& tensor_;
  std::vector<std::int64_t> index_;
  std::int64_t at_ = 0;  // bytes if contiguous, else elements
  std::int64_t width_ = 1;
  std::int64_t count_ = 1;
};

// Adds what differs between two chunks of elements.
void compare_chunk(std::span<const std::byte> a, std::span<const std::byte> b, std::size_t width,
                   const NumberType* type, Difference& found) {
  if (std::ranges::equal(a, b)) return;
  const bool is_float = type != nullptr && type->is_float();
  for (std::size_t i = 0; i < a.size(); i += width) {
    if (std::memcmp(&a[i], &b[i], width) == 0) continue;
    if (type != nullptr) {
      const double x = type->load(&a[i]);
      const double y = type->load(&b[i]);
      // Zeros with other signs, and two NaN, are the same value in other bits.
      if (is_float && (x == y || (std::isnan(x) && std::isnan(y)))) continue;
      const double distance = std::abs(x - y);
      // Once NaN, it stays NaN.
      if (!found.largest || std::isnan(distance) || distance > *found.largest) {
        found.largest = distance;
      }
      if (found.elements == 1) {
        found.before = type->show(&a[i]);
        found.after = type->show(&b[i]);
      }
    }
    ++found.differing;
  }
}

/// One tensor or value of a file.
struct Item {
  std::string name;
  std::string text;
  const StoredTensor* tensor = nullptr;
};

struct OpenFile {
  explicit OpenFile(const fs::path& path) : file(MappedFile::open(path)) {}

  void read() {
    content = read_content(*file);
    for (const auto& [key, value] : content.metadata) items.push_back({"metadata " + key, value});
    for (const auto& value : content.values) items.push_back({value.name, value.text});
    for (const auto& tensor : content.tensors) {
      items.push_back(
          {tensor.name, str(torch_name(tensor.dtype), " [", join(tensor.shape), "]"), &tensor});
    }
    std::ranges::sort(items, {}, [](const Item& item) { return std::tie(item.name, item.text); });
  }

  std::shared_ptr<const MappedFile> file;
  FileContent content = {};
  std::vector<Item> items = {};
};

/// The files of one name, compared.
class FileDiff {
 public:
  FileDiff(const fs::path& a, const fs::path& b, std::string name,
           const formats::HashProgress& progress, std::vector<Difference>& found)
      : a_(a), b_(b), name_(std::move(name)), progress_(progress), found_(found) {}

  void compare() {
    const auto same = same_bytes();
    if (same == a_.file->size() && same == b_.file->size()) return;
    Difference bytes{.kind = Kind::kBytes, .file = name_, .elements = same};
    if (!has_tensors(*a_.file) || !has_tensors(*b_.file)) return found_.push_back(bytes);
    try {
      compare_content();
    } catch (const FormatError& error) {
      bytes.after = error.what();
      found_.push_back(bytes);
    }
  }

 private:
  void compare_content() {
    a_.read();
    b_.read();
    auto a = a_.items.begin();
    auto b = b_.items.begin();
    while (a != a_.items.end() || b != b_.items.end()) {
      if (b == b_.items.end() || (a != a_.items.end() && a->name < b->name)) {
        add(Kind::kRemoved, a->name, a->text, "");
        ++a;
      } else if (a == a_.items.end() || b->name < a->name) {
        add(Kind::kAdded, b->name, "", b->text);
        ++b;
      } else {
        compare(*a++, *b++);
      }
    }
  }

  // How many bytes are the same from the start on.
  [[nodiscard]] std::int64_t same_bytes() const {
    const auto size = std::min(a_.file->size(), b_.file->size());
    for (std::int64_t at = 0; at < size; at += kChunk) {
      const auto length = std::min(kChunk, size - at);
      const auto x = a_.file->read(at, length);
      const auto y = b_.file->read(at, length);
      if (x != y) return at + (std::ranges::mismatch(x, y).in1 - x.begin());
      progress_(length);
    }
    return size;
  }

  void compare(const Item& a, const Item& b) {
    if (a.text != b.text || (a.tensor == nullptr) != (b.tensor == nullptr)) {
      add(Kind::kChanged, a.name, a.text, b.text);
    } else if (a.tensor != nullptr) {
      compare_elements(a, b);
    }
  }

  void compare_elements(const Item& a, const Item& b) {
    Elements x(*a_.file, *a.tensor);
    Elements y(*b_.file, *b.tensor);
    const auto* const type = find_number_type(a.tensor->dtype);
    Difference found{.kind = Kind::kElements, .file = name_, .name = a.name, .elements = x.count()};
    const auto per_chunk = kChunk / x.width();
    for (std::int64_t at = 0; at < x.count(); at += per_chunk) {
      const auto bytes = static_cast<std::size_t>(std::min(per_chunk, x.count() - at) * x.width());
      buffer_a_.resize(bytes);
      buffer_b_.resize(bytes);
      x.next(buffer_a_);
      y.next(buffer_b_);
      compare_chunk(buffer_a_, buffer_b_, static_cast<std::size_t>(x.width()), type, found);
      count(static_cast<std::int64_t>(bytes));
    }
    if (found.differing > 0) found_.push_back(std::move(found));
  }

  void count(std::int64_t bytes) {
    compared_ += bytes;
    if (compared_ / 4 > a_.file->size() + b_.file->size()) {
      refuse_content(*a_.file, "its tensors overlap too often to be compared");
    }
    progress_(bytes);
  }

  void add(Kind kind, const std::string& name, const std::string& before,
           const std::string& after) {
    found_.push_back({.kind = kind, .file = name_, .name = name, .before = before, .after = after});
  }

  OpenFile a_;
  OpenFile b_;
  std::string name_;
  const formats::HashProgress& progress_;
  std::vector<Difference>& found_;
  std::vector<std::byte> buffer_a_ = {};
  std::vector<std::byte> buffer_b_ = {};
  std::int64_t compared_ = 0;
};

}  // namespace

CheckpointDiff diff_checkpoints(const fs::path& a, const fs::path& b,
                                const formats::HashProgress& progress) {
  require_existing(a);
  require_existing(b);
  const bool folders = fs::is_directory(a);
  if (folders != fs::is_directory(b)) {
    throw ConfigError(str("'", (folders ? a : b).string(), "' is a folder and '",
                          (folders ? b : a).string(),
                          "' a file. Compare two folders or two files."));
  }
  std::int64_t total = 0;
  const formats::HashProgress add = [&](std::int64_t bytes) { progress(total += bytes); };
  CheckpointDiff diff;
  if (!folders) {
    diff.files = 1;
    FileDiff(a, b, "", add, diff.differences).compare();
    return diff;
  }
  const auto in_a = files_of(a);
  const auto in_b = files_of(b);
  std::vector<std::string> names;
  std::ranges::set_union(in_a, in_b, std::back_inserter(names));
  diff.files = static_cast<std::int64_t>(names.size());
  for (const auto& name : names) {
    if (!std::ranges::binary_search(in_b, name)) {
      diff.differences.push_back({.kind = Kind::kRemoved, .file = name});
    } else if (!std::ranges::binary_search(in_a, name)) {
      diff.differences.push_back({.kind = Kind::kAdded, .file = name});
    } else {
      FileDiff(a / name, b / name, name, add, diff.differences).compare();
    }
  }
  return diff;
}

}  // namespace accelerate::detail::commands
