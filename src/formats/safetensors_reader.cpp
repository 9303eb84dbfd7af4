// A parser of its own: a file may have 100,000 tensors, and must open in a moment; numbers are
// unsigned integers and nothing else; the grammar has three levels, so that nothing recurses.
#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <tuple>
#include <utility>

#include "core/json.h"
#include "core/python_text.h"
#include "core/text.h"
#include "formats/format_error.h"
#include "formats/little_endian.h"
#include "formats/mapped_file.h"
#include "formats/safetensors_header.h"

namespace accelerate::detail::formats {
namespace {

// As many as Torch's operators can work with.
constexpr std::size_t kMostDimensions = 64;
constexpr std::size_t kPrefix = 8;

// A name from a file, fit for a terminal.
std::string shown(std::string_view name) {
  constexpr std::size_t kShown = 200;
  return python_repr(name.substr(0, kShown)) + (name.size() > kShown ? "..." : "");
}

class HeaderReader {
 public:
  HeaderReader(std::string_view json, std::int64_t file_size, std::string_view source)
      : json_(json), file_size_(file_size), source_(source) {}

  SafetensorsHeader read() {
    check_utf8();
    if (json_.empty() || json_.front() != '{') fail(0, "the header does not begin with '{'");
    read_document();
    check_duplicates();
    check_places();
    return std::move(header_);
  }

 private:
  [[noreturn]] void fail(std::size_t at, std::string_view reason) const {
    throw format_error(source_, kPrefix + at, reason);
  }

  [[noreturn]] void fail(const TensorEntry& tensor, std::string_view reason) const {
    throw format_error(source_, static_cast<std::uint64_t>(tensor.name_offset),
                       str("tensor ", shown(tensor.name), " ", reason));
  }

  void check_utf8() const {
    for (std::size_t at = 0; at < json_.size();) {
      std::uint64_t eight = 0;
      if (at + sizeof eight <= json_.size()) {
        std::memcpy(&eight, json_.data() + at, sizeof eight);
        if ((eight & 0x8080808080808080U) == 0) {  // ASCII
          at += sizeof eight;
          continue;
        }
      }
      const auto point = next_code_point(json_, at);
      if (!point.valid) fail(at, "the header is not UTF-8");
      at += point.length;
    }
  }

  // ---- JSON ----

  [[nodiscard]] char peek() const { return at_ < json_.size() ? json_[at_] : '\0'; }

  void skip_blanks() {
    while (at_ < json_.size() &&
           (json_[at_] == ' ' || json_[at_] == '\n' || json_[at_] == '\r' || json_[at_] == '\t')) {
      ++at_;
    }
  }

  bool take(char c) {
    skip_blanks();
    if (at_ == json_.size() || json_[at_] != c) return false;
    ++at_;
    return true;
  }

  void expect(char c, std::string_view where, std::string_view what) {
    if (!take(c)) fail(at_, str("expected '", c, "' ", where, " ", what));
  }

  // Calls `member(key, where)` at the value of each member of an object.
  template <class F>
  void read_object(std::string_view what, F member) {
    expect('{', "before", what);
    if (take('}')) return;
    do {
      skip_blanks();
      const std::size_t where = at_;
      std::string key = read_string("a key");
      expect(':', "behind", "a key");
      skip_blanks();
      member(std::move(key), where);
    } while (take(','));
    expect('}', "behind", what);
  }

  std::string read_string(std::string_view what, std::size_t longest = kLongestName) {
    skip_blanks();
    const std::size_t start = at_;
    if (peek() != '"') fail(start, str("expected ", what, " in double quotes"));
    bool escaped = false;
    std::size_t end = start + 1;
    for (; end < json_.size() && json_[end] != '"'; ++end) {
      if (static_cast<unsigned char>(json_[end]) < 0x20) {
        fail(end, "a control character must be escaped inside a string");
      }
      if (json_[end] != '\\') continue;
      escaped = true;
      ++end;
    }
    if (end >= json_.size()) fail(start, "the string has no end");
    at_ = end + 1;
    const auto token = json_.substr(start, at_ - start);
    if (token.size() > longest + 2) {
      fail(start, str("the string has more than ", longest, " bytes"));
    }
    if (!escaped) return std::string(token.substr(1, token.size() - 2));
    try {
      return json_loads(token).as_string();
    } catch (const ConfigError&) {
      fail(start, "the string has an escape that JSON does not know");
    }
  }

