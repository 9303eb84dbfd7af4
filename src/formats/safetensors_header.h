// src/formats/safetensors_header.h - the header of a safetensors file: which tensors, and where.
//
// A file is the length of the header (8 bytes, little-endian), the header (JSON) and the tensors'
// bytes, without gaps.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace accelerate::detail::formats {

class MappedFile;

/// In the order in which the writer sorts tensors, last first.
enum class Dtype : std::uint8_t {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};
inline constexpr int kDtypeCount = 22;

/// The reference refuses longer headers; the limit of names is ours.
inline constexpr std::uint64_t kLongestHeader = 100'000'000;
inline constexpr std::size_t kLongestName = std::size_t{64} * 1024;
/// The key that is no tensor.
inline constexpr std::string_view kMetadataKey = "__metadata__";

/// As in the header: "BF16". A static string.
[[nodiscard]] std::string_view to_string(Dtype dtype);
[[nodiscard]] std::optional<Dtype> find_dtype(std::string_view name);
[[nodiscard]] int bits_of(Dtype dtype);

/// The size of a tensor; nullopt if it, or a stride, does not fit into 64 bits.
[[nodiscard]] std::optional<std::int64_t> bit_size(Dtype dtype,
                                                   std::span<const std::int64_t> shape);

struct TensorEntry {
  std::string name;
  Dtype dtype = Dtype::kU8;
  std::vector<std::int64_t> shape = {};
  /// Its bytes, counted from the end of the header.
  std::int64_t begin = 0;
  std::int64_t end = 0;
  /// Where its name is in the file, for error messages.
  std::int64_t name_offset = 0;

  [[nodiscard]] std::int64_t bytes() const noexcept { return end - begin; }
};

struct SafetensorsHeader {
  using Metadata = std::map<std::string, std::string>;

  /// In the order of their bytes.
  std::vector<TensorEntry> tensors;
  /// The positions in `tensors`, by name.
  std::vector<std::uint32_t> by_name;
  /// Empty also if the file has none.
  Metadata metadata;
  /// Where the bytes of the tensors begin in the file.
  std::int64_t data_offset = 0;

  /// Fills `by_name` from `tensors`.
  void index();
  /// nullptr if there is no tensor of this name. Needs the index.
  [[nodiscard]] const TensorEntry* find(std::string_view name) const;
};

/// Reads and checks a header against the size of the file; no byte of a tensor is read. Throws
/// `FormatError` with the byte where the first rule is broken, for each of these: the file ends
/// early or goes on behind the last tensor; the header is longer than 100 MB, no UTF-8, no JSON or
/// has other fields than it should; a name is there twice; a dtype is unknown; sizes overflow or
/// differ from shape and dtype; tensors overlap or leave gaps.
[[nodiscard]] SafetensorsHeader read_safetensors_header(const MappedFile& file);
/// The same for a file in memory; `source` names it in messages.
[[nodiscard]] SafetensorsHeader read_safetensors_header(std::string_view file,
                                                        std::string_view source);

/// Puts tensors of which name, dtype and shape are given into the order of the reference writer
/// (dtype, then name) and gives them their places. Throws `ArgumentError` for a name that cannot
/// be written or is there twice.
[[nodiscard]] SafetensorsHeader plan_safetensors(std::vector<TensorEntry> tensors,
                                                 SafetensorsHeader::Metadata metadata);
/// The bytes in front of the tensors: length, JSON and padding to a multiple of 8.
[[nodiscard]] std::string safetensors_header_bytes(const SafetensorsHeader& header);

}  // namespace accelerate::detail::formats
