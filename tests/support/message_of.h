// tests/support/message_of.h - what a call throws, for tests that assert the text.
#pragma once

#include <exception>
#include <string>

namespace accelerate::test {

/// The text of the `E` that `f` throws. Anything else, or nothing, is a text that says so, which no
/// expectation is equal to.
template <class E, class F>
[[nodiscard]] std::string message_of(F&& f) {
  try {
    f();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another exception: ") + error.what();
  }
  return "nothing was thrown";
}

}  // namespace accelerate::test
