#include "accelerate/logging/rich.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <memory>
#include <string>

#include "accelerate/environment.h"
#include "core/exception_text.h"
#include "core/subprocess.h"
#include "core/text.h"

namespace accelerate {
namespace {

constexpr int kMostFrames = 64;

struct Colours {
  const char* title = "";
  const char* type = "";
  const char* dim = "";
  const char* end = "";

  static Colours of_stderr() {
    if (::isatty(STDERR_FILENO) == 0 || std::getenv("NO_COLOR") != nullptr) return {};
    return {"\033[1;31m", "\033[1;33m", "\033[2m", "\033[0m"};
  }
};

std::string readable(const char* symbol) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(symbol, nullptr, nullptr, &status), std::free);
  return status == 0 ? name.get() : symbol;
}

/// "train(int)  libx.so+0x1f20": the file and offset are what addr2line takes.
std::string frame_text(void* address, const Colours& colour) {
  Dl_info info{};
  if (::dladdr(address, &info) == 0 || info.dli_fname == nullptr) return detail::str(address);
  const auto offset = static_cast<char*>(address) - static_cast<char*>(info.dli_fbase);
  const auto file = std::filesystem::path(info.dli_fname).filename().string();
  return detail::str(info.dli_sname != nullptr ? readable(info.dli_sname) : "?", colour.dim, "  ",
                     file, "+0x", std::hex, offset, colour.end);
}

bool throws(void* address) {
  Dl_info info{};
  if (::dladdr(address, &info) == 0 || info.dli_sname == nullptr) return false;
  const std::string_view symbol = info.dli_sname;
  return symbol == "__cxa_throw" || symbol == "__cxa_rethrow" ||
         symbol == "_ZSt17rethrow_exceptionNSt15__exception_ptr13exception_ptrE";
}

/// From the function that threw outwards: nothing has been unwound if no handler catches.
std::string stack_text(const Colours& colour) {
  std::array<void*, kMostFrames> frames{};
  const auto end = frames.begin() + ::backtrace(frames.data(), kMostFrames);
  const auto thrower = std::find_if(frames.begin(), end, throws);
  std::string text;
  for (auto frame = thrower == end ? frames.begin() : thrower + 1; frame != end; ++frame) {
    text += detail::str("  ", frame_text(*frame, colour), "\n");
  }
  return text;
}

[[noreturn]] void show_and_end() {
  const auto colour = Colours::of_stderr();
  const auto stack = stack_text(colour);
  if (const auto exception = std::current_exception()) {
    try {
      std::rethrow_exception(exception);
    } catch (...) {
      const auto text = detail::current_exception_text();
      detail::write_fully(
          STDERR_FILENO,
          detail::str(colour.title, "Uncaught exception", colour.end, " (most recent call first)\n",
                      stack, colour.type, text.type, colour.end,
                      text.message.empty() ? "" : ": " + text.message, "\n"));
    }
  }
  std::abort();
}

}  // namespace

void rich::install() {
  if (!Environment::process().flag("ACCELERATE_ENABLE_RICH")) return;
  std::set_terminate(show_and_end);
}

}  // namespace accelerate
