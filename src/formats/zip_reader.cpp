#include <algorithm>
#include <optional>

#include "core/python_text.h"
#include "core/text.h"
#include "formats/crc32.h"
#include "formats/little_endian.h"
#include "formats/utf8.h"
#include "formats/zip.h"
#include "formats/zip_layout.h"

namespace accelerate::detail::formats {
namespace {

constexpr std::uint64_t kMaxEntries = 1'000'000;
constexpr std::size_t kMaxName = 4096;

/// Where the directory is and how many entries it has.
struct End {
  std::uint64_t count = 0;
  std::uint64_t size = 0;
  std::uint64_t offset = 0;
};

/// The zip64 record in front of the end record at `end_at`; nullopt if there is none.
std::optional<End> read_end64(const ByteSource& source, std::uint64_t end_at) {
  if (end_at < zip::kLocatorSize) return std::nullopt;
  const auto locator_at = end_at - zip::kLocatorSize;
  const auto locator = source.read(locator_at, zip::kLocatorSize);
  if (read_little<std::uint32_t>(locator, 0) != zip::kLocatorSignature) return std::nullopt;
  const auto at = read_little<std::uint64_t>(locator, 8);
  if (locator_at < zip::kEnd64Size || at != locator_at - zip::kEnd64Size) {
    source.refuse(locator_at, "the zip64 locator does not point to the record before it");
  }
  const auto record = source.read(at, zip::kEnd64Size);
  if (read_little<std::uint32_t>(record, 0) != zip::kEnd64Signature) {
    source.refuse(at, "the zip64 end record has no signature");
  }
  const auto count = read_little<std::uint64_t>(record, 32);
  if (read_little<std::uint64_t>(record, 24) != count) {
    source.refuse(at, "the archive is in several parts, which is not supported");
  }
  return End{.count = count,
             .size = read_little<std::uint64_t>(record, 40),
             .offset = read_little<std::uint64_t>(record, 48)};
}

/// `directory_end` gets the offset of the first byte behind the directory.
End read_end(const ByteSource& source, std::uint64_t& directory_end) {
  if (source.size() < zip::kEndSize) source.refuse(0, "the file is too short for a zip archive");
  const auto at = source.size() - zip::kEndSize;
  const auto record = source.read(at, zip::kEndSize);
  if (read_little<std::uint32_t>(record, 0) != zip::kEndSignature ||
      read_little<std::uint16_t>(record, 20) != 0) {
    source.refuse(at,
                  "the end of the zip archive is missing; the file is cut off or was appended to");
  }
  End end{.count = read_little<std::uint16_t>(record, 10),
          .size = read_little<std::uint32_t>(record, 12),
          .offset = read_little<std::uint32_t>(record, 16)};
  directory_end = at;
  if (const auto end64 = read_end64(source, at)) {
    const auto agrees = [](std::uint64_t small, std::uint64_t all, std::uint64_t marker) {
      return small == all || small == marker;
    };
    if (!agrees(end.count, end64->count, zip::kMax16) ||
        !agrees(end.size, end64->size, zip::kMax32) ||
        !agrees(end.offset, end64->offset, zip::kMax32)) {
      source.refuse(at, "the two end records of the zip archive contradict each other");
    }
    end = *end64;
    directory_end = at - zip::kLocatorSize - zip::kEnd64Size;
  }
  if (end.count > kMaxEntries) {
    source.refuse(
        at, str("the archive has ", end.count, " entries; at most ", kMaxEntries, " are read"));
  }
  if (end.size > directory_end || end.offset != directory_end - end.size ||
      end.size < end.count * zip::kCentralSize) {
    source.refuse(at, str("the directory of ", end.count, " entries at byte ", end.offset, " with ",
                          end.size, " bytes does not fit into the file"));
  }
  return end;
}

/// Throws unless the name could be unpacked safely: relative, inside its folder, plain text.
void check_name(const ByteSource& source, std::uint64_t at, std::string_view name) {
  if (name.empty() || name.size() > kMaxName) {
    source.refuse(
        at, str("an entry has a name of ", name.size(), " bytes; 1 to ", kMaxName, " are allowed"));
  }
  if (!is_utf8(name) || name.find('\0') != name.npos) {
    source.refuse(at, str("the entry ", python_repr(name), " has a name that is not UTF-8 text"));
  }
  const bool drive = name.size() >= 2 && name[1] == ':';
  if (name.front() == '/' || drive || name.find('\\') != name.npos) {
    source.refuse(at, str("the entry ", python_repr(name), " has an absolute name"));
  }
  for (const auto& part : split(name, '/')) {
    if (part == "..") source.refuse(at, str("the entry ", python_repr(name), " leaves its folder"));
  }
}

/// The sizes and offset of one record, with those of its zip64 extra field.
struct Numbers {
  std::uint64_t size = 0;
  std::uint64_t stored = 0;
  std::uint64_t header = 0;
};

/// Replaces numbers that are only markers by those of the extra field.
void apply_zip64(const ByteSource& source, std::uint64_t at, std::string_view extra,
                 Numbers& numbers) {
  std::vector<std::uint64_t*> wanted;
  for (auto* number : {&numbers.size, &numbers.stored, &numbers.header}) {
    if (*number == zip::kMax32) wanted.push_back(number);
  }
  for (std::size_t i = 0; i + 4 <= extra.size();) {
    const auto id = read_little<std::uint16_t>(extra, i);
    const std::size_t size = read_little<std::uint16_t>(extra, i + 2);
    i += 4;
    if (size > extra.size() - i) source.refuse(at, "an extra field is longer than its record");
    if (id == zip::kZip64Extra && !wanted.empty()) {
      if (size < 8 * wanted.size()) source.refuse(at, "a zip64 extra field is too short");
      for (std::size_t n = 0; n < wanted.size(); ++n) {
        *wanted[n] = read_little<std::uint64_t>(extra, i + 8 * n);
      }
      wanted.clear();
    }
    i += size;
  }
}

/// What must be equal in both headers of an entry, and where the entry lies.
struct Record {
  ZipEntry entry;
  std::uint16_t method = 0;
  std::uint64_t header = 0;
};

/// Reads the record of the directory at `at`; moves `at` behind it.
Record read_record(const ByteSource& source, std::string_view directory, std::uint64_t origin,
                   std::size_t& at) {
  const auto where = origin + at;
  if (directory.size() - at < zip::kCentralSize ||
      read_little<std::uint32_t>(directory, at) != zip::kCentralSignature) {
    source.refuse(where, "the directory has fewer entries than announced");
  }
  const std::size_t name_size = read_little<std::uint16_t>(directory, at + 28);
  const std::size_t extra_size = read_little<std::uint16_t>(directory, at + 30);
  const std::size_t comment_size = read_little<std::uint16_t>(directory, at + 32);
  if (directory.size() - at - zip::kCentralSize < name_size + extra_size + comment_size) {
    source.refuse(where, "an entry is longer than the directory");
  }
  Record record;
  record.entry.name = directory.substr(at + zip::kCentralSize, name_size);
  check_name(source, where, record.entry.name);
  record.method = read_little<std::uint16_t>(directory, at + 10);
  record.entry.crc = read_little<std::uint32_t>(directory, at + 16);
  Numbers numbers{.size = read_little<std::uint32_t>(directory, at + 24),
                  .stored = read_little<std::uint32_t>(directory, at + 20),
                  .header = read_little<std::uint32_t>(directory, at + 42)};
  apply_zip64(source, where, directory.substr(at + zip::kCentralSize + name_size, extra_size),
              numbers);
  if ((read_little<std::uint16_t>(directory, at + 8) & zip::kEncrypted) != 0) {
    source.refuse(where, str("the entry ", python_repr(record.entry.name), " is encrypted"));
  }
  if (record.method != zip::kStored || numbers.size != numbers.stored) {
    source.refuse(
        where,
        str("the entry ", python_repr(record.entry.name), " is compressed (method ", record.method,
            "); torch.save stores entries as they are. Unpack the archive and save it again with "
            "torch.save"));
  }
  record.entry.size = numbers.size;
  record.header = numbers.header;
  at += zip::kCentralSize + name_size + extra_size + comment_size;
  return record;
}

/// Compares the header in front of the data with the directory, and finds the data.
void read_local(const ByteSource& source, Record& record, std::uint64_t directory) {
  const auto& name = record.entry.name;
  const auto at = record.header;
  const auto room = zip::kLocalSize + name.size();
  if (at > directory || directory - at < room) {
    source.refuse(directory, str("the entry ", python_repr(name), " lies outside the file"));
  }
  const auto header = source.read(at, room);
  if (read_little<std::uint32_t>(header, 0) != zip::kLocalSignature) {
    source.refuse(at, str("the entry ", python_repr(name), " has no header"));
  }
  if (read_little<std::uint16_t>(header, 26) != name.size() ||
      std::string_view(header).substr(zip::kLocalSize) != name) {
    source.refuse(at, str("the entry ", python_repr(name), " has another name in its own header"));
  }
  if (read_little<std::uint16_t>(header, 8) != record.method) {
    source.refuse(
        at, str("the entry ", python_repr(name), " is compressed according to its own header"));
  }
  const std::uint64_t extra_size = read_little<std::uint16_t>(header, 28);
  const auto data = at + room + extra_size;
  if (data > directory || directory - data < record.entry.size) {
    source.refuse(at, str("the entry ", python_repr(name), " of ", record.entry.size,
                          " bytes reaches beyond the data of the file"));
  }
  const auto flags = read_little<std::uint16_t>(header, 6);
  if ((flags & zip::kHasDescriptor) == 0) {
    Numbers numbers{.size = read_little<std::uint32_t>(header, 22),
                    .stored = read_little<std::uint32_t>(header, 18)};
    apply_zip64(source, at, source.read(at + room, extra_size), numbers);
    if (numbers.size != record.entry.size || numbers.stored != record.entry.size ||
        read_little<std::uint32_t>(header, 14) != record.entry.crc) {
      source.refuse(at, str("the entry ", python_repr(name),
                            " has another size or checksum in its own header"));
    }
  }
  record.entry.offset = data;
}

void check_overlaps(const ByteSource& source, const std::vector<Record>& records) {
  std::vector<const Record*> order;
  order.reserve(records.size());
  for (const auto& record : records) order.push_back(&record);
  std::ranges::sort(order, {}, &Record::header);
  for (std::size_t i = 1; i < order.size(); ++i) {
    const auto& before = order[i - 1]->entry;
    if (order[i]->header >= before.offset + before.size) continue;
    source.refuse(order[i]->header, str("the entries ", python_repr(before.name), " and ",
                                        python_repr(order[i]->entry.name), " overlap"));
  }
}

}  // namespace

ZipDirectory::ZipDirectory(std::vector<ZipEntry> entries) : entries_(std::move(entries)) {
  index_.reserve(entries_.size());
  for (std::size_t i = 0; i < entries_.size(); ++i) index_.emplace(entries_[i].name, i);
}

const ZipEntry* ZipDirectory::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &entries_[found->second];
}

