#include "formats/safetensors_header.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "accelerate/errors.h"
#include "core/json.h"
#include "core/python_text.h"
#include "core/text.h"
#include "formats/little_endian.h"
#include "formats/utf8.h"

namespace accelerate::detail::formats {
namespace {

struct DtypeFacts {
  std::string_view name;
  int bits;
};

constexpr std::array<DtypeFacts, kDtypeCount> kDtypes{{
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
}};

// A file that Python cannot open is of no use.
void check_utf8(std::string_view what, std::string_view text) {
  if (is_utf8(text)) return;
  throw ArgumentError(
      str("The ", what, " ", python_repr(text), " is not UTF-8, which a safetensors file needs."));
}

void check_name(std::string_view what, std::string_view text) {
  if (text.size() > kLongestName) {
    throw ArgumentError(str("The ", what, " ", python_repr(text.substr(0, 60)), "... has ",
                            text.size(), " bytes; a safetensors file takes ", kLongestName, "."));
  }
  check_utf8(what, text);
}

void check_names(const SafetensorsHeader& header) {
  std::string_view before;
  for (std::size_t i = 0; i < header.by_name.size(); ++i) {
    const std::string& name = header.tensors[header.by_name[i]].name;
    if (i > 0 && name == before) {
      throw ArgumentError(str("Two tensors have the name ", python_repr(name), "."));
    }
    if (name == kMetadataKey) {
      throw ArgumentError(
          "A tensor cannot have the name '__metadata__', which safetensors files "
          "use for something else.");
    }
    check_name("name", name);
    before = name;
  }
  for (const auto& [key, value] : header.metadata) {
    check_name("metadata key", key);
    check_utf8("metadata", value);
  }
}

void append_quoted(std::string& out, std::string_view text) {
  const auto special = [](char c) {
    return static_cast<unsigned char>(c) < 0x20 || c == '"' || c == '\\';
  };
  if (std::ranges::any_of(text, special)) {
    out += json_dumps(Value(std::string(text)), {.ensure_ascii = false});
  } else {
    out.append("\"").append(text).append("\"");
  }
}

void append_metadata(std::string& out, const SafetensorsHeader::Metadata& metadata) {
  append_quoted(out, kMetadataKey);
  out += ":{";
  for (bool first = true; const auto& [key, value] : metadata) {
    if (!std::exchange(first, false)) out += ',';
    append_quoted(out, key);
    out += ':';
    append_quoted(out, value);
  }
  out += '}';
}

void append_tensor(std::string& out, const TensorEntry& tensor) {
  append_quoted(out, tensor.name);
  out.append(R"(:{"dtype":")").append(to_string(tensor.dtype)).append(R"(","shape":[)");
  for (bool first = true; const auto size : tensor.shape) {
    if (!std::exchange(first, false)) out += ',';
    out += std::to_string(size);
  }
  out.append(R"(],"data_offsets":[)").append(std::to_string(tensor.begin)).append(",");
  out.append(std::to_string(tensor.end)).append("]}");
}

}  // namespace

std::string_view to_string(Dtype dtype) { return kDtypes.at(static_cast<std::size_t>(dtype)).name; }
int bits_of(Dtype dtype) { return kDtypes.at(static_cast<std::size_t>(dtype)).bits; }

std::optional<Dtype> find_dtype(std::string_view name) {
  const auto* at = std::ranges::find(kDtypes, name, &DtypeFacts::name);
  if (at == kDtypes.end()) return std::nullopt;
  return static_cast<Dtype>(at - kDtypes.begin());
}

std::optional<std::int64_t> bit_size(Dtype dtype, std::span<const std::int64_t> shape) {
  // Zeros count as one here: strides are products of the other sizes.
  std::int64_t product = bits_of(dtype);
  for (const auto size : shape) {
    if (__builtin_mul_overflow(product, std::max<std::int64_t>(size, 1), &product)) {
      return std::nullopt;
    }
  }
  return std::ranges::find(shape, 0) != shape.end() ? 0 : product;
}

void SafetensorsHeader::index() {
  by_name.resize(tensors.size());
  std::iota(by_name.begin(), by_name.end(), 0U);
  const auto before = [this](std::uint32_t a, std::uint32_t b) {
    const auto order = tensors[a].name.compare(tensors[b].name);
    return order != 0 ? order < 0 : a < b;
  };
  // The tensors of most files have one dtype, and are sorted already.
  if (!std::ranges::is_sorted(by_name, before)) std::ranges::sort(by_name, before);
}

const TensorEntry* SafetensorsHeader::find(std::string_view name) const {
  const auto name_of = [this](std::uint32_t i) -> std::string_view { return tensors[i].name; };
  const auto at = std::ranges::lower_bound(by_name, name, {}, name_of);
  return at != by_name.end() && name_of(*at) == name ? &tensors[*at] : nullptr;
}

SafetensorsHeader plan_safetensors(std::vector<TensorEntry> tensors,
                                   SafetensorsHeader::Metadata metadata) {
  std::ranges::sort(tensors, [](const TensorEntry& a, const TensorEntry& b) {
    return a.dtype != b.dtype ? a.dtype > b.dtype : a.name < b.name;
  });
  SafetensorsHeader header{
      .tensors = std::move(tensors), .by_name = {}, .metadata = std::move(metadata)};
  header.index();
  check_names(header);
  std::int64_t end = 0;
  for (auto& tensor : header.tensors) {
    const auto bits = bit_size(tensor.dtype, tensor.shape);
    if (!bits || *bits % 8 != 0 || __builtin_add_overflow(end, *bits / 8, &tensor.end)) {
      throw ArgumentError(str("The tensor ", python_repr(tensor.name), " of dtype ",
                              to_string(tensor.dtype), " and shape [", join(tensor.shape),
                              "] cannot be written: its size is no number of whole bytes."));
    }
    tensor.begin = std::exchange(end, tensor.end);
  }
  return header;
}

std::string safetensors_header_bytes(const SafetensorsHeader& header) {
  std::string out = "{";
  if (!header.metadata.empty()) append_metadata(out, header.metadata);
  for (const auto& tensor : header.tensors) {
    if (out.back() != '{') out += ',';
    append_tensor(out, tensor);
  }
  out += '}';
  out.resize((out.size() + 7) / 8 * 8, ' ');
  const std::uint64_t length = out.size();
  if (length > kLongestHeader) {
    throw ArgumentError(str("The names and metadata of ", header.tensors.size(),
                            " tensors need a header of ", length, " bytes; safetensors allows ",
                            kLongestHeader, ". Write several files."));
  }
  std::string prefix;
  append_little(prefix, length);
  return prefix + out;
}

}  // namespace accelerate::detail::formats
