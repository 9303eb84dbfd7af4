// tests/tracking/proto_reader.h - reads what trackers write: messages, records of event files.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "formats/little_endian.h"
#include "tracking/encodings.h"

namespace accelerate::test {

[[nodiscard]] inline std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

[[nodiscard]] inline std::vector<std::string> file_lines(const std::filesystem::path& path) {
  std::istringstream text(content_of(path));
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

/// A message: each field with its values in order. Numbers and reals are their 64 bits.
struct ProtoReader {
  std::map<std::uint32_t, std::vector<std::uint64_t>> numbers;
  std::map<std::uint32_t, std::vector<std::string>> texts;

  explicit ProtoReader(std::string_view bytes) {
    const auto varint = [&] {
      std::uint64_t value = 0;
      for (int shift = 0; !bytes.empty(); shift += 7) {
        const auto byte = static_cast<std::uint8_t>(bytes.front());
        bytes.remove_prefix(1);
        value |= std::uint64_t{byte & 0x7FU} << shift;
        if (byte < 0x80) break;
      }
      return value;
    };
    while (!bytes.empty()) {
      const auto key = varint();
      const auto field = static_cast<std::uint32_t>(key >> 3);
      if ((key & 7) == 0) {
        numbers[field].push_back(varint());
      } else if ((key & 7) == 2) {
        const auto size = varint();
        texts[field].emplace_back(bytes.substr(0, size));
        bytes.remove_prefix(size);
      } else {
        const std::size_t size = (key & 7) == 1 ? 8 : 4;
        numbers[field].push_back(size == 8 ? formats_read<std::uint64_t>(bytes)
                                           : formats_read<std::uint32_t>(bytes));
        bytes.remove_prefix(size);
      }
    }
  }

  [[nodiscard]] std::string text(std::uint32_t field) const {
    return texts.contains(field) ? texts.at(field).at(0) : std::string();
  }
  [[nodiscard]] ProtoReader message(std::uint32_t field, std::size_t index = 0) const {
    return ProtoReader(texts.at(field).at(index));
  }
  [[nodiscard]] std::uint64_t number(std::uint32_t field) const {
    return numbers.contains(field) ? numbers.at(field).at(0) : 0;
  }
  [[nodiscard]] double real(std::uint32_t field) const {
    return std::bit_cast<double>(number(field));
  }
  [[nodiscard]] float real32(std::uint32_t field) const {
    return std::bit_cast<float>(static_cast<std::uint32_t>(number(field)));
  }

 private:
  template <class T>
  static T formats_read(std::string_view bytes) {
    return detail::formats::read_little<T>(bytes, 0);
  }
};

/// The events of a file, whose checksums must be right.
[[nodiscard]] inline std::vector<std::string> event_bytes(const std::filesystem::path& path) {
  const auto file = content_of(path);
  std::vector<std::string> events;
  for (std::size_t at = 0; at < file.size();) {
    const auto size = detail::formats::read_little<std::uint64_t>(file, at);
    events.push_back(file.substr(at + 12, size));
    const auto record = detail::tracking::event_record(events.back());
    EXPECT_EQ(file.substr(at, size + 16), record);
    at += record.size();
  }
  return events;
}

/// The one event file in a folder.
[[nodiscard]] inline std::filesystem::path event_file(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().filename().string().starts_with("events.out.tfevents.")) {
      files.push_back(entry.path());
    }
  }
  EXPECT_EQ(files.size(), 1U) << folder;
  return files.empty() ? "none" : files[0];
}

}  // namespace accelerate::test
