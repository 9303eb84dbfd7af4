// Zip files: what is written is read, and each way an archive can be wrong has its own error.
#include "formats/zip.h"

#include <gtest/gtest.h>

#include "accelerate/errors.h"
#include "formats/crc32.h"
#include "formats/little_endian.h"
#include "support/message_of.h"

namespace accelerate::detail::formats {
namespace {

using test::message_of;

std::string zip_of(const std::vector<std::pair<std::string, std::string>>& entries) {
  std::string out;
  ZipWriter zip([&](std::string_view bytes) { out += bytes; });
  for (const auto& [name, bytes] : entries) zip.add(name, bytes);
  zip.finish();
  return out;
}

/// Two entries: "a/x" with "hello" at byte 64, "a/y" with "world!" at byte 192.
std::string two_entries() { return zip_of({{"a/x", "hello"}, {"a/y", "world!"}}); }

/// The place of the n-th record of the directory.
std::size_t record(const std::string& zip, int n) {
  std::size_t at = zip.find("PK\x01\x02");
  for (; n > 0; --n) at = zip.find("PK\x01\x02", at + 1);
  return at;
}

template <class T>
std::string patched(std::string zip, std::size_t at, T number) {
  std::memcpy(zip.data() + at, &number, sizeof(T));
  return zip;
}

std::string error_of(const std::string& zip) {
  return message_of<FormatError>([&] { (void)read_zip(MemoryBytes(zip, "z")); });
}

TEST(Crc32, IsThatOfZip) {
  EXPECT_EQ(crc32("123456789"), 0xCBF43926U);
  EXPECT_EQ(crc32("56789", crc32("1234")), 0xCBF43926U);
  // Short pieces and long ones go different ways.
  std::string text(1000, 'a');
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * i / 7);
  std::uint32_t byte_by_byte = 0;
  for (const char byte : text) byte_by_byte = crc32({&byte, 1}, byte_by_byte);
  EXPECT_EQ(byte_by_byte, 0x8957566BU);
  for (std::size_t cut = 0; cut <= text.size(); cut += 37) {
    EXPECT_EQ(crc32(std::string_view(text).substr(cut), crc32(text.substr(0, cut))), byte_by_byte);
  }
}

TEST(Zip, ReadsWhatWasWritten) {
  const auto zip = two_entries();
  const MemoryBytes source(zip, "z");
  const auto directory = read_zip(source);
  ASSERT_EQ(directory.entries().size(), 2U);
  EXPECT_EQ(directory.entries()[0].name, "a/x");
  const auto* entry = directory.find("a/y");
  ASSERT_NE(entry, nullptr);
  EXPECT_EQ(source.read(entry->offset, entry->size), "world!");
  EXPECT_EQ(entry->offset % 64, 0U);
  EXPECT_EQ(directory.find("a/z"), nullptr);
  check_crc(source, *entry);
}

TEST(Zip, TakesEntriesInPieces) {
  std::string out;
  ZipWriter zip([&](std::string_view bytes) { out += bytes; });
  zip.begin("a", 4);
  zip.append("ab");
  zip.append("cd");
  zip.end();
  zip.finish();
  EXPECT_EQ(out, zip_of({{"a", "abcd"}}));
  EXPECT_EQ(message_of<StateError>([&] { zip.append("e"); }),
            "A zip entry got more bytes than were announced.");
}

// A file of over 4 GiB in little memory: zeros are counted, not kept.
class SparseFile final : public ByteSource {
 public:
  void write(std::string_view bytes) {
    pieces_.emplace_back(size_, bytes.size() < 4096 ? std::string(bytes) : "");
    size_ += bytes.size();
  }
  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] std::uint64_t size() const override { return size_; }
  void read(std::uint64_t offset, std::span<char> out) const override {
    std::ranges::fill(out, '\0');
    for (const auto& [at, bytes] : pieces_) {
      for (std::size_t i = 0; i < bytes.size(); ++i) {
        if (at + i >= offset && at + i - offset < out.size()) out[at + i - offset] = bytes[i];
      }
    }
  }
  using ByteSource::read;

 private:
  std::string name_ = "large";
  std::uint64_t size_ = 0;
  std::vector<std::pair<std::uint64_t, std::string>> pieces_;
};

