#include "core/exception_text.h"

#include <cxxabi.h>

#include <cstdlib>
#include <exception>
#include <memory>
#include <string_view>
#include <typeinfo>

namespace accelerate::detail::inline core {
namespace {

// c10::Error::what() is the message, a line end, and a stack that begins with these words.
constexpr std::string_view kTorchStack = "\nException raised from ";

std::string readable_name(const std::type_info& type) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(type.name(), nullptr, nullptr, &status), std::free);
  return status == 0 ? name.get() : type.name();
}

}  // namespace

std::string ExceptionText::text() const { return message.empty() ? type : type + ": " + message; }

ExceptionText current_exception_text() {
  ExceptionText result;
  const std::type_info* type = abi::__cxa_current_exception_type();
  result.type = type != nullptr ? readable_name(*type) : "an unknown exception";
  try {
    throw;
  } catch (const std::exception& error) {
    const std::string_view what = error.what();
    const auto end = what.find(kTorchStack);
    result.message = what.substr(0, end);
    if (end != std::string_view::npos) result.stack = what.substr(end + 1);
  } catch (const std::string& text) {
    result.message = text;
  } catch (const char* text) {
    result.message = text;
  } catch (...) {
  }
  return result;
}

}  // namespace accelerate::detail::inline core