  std::int64_t read_integer(std::string_view what) {
    skip_blanks();
    const std::size_t start = at_;
    std::int64_t number = 0;
    const char* end = json_.data() + json_.size();
    const auto result = std::from_chars(json_.data() + at_, end, number);
    at_ = static_cast<std::size_t>(result.ptr - json_.data());
    const auto digits = json_.substr(start, at_ - start);
    if (result.ec == std::errc::result_out_of_range) {
      fail(start, str(what, " does not fit into 64 bits"));
    }
    const bool zeros = digits.size() > 1 && digits.front() == '0';
    if (digits.empty() || digits.front() == '-' || zeros || peek() == '.' || peek() == 'e' ||
        peek() == 'E') {
      fail(start, str(what, " is no unsigned integer"));
    }
    return number;
  }

  // ---- the fields ----

  void read_document() {
    constexpr std::size_t kTypicalEntry = 100;  // bytes of JSON
    header_.tensors.reserve(json_.size() / kTypicalEntry);
    bool metadata = false;
    read_object("the tensors", [&](std::string key, std::size_t where) {
      if (key != kMetadataKey) return read_tensor(std::move(key), where);
      if (std::exchange(metadata, true)) fail(where, "'__metadata__' is there a second time");
      read_metadata();
    });
    skip_blanks();
    if (at_ != json_.size()) fail(at_, "the header goes on behind its JSON");
  }

  void read_metadata() {
    read_object("the metadata", [&](std::string key, std::size_t where) {
      std::string value = read_string("a text as metadata", kLongestHeader);
      const auto [at, added] = header_.metadata.try_emplace(std::move(key), std::move(value));
      if (!added) fail(where, str("metadata ", shown(at->first), " is there a second time"));
    });
  }

  void read_tensor(std::string name, std::size_t where) {
    TensorEntry tensor{.name = std::move(name),
                       .name_offset = static_cast<std::int64_t>(kPrefix + where)};
    struct Field {
      std::string_view name;
      void (HeaderReader::*read)(TensorEntry&);
    };
    static constexpr std::array<Field, 3> kFields{{{"dtype", &HeaderReader::read_dtype},
                                                   {"shape", &HeaderReader::read_shape},
                                                   {"data_offsets", &HeaderReader::read_offsets}}};
    std::array<bool, kFields.size()> seen{};
    read_object("the fields of a tensor", [&](const std::string& field, std::size_t at) {
      const auto* const found = std::ranges::find(kFields, field, &Field::name);
      if (found == kFields.end()) {
        fail(at, str("tensor ", shown(tensor.name), " has the unknown field ", shown(field)));
      }
      const auto index = static_cast<std::size_t>(found - kFields.begin());
      if (std::exchange(seen.at(index), true))
        fail(at, str("'", field, "' is there a second time"));
      (this->*found->read)(tensor);
    });
    for (std::size_t i = 0; i < seen.size(); ++i) {
      if (!seen.at(i)) fail(tensor, str("has no field '", kFields.at(i).name, "'"));
    }
    check_size(tensor);
    header_.tensors.push_back(std::move(tensor));
  }

  void read_dtype(TensorEntry& tensor) {
    const std::size_t where = at_;
    const auto name = read_string("a dtype");
    const auto dtype = find_dtype(name);
    if (!dtype) {
      fail(where, str("tensor ", shown(tensor.name), " has the unknown dtype ", shown(name)));
    }
    tensor.dtype = *dtype;
  }

  void read_shape(TensorEntry& tensor) {
    const std::size_t where = at_;
    expect('[', "before", "a shape");
    if (take(']')) return;
    do {
      if (tensor.shape.size() == kMostDimensions) {
        fail(where,
             str("tensor ", shown(tensor.name), " has more than ", kMostDimensions, " dimensions"));
      }
      tensor.shape.push_back(read_integer("a size in a shape"));
    } while (take(','));
    expect(']', "behind", "a shape");
  }

  void read_offsets(TensorEntry& tensor) {
    expect('[', "before", "the data_offsets");
    tensor.begin = read_integer("an offset");
    expect(',', "between", "the two data_offsets");
    tensor.end = read_integer("an offset");
    expect(']', "behind", "the two data_offsets");
  }

  // ---- what the fields say ----