TEST(Zip, WritesAndReadsEntriesBeyondFourGiB) {
  SparseFile file;
  ZipWriter zip([&](std::string_view bytes) { file.write(bytes); });
  const std::string zeros(std::size_t{64} << 20, '\0');
  const std::uint64_t size = std::uint64_t{65} * zeros.size();
  zip.begin("a/large", size);
  for (int i = 0; i < 65; ++i) zip.append(zeros);
  zip.end();
  zip.add("a/behind", "hello");
  zip.finish();
  const auto directory = read_zip(file);
  EXPECT_EQ(directory.find("a/large")->size, size);
  const auto* behind = directory.find("a/behind");
  EXPECT_GT(behind->offset, size);
  EXPECT_EQ(behind->offset % 64, 0U);
  EXPECT_EQ(file.read(behind->offset, behind->size), "hello");
}

TEST(Zip, RefusesAFileThatIsCutOffAtAnyByte) {
  const auto zip = two_entries();
  for (std::size_t size = 0; size < zip.size(); ++size) {
    EXPECT_NE(error_of(zip.substr(0, size)), "nothing was thrown") << size;
  }
  EXPECT_EQ(error_of(zip.substr(0, 10)), "'z', byte 0: the file is too short for a zip archive.");
  EXPECT_EQ(error_of(zip.substr(0, zip.size() - 1)),
            "'z', byte 323: the end of the zip archive is missing; the file is cut off or was "
            "appended to.");
  EXPECT_EQ(error_of(zip + "x"),
            "'z', byte 325: the end of the zip archive is missing; the file is cut off or was "
            "appended to.");
}

TEST(Zip, RefusesNamesThatWouldLeaveTheirFolder) {
  EXPECT_EQ(error_of(zip_of({{"a/../../etc/passwd", "x"}})),
            "'z', byte 81: the entry 'a/../../etc/passwd' leaves its folder.");
  EXPECT_EQ(error_of(zip_of({{"/etc/passwd", "x"}})),
            "'z', byte 81: the entry '/etc/passwd' has an absolute name.");
  EXPECT_EQ(error_of(zip_of({{"a\\..\\b", "x"}})),
            "'z', byte 81: the entry 'a\\\\..\\\\b' has an absolute name.");
  EXPECT_EQ(error_of(zip_of({{"c:x", "x"}})),
            "'z', byte 81: the entry 'c:x' has an absolute name.");
  EXPECT_EQ(error_of(zip_of({{"a\xff", "x"}})),
            "'z', byte 81: the entry 'a\\udcff' has a name that is not UTF-8 text.");
  EXPECT_EQ(error_of(zip_of({{std::string("a\0b", 3), "x"}})),
            "'z', byte 81: the entry 'a\\x00b' has a name that is not UTF-8 text.");
  EXPECT_EQ(error_of(zip_of({{"", "x"}})),
            "'z', byte 81: an entry has a name of 0 bytes; 1 to 4096 are allowed.");
}

TEST(Zip, RefusesTheSameNameTwice) {
  EXPECT_EQ(error_of(zip_of({{"a", "1"}, {"a", "2"}})),
            "'z', byte 145: the entry 'a' is there twice.");
}

TEST(Zip, RefusesEntriesThatOverlap) {
  // Both records of the directory point to the second entry, which has the name of the first.
  auto zip = zip_of({{"b", "hello"}, {"a", "world"}});
  const auto header = read_little<std::uint32_t>(zip, record(zip, 1) + 42);
  zip = patched(zip, record(zip, 0) + 42, header);
  zip[header + 30] = 'b';
  zip[record(zip, 1) + 46] = 'b';
  EXPECT_EQ(error_of(zip), "'z', byte 85: the entries 'b' and 'b' overlap.");
}

TEST(Zip, RefusesCompressedAndEncryptedEntries) {
  const auto zip = two_entries();
  EXPECT_EQ(error_of(patched(zip, record(zip, 0) + 10, std::uint16_t{8})),
            "'z', byte 150: the entry 'a/x' is compressed (method 8); torch.save stores entries as "
            "they are. Unpack the archive and save it again with torch.save.");
  // A bomb: a few bytes that would become gigabytes.
  EXPECT_EQ(error_of(patched(zip, record(zip, 0) + 24, std::uint32_t{0x7FFFFFFF})),
            "'z', byte 150: the entry 'a/x' is compressed (method 0); torch.save stores entries as "
            "they are. Unpack the archive and save it again with torch.save.");
  EXPECT_EQ(error_of(patched(zip, 8, std::uint16_t{8})),
            "'z', byte 0: the entry 'a/x' is compressed according to its own header.");
  EXPECT_EQ(error_of(patched(zip, record(zip, 0) + 8, std::uint16_t{1})),
            "'z', byte 150: the entry 'a/x' is encrypted.");
}

