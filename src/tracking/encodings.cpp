#include "tracking/encodings.h"

#include <algorithm>
#include <array>

#include "accelerate/errors.h"
#include "core/python_text.h"
#include "core/text.h"
#include "formats/crc32.h"

namespace accelerate::detail::tracking {
namespace {

constexpr auto kCastagnoli = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0x82F63B78 : 0);
    table[i] = crc;
  }
  return table;
}();

/// Records may hold records; the mask keeps their checksums apart.
std::uint32_t masked_crc32c(std::string_view bytes) {
  return std::rotr(crc32c(bytes), 15) + 0xA282EAD8;
}

using Words = std::array<std::uint32_t, 8>;

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::array<std::uint32_t, 64> kRounds = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

void add_sha256_block(Words& state, const char* block) {
  std::array<std::uint32_t, 64> w{};
  for (std::size_t i = 0; i < 64; ++i) {
    w[i / 4] = w[i / 4] << 8 | static_cast<std::uint8_t>(block[i]);
  }
  for (std::size_t i = 16; i < 64; ++i) {
    const auto s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const auto s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  Words now = state;
  for (std::size_t i = 0; i < 64; ++i) {
    const auto [a, b, c, d, e, f, g, h] = now;
    const auto s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const auto s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const auto t = h + s1 + ((e & f) ^ (~e & g)) + kRounds[i] + w[i];
    now = {t + s0 + ((a & b) ^ (a & c) ^ (b & c)), a, b, c, d + t, e, f, g};
  }
  for (std::size_t i = 0; i < 8; ++i) state[i] += now[i];
}

void append_big(std::string& out, std::uint32_t number) {
  formats::append_little(out, __builtin_bswap32(number));
}

void append_chunk(std::string& out, std::string_view type, std::string_view data) {
  append_big(out, static_cast<std::uint32_t>(data.size()));
  out += type;
  out += data;
  append_big(out, formats::crc32(data, formats::crc32(type)));
}

/// A zlib stream of stored blocks, with its Adler-32.
std::string stored(std::string_view bytes) {
  constexpr std::size_t kLongestBlock = 65535;
  std::string out = "\x78\x01";
  std::uint32_t a = 1;
  std::uint32_t b = 0;
  for (std::size_t at = 0; at < bytes.size(); at += kLongestBlock) {
    const auto block = bytes.substr(at, kLongestBlock);
    out += static_cast<char>(at + block.size() == bytes.size());
    formats::append_little(out, static_cast<std::uint16_t>(block.size()));
    formats::append_little(out, static_cast<std::uint16_t>(~block.size()));
    out += block;
    for (const char byte : block) {
      a = (a + static_cast<std::uint8_t>(byte)) % 65521;
      b = (b + a) % 65521;
    }
  }
  append_big(out, b << 16 | a);
  return out;
}

}  // namespace

std::string valid_utf8(std::string_view text) {
  std::string valid;
  for (std::size_t at = 0; at < text.size();) {
    const auto point = next_code_point(text, at);
    append_utf8(valid, point.valid ? point.value : 0xFFFD);
    at += point.length;
  }
  return valid;
}

ProtoMessage& ProtoMessage::text(std::uint32_t field, std::string_view value) {
  return raw(field, valid_utf8(value));
}

std::uint32_t crc32c(std::string_view bytes) {
  std::uint32_t crc = ~0U;
  for (const char c : bytes)
    crc = crc >> 8 ^ kCastagnoli[(crc ^ static_cast<std::uint8_t>(c)) & 255];
  return ~crc;
}

std::string event_record(std::string_view bytes) {
  std::string record;
  formats::append_little(record, std::uint64_t{bytes.size()});
  formats::append_little(record, masked_crc32c(record));
  record += bytes;
  formats::append_little(record, masked_crc32c(bytes));
  return record;
}

std::string sha256_hex(std::string_view bytes) {
  Words state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::string message(bytes);
  message += '\x80';
  message.append((119 - bytes.size() % 64) % 64, '\0');
  const auto bits = std::uint64_t{bytes.size()} * 8;
  append_big(message, static_cast<std::uint32_t>(bits >> 32));
  append_big(message, static_cast<std::uint32_t>(bits));
  for (std::size_t at = 0; at < message.size(); at += 64) add_sha256_block(state, &message[at]);
  std::string hex;
  for (const auto word : state) append_hex(hex, word, 8);
  return hex;
}

void check_images(std::span<const TrackerImage> images, const std::string& name) {
  constexpr std::int64_t kLargest = 1 << 20;
  if (images.empty()) throw ArgumentError(str(name, ": there is no image."));
  for (const auto& image : images) {
    const auto [height, width, channels, pixels] =
        std::tie(image.height, image.width, image.channels, image.pixels);
    const bool plausible = height > 0 && width > 0 && height <= kLargest && width <= kLargest &&
                           (channels == 1 || channels == 3 || channels == 4);
    if (!plausible || std::ssize(pixels) != height * width * channels) {
      throw ArgumentError(str(name, ": an image of ", height, " x ", width, " pixels with ",
                              channels, " channels and ", pixels.size(),
                              " bytes. It needs 1, 3 or 4 channels, "
                              "and height * width * channels bytes."));
    }
    const auto& first = images.front();
    if (height != first.height || width != first.width || channels != first.channels) {
      throw ArgumentError(str(name, ": images of ", first.height, " x ", first.width, " and of ",
                              height, " x ", width,
                              " pixels, or of different channels. Log them "
                              "under different names."));
    }
  }
}

std::string encode_png(const TrackerImage& image) {
  std::string header;
  append_big(header, static_cast<std::uint32_t>(image.width));
  append_big(header, static_cast<std::uint32_t>(image.height));
  header += '\x08';  // bits per channel
  header += image.channels == 1 ? '\0' : image.channels == 3 ? '\2' : '\6';
  header.append(3, '\0');
  const auto row = static_cast<std::size_t>(image.width * image.channels);
  std::string rows;
  for (std::size_t at = 0; at < image.pixels.size(); at += row) {
    rows += '\0';  // no filter
    rows.append(image.pixels, at, row);
  }
  std::string out = "\x89PNG\r\n\x1a\n";
  append_chunk(out, "IHDR", header);
  append_chunk(out, "IDAT", stored(rows));
  append_chunk(out, "IEND", {});
  return out;
}

TrackerImage image_grid(std::span<const TrackerImage> images) {
  const auto& first = images.front();
  const auto count = std::ssize(images);
  const auto columns = std::min<std::int64_t>(8, count);
  TrackerImage grid{.height = (count + columns - 1) / columns * first.height,
                    .width = columns * first.width,
                    .channels = std::max<std::int64_t>(3, first.channels)};
  grid.pixels.reserve(static_cast<std::size_t>(grid.height * grid.width * grid.channels));
  for (std::int64_t y = 0; y < grid.height; ++y) {
    for (std::int64_t x = 0; x < grid.width; ++x) {
      const auto i = y / first.height * columns + x / first.width;
      const auto pixel = (y % first.height * first.width + x % first.width) * first.channels;
      for (std::int64_t c = 0; c < grid.channels; ++c) {
        const auto at = static_cast<std::size_t>(pixel + std::min(c, first.channels - 1));
        grid.pixels += i < count ? images[static_cast<std::size_t>(i)].pixels[at] : '\0';
      }
    }
  }
  return grid;
}

}  // namespace accelerate::detail::tracking