  void check_size(const TensorEntry& tensor) const {
    const auto bits = bit_size(tensor.dtype, tensor.shape);
    if (bits && tensor.begin <= tensor.end && *bits % 8 == 0 && tensor.bytes() == *bits / 8) {
      return;
    }
    const auto shape = str("shape [", join(tensor.shape), "] of ", to_string(tensor.dtype));
    if (!bits) fail(tensor, str("has a size beyond 64 bits: ", shape));
    if (*bits % 8 != 0) fail(tensor, str("does not fill its last byte: ", shape));
    const auto offsets = str("data_offsets [", tensor.begin, ", ", tensor.end, "]");
    if (tensor.end < tensor.begin) fail(tensor, str("ends before it begins: ", offsets));
    fail(tensor,
         str("has ", tensor.bytes(), " bytes (", offsets, "), but ", shape, " needs ", *bits / 8));
  }

  void check_duplicates() {
    const auto same_name = [this](std::uint32_t a, std::uint32_t b) {
      return header_.tensors[a].name == header_.tensors[b].name;
    };
    header_.index();
    const auto at = std::ranges::adjacent_find(header_.by_name, same_name);
    if (at != header_.by_name.end()) fail(header_.tensors[*(at + 1)], "is there a second time");
  }

  void check_places() {
    // Empty tensors share a place: these keep the order of the header.
    const auto place = [](const TensorEntry& t) {
      return std::tuple(t.begin, t.end, t.name_offset);
    };
    if (!std::ranges::is_sorted(header_.tensors, {}, place)) {
      std::ranges::sort(header_.tensors, {}, place);
      header_.index();
    }
    std::int64_t end = 0;
    const TensorEntry* before = nullptr;
    for (const auto& tensor : header_.tensors) {
      if (tensor.begin > end) {
        fail(tensor, str("begins at ", tensor.begin, " of the data, which leaves a gap of ",
                         tensor.begin - end, " bytes before it"));
      }
      if (tensor.begin < end) {
        fail(tensor, str("begins at ", tensor.begin, " of the data, but ", shown(before->name),
                         " ends at ", end, ": they overlap"));
      }
      end = tensor.end;
      before = &tensor;
    }
    header_.data_offset = static_cast<std::int64_t>(kPrefix + json_.size());
    const std::int64_t data = file_size_ - header_.data_offset;
    if (end != data) {
      throw format_error(source_, static_cast<std::uint64_t>(file_size_),
                         str("the file has ", data, " bytes of data, but its tensors have ", end,
                             end > data ? ". It was cut, or its download is not complete" : ""));
    }
  }

  std::string_view json_;
  std::int64_t file_size_;
  std::string_view source_;
  std::size_t at_ = 0;
  SafetensorsHeader header_;
};

// The length that the first bytes tell, checked.
std::int64_t header_length(std::string_view prefix, std::int64_t file_size,
                           std::string_view source) {
  if (prefix.size() < kPrefix) {
    throw format_error(source, 0,
                       str("the file has ", file_size,
                           " bytes; a safetensors file begins with 8 that tell the length of its "
                           "header"));
  }
  const auto length = read_little<std::uint64_t>(prefix, 0);
  if (length > kLongestHeader) {
    throw format_error(source, 0,
                       str("the header would have ", length, " bytes, more than the ",
                           kLongestHeader, " that are allowed. It may be no safetensors file"));
  }
  const auto rest = static_cast<std::uint64_t>(file_size) - kPrefix;
  if (length > rest) {
    throw format_error(
        source, 0,
        str("the header has ", length, " bytes, but the file ends after ", rest, " of them"));
  }
  return static_cast<std::int64_t>(length);
}

}  // namespace

SafetensorsHeader read_safetensors_header(const MappedFile& file) {
  const auto source = file.path().string();
  const auto prefix = file.read(0, std::min<std::int64_t>(file.size(), kPrefix));
  const auto json = file.read(kPrefix, header_length(prefix, file.size(), source));
  return HeaderReader(json, file.size(), source).read();
}

SafetensorsHeader read_safetensors_header(std::string_view file, std::string_view source) {
  const auto size = static_cast<std::int64_t>(file.size());
  const auto length = header_length(file.substr(0, kPrefix), size, source);
  return HeaderReader(file.substr(kPrefix, static_cast<std::size_t>(length)), size, source).read();
}

}  // namespace accelerate::detail::formats
