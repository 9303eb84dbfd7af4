// src/core/exception_text.h - type and text of the exception being handled.
#pragma once

#include <string>

namespace accelerate::detail::inline core {

struct ExceptionText {
  std::string type;     ///< "accelerate::StateError"; "an unknown exception" for foreign ones
  std::string message;  ///< what(), without the C++ stack that LibTorch appends
  std::string stack;    ///< that stack, if there is one

  /// "accelerate::StateError: There is no ..."
  [[nodiscard]] std::string text() const;
};

/// Only inside a catch block.
[[nodiscard]] ExceptionText current_exception_text();

}  // namespace accelerate::detail::inline core
