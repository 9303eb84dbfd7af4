// src/formats/byte_source.h - bytes that are read by offset: a file, a part of one, or memory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "formats/mapped_file.h"

namespace accelerate::detail::formats {

class ByteSource {
 public:
  virtual ~ByteSource() = default;

  /// The file, for messages.
  [[nodiscard]] virtual const std::string& name() const = 0;
  [[nodiscard]] virtual std::uint64_t size() const = 0;
  /// Where the bytes begin in the file, for messages.
  [[nodiscard]] virtual std::uint64_t origin() const { return 0; }
  /// Fills `out` from `offset` on. The caller ensures that the range lies within `size()`. Throws
  /// `CheckpointError` if the file cannot be read or became shorter.
  virtual void read(std::uint64_t offset, std::span<char> out) const = 0;

  /// `size` bytes from `offset` on, as above.
  [[nodiscard]] std::string read(std::uint64_t offset, std::uint64_t size) const;
  /// Throws the `FormatError` for what is at an offset.
  [[noreturn]] void refuse(std::uint64_t offset, std::string_view reason) const;
};

/// A file of a checkpoint. Reading never touches its mapping: a file that shrinks meanwhile is an
/// error, not a signal.
class FileBytes final : public ByteSource {
 public:
  /// Throws `CheckpointError` if the file cannot be opened or is no regular file.
  explicit FileBytes(const std::filesystem::path& path);

  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] std::uint64_t size() const override {
    return static_cast<std::uint64_t>(file_->size());
  }
  void read(std::uint64_t offset, std::span<char> out) const override;
  using ByteSource::read;

  [[nodiscard]] const std::shared_ptr<const MappedFile>& file() const { return file_; }

 private:
  std::shared_ptr<const MappedFile> file_;
  std::string name_;
};

/// Memory that must outlive this object.
class MemoryBytes final : public ByteSource {
 public:
  MemoryBytes(std::string_view bytes, std::string name) : bytes_(bytes), name_(std::move(name)) {}

  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] std::uint64_t size() const override { return bytes_.size(); }
  void read(std::uint64_t offset, std::span<char> out) const override;
  using ByteSource::read;

 private:
  std::string_view bytes_;
  std::string name_;
};

/// A part of another source, which must outlive this object.
class PartBytes final : public ByteSource {
 public:
  /// The caller ensures that the range lies within `whole`.
  PartBytes(const ByteSource& whole, std::uint64_t offset, std::uint64_t size)
      : whole_(whole), offset_(offset), size_(size) {}

  [[nodiscard]] const std::string& name() const override { return whole_.name(); }
  [[nodiscard]] std::uint64_t size() const override { return size_; }
  [[nodiscard]] std::uint64_t origin() const override { return whole_.origin() + offset_; }
  void read(std::uint64_t offset, std::span<char> out) const override {
    whole_.read(offset_ + offset, out);
  }
  using ByteSource::read;

 private:
  const ByteSource& whole_;
  std::uint64_t offset_;
  std::uint64_t size_;
};

/// The files of a folder, each opened when it is first read; not too many at a time.
class OpenFiles {
 public:
  /// Valid until the next call.
  [[nodiscard]] const FileBytes& open(const std::filesystem::path& path);

 private:
  std::map<std::filesystem::path, std::unique_ptr<FileBytes>> files_;
};

}  // namespace accelerate::detail::formats