bool is_zip(const ByteSource& source) {
  return source.size() >= 4 && source.read(0, 4) == std::string_view("PK\x03\x04", 4);
}

ZipDirectory read_zip(const ByteSource& source) {
  std::uint64_t directory_end = 0;
  const End end = read_end(source, directory_end);
  const auto directory = source.read(end.offset, end.size);
  std::vector<Record> records;
  records.reserve(end.count);
  std::size_t at = 0;
  for (std::uint64_t i = 0; i < end.count; ++i) {
    records.push_back(read_record(source, directory, end.offset, at));
    read_local(source, records.back(), end.offset);
  }
  if (at != directory.size()) {
    source.refuse(end.offset + at, "the directory has more entries than announced");
  }
  check_overlaps(source, records);
  std::vector<ZipEntry> entries;
  entries.reserve(records.size());
  for (auto& record : records) entries.push_back(std::move(record.entry));
  ZipDirectory result(std::move(entries));
  for (std::size_t i = 0; i < result.entries().size(); ++i) {
    const auto& entry = result.entries()[i];
    if (result.find(entry.name) == &entry) continue;
    source.refuse(end.offset, str("the entry ", python_repr(entry.name), " is there twice"));
  }
  return result;
}

void check_crc(const ByteSource& source, const ZipEntry& entry) {
  constexpr std::uint64_t kPiece = std::uint64_t{1} << 20;
  std::string piece(std::min(kPiece, entry.size), '\0');
  std::uint32_t crc = 0;
  for (std::uint64_t done = 0; done < entry.size; done += piece.size()) {
    piece.resize(std::min(kPiece, entry.size - done));
    source.read(entry.offset + done, piece);
    crc = crc32(piece, crc);
  }
  if (crc == entry.crc) return;
  source.refuse(entry.offset, str("the checksum of the entry ", python_repr(entry.name),
                                  " is wrong: the file was damaged"));
}

}  // namespace accelerate::detail::formats
