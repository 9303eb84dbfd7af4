// src/commands/checkpoint_content.h - the tensors and values in a file of a checkpoint.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "formats/mapped_file.h"

namespace accelerate::detail::commands {

struct StoredTensor {
  std::string name = {};
  /// In the words of its format: "BF16" or "bfloat16".
  std::string dtype = {};
  std::vector<std::int64_t> shape = {};
  /// In elements. Empty if the elements are contiguous.
  std::vector<std::int64_t> strides = {};
  /// Of its first element in the file.
  std::int64_t offset = 0;
  /// 0 if the elements are not contiguous.
  std::int64_t bytes = 0;
};

/// A value that is no tensor, as Python prints it. A list of plain values is one value.
struct StoredValue {
  std::string name = {};
  std::string text = {};
};

struct FileContent {
  std::string format = {};
  std::map<std::string, std::string> metadata = {};
  /// Named by the keys and indices that lead to them.
  std::vector<StoredTensor> tensors = {};
  std::vector<StoredValue> values = {};
  /// Of all tensors.
  std::int64_t bytes = 0;

  /// "torch archive, 3 tensors, 21 bytes", with the number of values if there are any.
  [[nodiscard]] std::string summary() const;
};

/// True if the first bytes are those of a safetensors file or of a torch archive.
[[nodiscard]] bool has_tensors(const formats::MappedFile& file);

/// Reads the header of a safetensors file or the pickle of a torch archive, told apart by their
/// bytes, because names of files may say anything. Nothing is executed. Throws `FormatError` for
/// other files and for names that are too long to be shown.
[[nodiscard]] FileContent read_content(const formats::MappedFile& file);

/// Throws `FormatError` for the file as a whole.
[[noreturn]] void refuse_content(const formats::MappedFile& file, std::string_view reason);

}  // namespace accelerate::detail::commands
