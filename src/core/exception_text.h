// src/core/exception_text.h - type and text of the exception being handled.
#pragma once

#include <string>
#include <string_view>

namespace accelerate::detail::inline core {

struct ExceptionText {
  std::string type;  ///< "accelerate::StateError"; "an unknown exception" for foreign ones
  /// what(), without the C++ stack that LibTorch appends, and with what to do where memory ran out
  /// or the exception has no text.
  std::string message;
  std::string stack;  ///< that stack, if there is one

  /// "accelerate::StateError: There is no ..."
  [[nodiscard]] std::string text() const;
};

/// Whether the text of an error says that memory ran out, on the CPU or an accelerator.
[[nodiscard]] bool tells_of_memory(std::string_view message);

/// Only inside a catch block.
[[nodiscard]] ExceptionText current_exception_text();

}  // namespace accelerate::detail::inline core
