#include "core/exception_text.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <string_view>
#include <typeinfo>

#include "core/bytes.h"
#include "core/numbers.h"
#include "core/text.h"

namespace accelerate::detail::inline core {
namespace {

// c10::Error::what() is the message, a line end, and a stack that begins with one of these.
constexpr std::string_view kTorchStacks[] = {"\nException raised from ", "\nframe #0: "};

// Python's list, then the messages of the driver and of cuBLAS, which bypass the caching allocator.
constexpr std::string_view kOutOfMemoryTexts[] = {
    " out of memory.",  // CUDA, HIP, XPU
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
    "DefaultCPUAllocator: can't allocate memory",
    "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed",  // HPU
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: not enough memory",
};
constexpr std::string_view kMemoryRemedy =
    "Use smaller batches (gradient_accumulation_steps keeps the number of samples per step), "
    "mixed precision or fewer processes per machine; accelerate::find_executable_batch_size finds "
    "a batch size that fits.";

std::string readable_name(const std::type_info& type) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(type.name(), nullptr, nullptr, &status), std::free);
  return status == 0 ? name.get() : type.name();
}

// The operation that the program called: the outermost one of LibTorch's stack; "" if none is
// there.
std::string_view operation_in(std::string_view stack) {
  constexpr std::string_view kBegin = "at::_ops::";
  const auto end = stack.rfind("::call(");
  const auto begin = end == stack.npos ? end : stack.rfind(kBegin, end);
  if (begin == stack.npos) return "";
  return stack.substr(begin + kBegin.size(), end - begin - kBegin.size());
}

// LibTorch's words about missing memory, with the size as people read it and with what to do.
std::string memory_text(std::string_view what, std::string_view stack) {
  constexpr std::string_view kAsked = "you tried to allocate ";
  // Before that: the line of the allocator.
  if (const auto cpu = what.find("DefaultCPUAllocator"); cpu != what.npos) what.remove_prefix(cpu);
  std::string text(trim(what));
  if (!text.ends_with('.')) text += '.';
  if (const auto asked = what.find(kAsked); asked != what.npos) {
    const auto number = what.substr(asked + kAsked.size());
    const auto size = parse_number<std::int64_t>(number.substr(0, number.find(' ')));
    if (size) text += str(" That is ", convert_bytes(*size), " of the CPU's memory.");
  }
  if (const auto operation = operation_in(stack); !operation.empty()) {
    text += str(" The operation '", operation, "' needs it.");
  }
  return str(text, " ", kMemoryRemedy);
}

std::string what_to_do_about(const std::string& type) {
  return str("It is of type ", type,
             ", which is no std::exception, so that it does not say why or where it was thrown. "
             "Throw a std::runtime_error instead; `catch throw` in gdb shows the line.");
}

}  // namespace

std::string ExceptionText::text() const { return message.empty() ? type : type + ": " + message; }

bool tells_of_memory(std::string_view message) {
  return std::ranges::any_of(kOutOfMemoryTexts, [&](std::string_view text) {
    return message.find(text) != std::string_view::npos;
  });
}

ExceptionText current_exception_text() {
  ExceptionText result;
  const std::type_info* type = abi::__cxa_current_exception_type();
  result.type = type != nullptr ? readable_name(*type) : "an unknown exception";
  try {
    throw;
  } catch (const std::bad_alloc&) {
    result.message = str("This process gets no more memory of the CPU. ", kMemoryRemedy);
  } catch (const std::exception& error) {
    const std::string_view what = error.what();
    auto end = what.npos;
    for (const auto stack : kTorchStacks) end = std::min(end, what.find(stack));
    result.message = what.substr(0, end);
    if (end != what.npos) result.stack = what.substr(end + 1);
    if (tells_of_memory(result.message)) result.message = memory_text(result.message, result.stack);
  } catch (const std::string& text) {
    result.message = text;
  } catch (const char* text) {
    result.message = text;
  } catch (int number) {
    result.message = str("The program threw ", number, ". ", what_to_do_about(result.type));
  } catch (...) {
    result.message = str("The program threw an object. ", what_to_do_about(result.type));
  }
  return result;
}

}  // namespace accelerate::detail::inline core
