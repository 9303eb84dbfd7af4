// src/tracking/encodings.h - the bytes of trackers' files: messages, records, images, checksums.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "accelerate/tracking.h"
#include "formats/little_endian.h"

namespace accelerate::detail::tracking {

/// The text with U+FFFD for bytes that are not UTF-8.
[[nodiscard]] std::string valid_utf8(std::string_view text);

/// A message of Protocol Buffers, written field by field; the caller leaves out defaults.
///
///     ProtoMessage().number(2, step).message(5, ProtoMessage().text(1, tag)).bytes()
class ProtoMessage {
 public:
  ProtoMessage& number(std::uint32_t field, std::int64_t value) {
    return key(field, 0).varint(static_cast<std::uint64_t>(value));
  }
  ProtoMessage& real(std::uint32_t field, double value) {
    key(field, 1);
    formats::append_little(bytes_, std::bit_cast<std::uint64_t>(value));
    return *this;
  }
  ProtoMessage& real32(std::uint32_t field, float value) {
    key(field, 5);
    formats::append_little(bytes_, std::bit_cast<std::uint32_t>(value));
    return *this;
  }
  /// A string, whose readers take UTF-8 only: other bytes become U+FFFD.
  ProtoMessage& text(std::uint32_t field, std::string_view value);
  ProtoMessage& raw(std::uint32_t field, std::string_view value) {
    key(field, 2).varint(value.size());
    bytes_ += value;
    return *this;
  }
  ProtoMessage& message(std::uint32_t field, const ProtoMessage& value) {
    return raw(field, value.bytes_);
  }
  /// Repeated doubles, packed.
  ProtoMessage& reals(std::uint32_t field, std::span<const double> values) {
    return raw(field, {reinterpret_cast<const char*>(values.data()), values.size_bytes()});
  }
  [[nodiscard]] const std::string& bytes() const noexcept { return bytes_; }

 private:
  ProtoMessage& key(std::uint32_t field, std::uint32_t wire) { return varint(field << 3 | wire); }
  ProtoMessage& varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>(value | 0x80);
    bytes_ += static_cast<char>(value);
    return *this;
  }

  std::string bytes_;
};

/// CRC-32C (Castagnoli).
[[nodiscard]] std::uint32_t crc32c(std::string_view bytes);
/// A record of TensorBoard's event files: length, its checksum, the bytes, their checksum.
[[nodiscard]] std::string event_record(std::string_view bytes);
/// SHA-256 as 64 lower-case hexadecimal digits.
[[nodiscard]] std::string sha256_hex(std::string_view bytes);

/// Throws `ArgumentError` that begins with `name` unless there are images, each has as many pixels
/// as it says, and all have one size and number of channels.
void check_images(std::span<const TrackerImage> images, const std::string& name);
/// A checked image as a PNG file. Pixels are stored as they are, not compressed.
[[nodiscard]] std::string encode_png(const TrackerImage& image);
/// Checked images side by side, eight in a row at most; gray ones as RGB.
[[nodiscard]] TrackerImage image_grid(std::span<const TrackerImage> images);

}  // namespace accelerate::detail::tracking