TEST(Zip, RefusesSizesBeyondTheFile) {
  auto zip = two_entries();
  zip = patched(zip, record(zip, 0) + 20, std::uint32_t{0x7FFFFFFF});
  zip = patched(zip, record(zip, 0) + 24, std::uint32_t{0x7FFFFFFF});
  EXPECT_EQ(
      error_of(zip),
      "'z', byte 0: the entry 'a/x' of 2147483647 bytes reaches beyond the data of the file.");
  EXPECT_EQ(error_of(patched(two_entries(), record(zip, 0) + 42, std::uint32_t{0x7FFFFFFF})),
            "'z', byte 150: the entry 'a/x' lies outside the file.");
}

TEST(Zip, RefusesHeadersThatContradictTheDirectory) {
  const auto zip = two_entries();
  auto renamed = zip;
  renamed[30] = 'b';
  EXPECT_EQ(error_of(renamed), "'z', byte 0: the entry 'a/x' has another name in its own header.");
  EXPECT_EQ(error_of(patched(zip, 0, std::uint32_t{0})),
            "'z', byte 0: the entry 'a/x' has no header.");
  EXPECT_EQ(error_of(patched(zip, 6, std::uint16_t{0})),
            "'z', byte 0: the entry 'a/x' has another size or checksum in its own header.");
}

TEST(Zip, RefusesADirectoryThatDoesNotFit) {
  const auto zip = two_entries();
  const auto end = zip.size() - 22;
  const auto end64 = end - 20 - 56;
  EXPECT_EQ(error_of(patched(zip, end + 10, std::uint16_t{3})),
            "'z', byte 324: the two end records of the zip archive contradict each other.");
  auto many = patched(zip, end + 10, std::uint16_t{0xFFFF});
  many = patched(many, end64 + 24, std::uint64_t{1'000'001});
  many = patched(many, end64 + 32, std::uint64_t{1'000'001});
  EXPECT_EQ(error_of(many),
            "'z', byte 324: the archive has 1000001 entries; at most 1000000 are read.");
  auto more = patched(zip, end + 10, std::uint16_t{0xFFFF});
  more = patched(more, end64 + 24, std::uint64_t{3});
  more = patched(more, end64 + 32, std::uint64_t{3});
  EXPECT_EQ(error_of(more),
            "'z', byte 324: the directory of 3 entries at byte 150 with 98 bytes does not fit into "
            "the file.");
  auto fewer = patched(zip, end + 10, std::uint16_t{0xFFFF});
  fewer = patched(fewer, end64 + 24, std::uint64_t{1});
  fewer = patched(fewer, end64 + 32, std::uint64_t{1});
  EXPECT_EQ(error_of(fewer), "'z', byte 199: the directory has more entries than announced.");
  EXPECT_EQ(error_of(patched(zip, end64 + 24, std::uint64_t{1})),
            "'z', byte 248: the archive is in several parts, which is not supported.");
  EXPECT_EQ(error_of(patched(zip, end64, std::uint32_t{0})),
            "'z', byte 248: the zip64 end record has no signature.");
  EXPECT_EQ(error_of(patched(zip, end64 + 56 + 8, std::uint64_t{7})),
            "'z', byte 304: the zip64 locator does not point to the record before it.");
  EXPECT_EQ(error_of(patched(zip, record(zip, 1), std::uint32_t{0})),
            "'z', byte 199: the directory has fewer entries than announced.");
  EXPECT_EQ(error_of(patched(zip, record(zip, 1) + 28, std::uint16_t{9})),
            "'z', byte 199: an entry is longer than the directory.");
}

TEST(Zip, ComparesChecksums) {
  auto zip = two_entries();
  zip[64] = 'j';
  const MemoryBytes source(zip, "z");
  const auto directory = read_zip(source);
  EXPECT_EQ(message_of<FormatError>([&] { check_crc(source, directory.entries()[0]); }),
            "'z', byte 64: the checksum of the entry 'a/x' is wrong: the file was damaged.");
}

}  // namespace
}  // namespace accelerate::detail::formats
