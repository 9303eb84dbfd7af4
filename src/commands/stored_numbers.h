// src/commands/stored_numbers.h - elements of stored tensors as numbers.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "commands/checkpoint_content.h"
#include "formats/mapped_file.h"

namespace accelerate::detail::commands {

struct NumberType {
  /// Torch's name.
  std::string_view dtype;
  double (*load)(const std::byte*);
  /// As Python prints it: "3", "0.5".
  std::string (*show)(const std::byte*);

  [[nodiscard]] bool is_float() const { return dtype.find("float") != std::string_view::npos; }
};

/// The dtype by Torch's name, also if it is in the words of safetensors.
[[nodiscard]] std::string_view torch_name(std::string_view dtype);
/// Null for types that are no numbers. `dtype` in the words of either format.
[[nodiscard]] const NumberType* find_number_type(std::string_view dtype);
/// The value of a tensor with one element; "" for others and for types that are no numbers.
[[nodiscard]] std::string scalar_text(const formats::MappedFile& file, const StoredTensor& tensor);

}  // namespace accelerate::detail::commands
