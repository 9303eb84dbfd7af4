#include "core/exception_text.h"

#include <gtest/gtest.h>

#include <new>
#include <stdexcept>
#include <string>

#include "accelerate/errors.h"

namespace accelerate::detail {
namespace {

template <class Exception>
ExceptionText text_of(const Exception& exception) {
  try {
    throw exception;
  } catch (...) {
    return current_exception_text();
  }
}

constexpr const char* kRemedy =
    " Use smaller batches (gradient_accumulation_steps keeps the number of samples per step), "
    "mixed "
    "precision or fewer processes per machine; accelerate::find_executable_batch_size finds a "
    "batch size that fits.";

TEST(ExceptionText, HasTypeAndText) {
  EXPECT_EQ(text_of(StateError("Too late.")).text(), "accelerate::StateError: Too late.");
  EXPECT_EQ(text_of(std::string("my text")).message, "my text");
}

TEST(ExceptionText, SeparatesLibTorchsStack) {
  const auto text = text_of(std::runtime_error("bad shape\nException raised from f at x.cpp:1\n"));
  EXPECT_EQ(text.message, "bad shape");
  EXPECT_EQ(text.stack, "Exception raised from f at x.cpp:1\n");
}

TEST(ExceptionText, SaysWhatToDoAboutAnExceptionWithoutText) {
  EXPECT_EQ(text_of(7).message,
            "The program threw 7. It is of type int, which is no std::exception, so that it does "
            "not say why or where it was thrown. Throw a std::runtime_error instead; `catch throw` "
            "in gdb shows the line.");
  struct Odd {};
  EXPECT_NE(text_of(Odd()).message.find("Odd, which is no std::exception"), std::string::npos);
}

TEST(ExceptionText, SaysHowMuchMemoryWasMissingForWhichOperationAndWhatToDo) {
  const std::string said =
      "DefaultCPUAllocator: can't allocate memory: you tried to allocate 281474976710656 bytes. "
      "Error code 12 (Cannot allocate memory)";
  const auto text = text_of(std::runtime_error(
      "[enforce fail at alloc_cpu.cpp:127] err == 0. " + said +
      "\nframe #0: c10::ThrowEnforceNotMet(char const*, int) + 0x6a (0x7f in libc10.so)\n"
      "frame #1: at::_ops::addmm::call(at::Tensor const&) + 0x154 (0x7f in libtorch_cpu.so)\n"
      "frame #2: at::_ops::linear::call(at::Tensor const&) + 0x154 (0x7f in libtorch_cpu.so)\n"
      "frame #3: main + 0x1 (0x7f in program)\n"));
  EXPECT_EQ(
      text.message,
      said + ". That is 256.0 TB of the CPU's memory. The operation 'linear' needs it." + kRemedy);
  EXPECT_TRUE(text.stack.starts_with("frame #0: c10::ThrowEnforceNotMet")) << text.stack;
}

TEST(ExceptionText, KeepsLibTorchsWordsAboutTheMemoryOfADevice) {
  const std::string said =
      "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.72 GiB "
      "of which 1.00 GiB is free.";
  EXPECT_EQ(text_of(std::runtime_error(said + "\nException raised from malloc at x.cpp:1")).message,
            said + kRemedy);
}

TEST(ExceptionText, SaysWhatToDoWhenNewFails) {
  EXPECT_EQ(text_of(std::bad_alloc()).message,
            std::string("This process gets no more memory of the CPU.") + kRemedy);
}

}  // namespace
}  // namespace accelerate::detail
