#include <algorithm>
#include <initializer_list>

#include "accelerate/errors.h"
#include "formats/crc32.h"
#include "formats/little_endian.h"
#include "formats/zip.h"
#include "formats/zip_layout.h"

namespace accelerate::detail::formats {
namespace {

constexpr std::uint64_t kAlignment = 64;
// Checksum and size follow the data; names are UTF-8.
constexpr std::uint16_t kFlags = zip::kHasDescriptor | 0x0800;
// What other programs may have here.
constexpr std::uint16_t kMadeBy = 0;
constexpr std::uint32_t kTimeAndDate = 0;
constexpr std::uint16_t kNoComment = 0;

std::uint32_t low(std::uint64_t number) {
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(number, zip::kMax32));
}

void append_zip64(std::string& out, std::initializer_list<std::uint64_t> numbers) {
  append_little(out, zip::kZip64Extra, static_cast<std::uint16_t>(8 * numbers.size()));
  for (const auto number : numbers) append_little(out, number);
}

// The extra field that moves the data to a multiple of 64: id "FB", filled with Z.
void append_padding(std::string& out, std::uint64_t data_at) {
  const std::uint64_t begin = data_at + 4;
  const auto fill = static_cast<std::uint16_t>((kAlignment - begin % kAlignment) % kAlignment);
  out.append("FB");
  append_little(out, fill);
  out.append(fill, 'Z');
}

/// What the directory says about an entry.
std::string central_record(std::string_view name, std::uint64_t header, std::uint64_t size,
                           std::uint32_t crc) {
  std::string extra;
  if (size >= zip::kMax32 && header >= zip::kMax32) {
    append_zip64(extra, {size, size, header});
  } else if (size >= zip::kMax32) {
    append_zip64(extra, {size, size});
  } else if (header >= zip::kMax32) {
    append_zip64(extra, {header});
  }
  std::string record;
  append_little(record, zip::kCentralSignature, kMadeBy,
                extra.empty() ? zip::kVersion : zip::kVersion64, kFlags, zip::kStored, kTimeAndDate,
                crc, low(size), low(size), static_cast<std::uint16_t>(name.size()),
                static_cast<std::uint16_t>(extra.size()));
  record.append(10, '\0');  // comment, disk, attributes
  append_little(record, low(header));
  record += name;
  return record + extra;
}

/// The records behind the directory, which lies in [`begin`, `end`).
std::string end_records(std::uint64_t count, std::uint64_t begin, std::uint64_t end) {
  std::string record;
  constexpr std::uint32_t kFirstDisk = 0;
  constexpr std::uint32_t kDisks = 1;
  append_little(record, zip::kEnd64Signature, std::uint64_t{zip::kEnd64Size - 12}, zip::kVersion64,
                zip::kVersion64, kFirstDisk, kFirstDisk, count, count, end - begin, begin);
  append_little(record, zip::kLocatorSignature, kFirstDisk, end, kDisks);
  const auto short_count = static_cast<std::uint16_t>(std::min<std::uint64_t>(count, zip::kMax16));
  append_little(record, zip::kEndSignature, kFirstDisk, short_count, short_count, low(end - begin),
                low(begin), kNoComment);
  return record;
}

}  // namespace

void ZipWriter::put(std::string_view bytes) {
  write_(bytes);
  position_ += bytes.size();
}

void ZipWriter::add(std::string_view name, std::string_view bytes) {
  begin(name, bytes.size());
  append(bytes);
  end();
}

void ZipWriter::begin(std::string_view name, std::uint64_t size) {
  std::string extra;
  const bool large = size >= zip::kMax32;
  if (large) append_zip64(extra, {size, size});
  append_padding(extra, position_ + zip::kLocalSize + name.size() + extra.size());

  std::string header;
  const std::uint32_t checksum = 0;  // follows the data, as the size does
  const std::uint32_t short_size = large ? zip::kMax32 : 0;
  append_little(header, zip::kLocalSignature, large ? zip::kVersion64 : zip::kVersion, kFlags,
                zip::kStored, kTimeAndDate, checksum, short_size, short_size,
                static_cast<std::uint16_t>(name.size()), static_cast<std::uint16_t>(extra.size()));
  header += name;
  header += extra;
  written_.push_back({.name = std::string(name), .header = position_, .size = size});
  left_ = size;
  put(header);
}

void ZipWriter::append(std::string_view bytes) {
  if (bytes.size() > left_) throw StateError("A zip entry got more bytes than were announced.");
  auto& entry = written_.back();
  entry.crc = crc32(bytes, entry.crc);
  left_ -= bytes.size();
  put(bytes);
}

void ZipWriter::end() {
  if (left_ > 0) throw StateError("A zip entry got fewer bytes than were announced.");
  const auto& entry = written_.back();
  std::string descriptor;
  append_little(descriptor, zip::kDescriptorSignature, entry.crc);
  if (entry.size >= zip::kMax32) {
    append_little(descriptor, entry.size, entry.size);
  } else {
    append_little(descriptor, low(entry.size), low(entry.size));
  }
  put(descriptor);
}

std::uint64_t ZipWriter::fingerprint() const {
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  const auto mix = [&hash](std::uint64_t number) { hash = (hash ^ number) * 0x100000001b3; };
  for (const auto& entry : written_) {
    for (const char letter : entry.name) mix(static_cast<unsigned char>(letter));
    mix(entry.crc);
  }
  return hash;
}

void ZipWriter::finish() {
  const std::uint64_t directory = position_;
  for (const auto& entry : written_) {
    put(central_record(entry.name, entry.header, entry.size, entry.crc));
  }
  put(end_records(written_.size(), directory, position_));
}

}  // namespace accelerate::detail::formats
