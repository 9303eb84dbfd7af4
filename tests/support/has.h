// tests/support/has.h - an assertion about a part of a text.
#pragma once

#include <gtest/gtest.h>

#include <string>

namespace accelerate::test {

/// Shows the text that it looked at.
[[nodiscard]] inline testing::AssertionResult has(const std::string& text,
                                                  const std::string& part) {
  const bool found = text.find(part) != std::string::npos;
  return (found ? testing::AssertionSuccess() : testing::AssertionFailure())
         << "'" << part << "' in: " << text;
}

}  // namespace accelerate::test
