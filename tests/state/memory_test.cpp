#include "accelerate/memory.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <new>

#include "accelerate/errors.h"
#include "support/message_of.h"

// The allocators of the sanitizers end the program at an absurd size unless they are told to fail
// as malloc does.
#ifdef __SANITIZE_ADDRESS__
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() {
  return "allocator_may_return_null=1";
}
#endif
#ifdef __SANITIZE_THREAD__
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() {
  return "allocator_may_return_null=1";
}
#endif

namespace accelerate {
namespace {

using test::message_of;

/// What LibTorch says when the CPU has no more memory.
[[noreturn]] void run_out_of_memory() {
  throw std::runtime_error(
      "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
      "you "
      "tried to allocate 1 bytes. Error code 12 (Cannot allocate memory)");
}

TEST(ShouldReduceBatchSize, RecognisesLibTorchsOwnErrorOnTheCpu) {
  try {
    auto absurd = torch::empty({std::int64_t{1} << 55}, torch::kByte);
    FAIL() << "2^55 bytes were allocated";
  } catch (const std::exception& error) {
    EXPECT_TRUE(should_reduce_batch_size(error)) << error.what();
  }
}

TEST(ShouldReduceBatchSize, RecognisesOutOfMemoryByType) {
  EXPECT_TRUE(should_reduce_batch_size(std::bad_alloc()));
  EXPECT_TRUE(
      should_reduce_batch_size(c10::OutOfMemoryError({"f", "x.cpp", 1}, "allocator says no")));
}

TEST(ShouldReduceBatchSize, RecognisesTheTextsOfRuntimeErrors) {
  for (const auto* text :
       {"CUDA out of memory. Tried to allocate 2 GiB", "HIP out of memory. Tried",
        "XPU out of memory.", "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear",
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
        "DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.",
        "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size"}) {
    EXPECT_TRUE(should_reduce_batch_size(std::runtime_error(text))) << text;
  }
}

TEST(ShouldReduceBatchSize, IsFalseForOtherErrorsAndOtherKinds) {
  EXPECT_FALSE(should_reduce_batch_size(std::runtime_error("out of memory")));  // no blank, no dot
  EXPECT_FALSE(should_reduce_batch_size(std::runtime_error("shapes do not match")));
  EXPECT_FALSE(should_reduce_batch_size(std::logic_error("CUDA out of memory. Tried")));
  EXPECT_FALSE(should_reduce_batch_size(std::make_exception_ptr(42)));
  EXPECT_FALSE(should_reduce_batch_size(std::exception_ptr()));
}

TEST(FindExecutableBatchSize, TriesPythonsSequence) {
  std::vector<std::int64_t> tried;
  auto train = find_executable_batch_size(
      [&](std::int64_t batch_size) {
        tried.push_back(batch_size);
        if (batch_size != 8) run_out_of_memory();
      },
      {.starting_batch_size = 128});
  train();
  EXPECT_EQ(tried, (std::vector<std::int64_t>{128, 115, 103, 92, 82, 73, 65, 58, 52, 46, 41, 36,
                                              32,  28,  25,  22, 19, 17, 15, 13, 11, 9,  8}));
}

TEST(FindExecutableBatchSize, ReducesAfterARealAllocationFailed) {
  auto train = find_executable_batch_size([](std::int64_t batch_size) {
    // 2^50 bytes a sample for a batch that does not fit, 1 for one that does.
    return torch::empty({batch_size << (batch_size > 100 ? 50 : 0)}, torch::kByte).numel();
  });
  EXPECT_EQ(train(), 92);
}

TEST(FindExecutableBatchSize, PassesArgumentsAndReturnsTheResult) {
  auto train = find_executable_batch_size(
      [](std::int64_t batch_size, const std::string& name, std::vector<int>& log) {
        log.push_back(static_cast<int>(batch_size));
        if (batch_size > 10) run_out_of_memory();
        return name + " " + std::to_string(batch_size);
      },
      {.starting_batch_size = 12});
  std::vector<int> log;
  EXPECT_EQ(train("net", log), "net 10");
  EXPECT_EQ(log, (std::vector<int>{12, 10}));
}

TEST(FindExecutableBatchSize, ReturnsReferencesAsReferences) {
  int target = 3;
  auto train = find_executable_batch_size([&](std::int64_t) -> int& { return target; });
  train() = 5;
  EXPECT_EQ(target, 5);
}

TEST(FindExecutableBatchSize, StartsTheNextCallAtTheSizeThatFitted) {
  std::vector<std::int64_t> tried;
  auto train = find_executable_batch_size(
      [&](std::int64_t batch_size) {
        tried.push_back(batch_size);
        if (batch_size > 16) run_out_of_memory();
      },
      {.starting_batch_size = 20});
  EXPECT_EQ(train.batch_size(), 20);
  train();
  train();
  EXPECT_EQ(tried, (std::vector<std::int64_t>{20, 18, 16, 16}));
  EXPECT_EQ(train.batch_size(), 16);
}

TEST(FindExecutableBatchSize, ThrowsWhenNoSizeIsLeft) {
  for (const std::int64_t start : {0, 3}) {
    auto train = find_executable_batch_size([](std::int64_t) { run_out_of_memory(); },
                                            {.starting_batch_size = start});
    EXPECT_EQ(message_of<StateError>(train), "No executable batch size found, reached zero.");
  }
}

TEST(FindExecutableBatchSize, LetsOtherErrorsPassUntouched) {
  struct Mine {
    int code;
  };
  auto train = find_executable_batch_size([](std::int64_t) { throw Mine{7}; });
  try {
    train();
    FAIL() << "nothing was thrown";
  } catch (const Mine& mine) {
    EXPECT_EQ(mine.code, 7);
  }
}

TEST(FindExecutableBatchSize, UsesTheReduceFunctionThatIsGiven) {
  std::vector<std::int64_t> tried;
  auto train = find_executable_batch_size(
      [&](std::int64_t batch_size) {
        tried.push_back(batch_size);
        if (batch_size > 16) run_out_of_memory();
      },
      {.starting_batch_size = 64, .reduce = [](std::int64_t failed) { return failed / 2; }});
  train();
  EXPECT_EQ(tried, (std::vector<std::int64_t>{64, 32, 16}));
}

TEST(FindExecutableBatchSize, RefusesAReduceFunctionThatDoesNotReduce) {
  auto train = find_executable_batch_size(
      [](std::int64_t) { run_out_of_memory(); },
      {.starting_batch_size = 64, .reduce = [](std::int64_t failed) { return failed; }});
  EXPECT_EQ(
      message_of<ArgumentError>(train),
      "The reduce function of find_executable_batch_size returned 64 for the batch size 64: it "
      "must return a smaller size that is not negative.");
}

TEST(FindExecutableBatchSize, ReleasesWhatTheFailedAttemptHeldBeforeTheNext) {
  std::weak_ptr<int> held;
  auto train = find_executable_batch_size(
      [&](std::int64_t batch_size) {
        EXPECT_TRUE(held.expired());
        const auto object = std::make_shared<int>(1);
        held = object;
        if (batch_size > 18) run_out_of_memory();
      },
      {.starting_batch_size = 20});
  train();
  EXPECT_EQ(train.batch_size(), 18);
}

TEST(ReleaseMemory, EmptiesTensorsHoldersPointersOptionalsAndContainers) {
  auto tensor = torch::ones({4});
  torch::nn::Linear linear(2, 2);
  const auto watched = std::weak_ptr<torch::nn::Module>(linear.ptr());
  auto pointer = std::make_unique<int>(1);
  std::optional<std::vector<int>> maybe = std::vector<int>{1};
  std::vector<torch::Tensor> list = {torch::ones({1})};
  std::map<std::string, torch::Tensor> dictionary = {{"a", torch::ones({1})}};

  release_memory(tensor, linear, pointer, maybe, list, dictionary);

  EXPECT_FALSE(tensor.defined());
  EXPECT_TRUE(linear.is_empty());
  EXPECT_TRUE(watched.expired());
  EXPECT_EQ(pointer, nullptr);
  EXPECT_FALSE(maybe.has_value());
  EXPECT_EQ(list.capacity(), 0U);
  EXPECT_TRUE(dictionary.empty());
}

TEST(ClearDeviceCache, IsHarmlessWithoutADevice) {
  EXPECT_NO_THROW(clear_device_cache());
  EXPECT_NO_THROW(clear_device_cache(/*garbage_collection=*/true));
}

TEST(ConvertBytes, WritesTheLargestUnitAsPythonDoes) {
  EXPECT_EQ(convert_bytes(300), "300 bytes");
  EXPECT_EQ(convert_bytes(2048), "2.0 KB");
  EXPECT_EQ(convert_bytes(std::size_t{1530000}), "1.46 MB");
  EXPECT_EQ(convert_bytes(700.0), "700.0 bytes");
  EXPECT_EQ(convert_bytes(std::int64_t{1073741823}), "1024.0 MB");
  EXPECT_EQ(convert_bytes(std::uint64_t{1} << 63U), "8192.0 PB");
  EXPECT_EQ(convert_bytes(~0ULL), "16384.0 PB");
}

TEST(ConvertFileSizeToInt, ReadsBinaryAndDecimalUnits) {
  EXPECT_EQ(convert_file_size_to_int("1MiB"), 1048576);
  EXPECT_EQ(convert_file_size_to_int("5GB"), 5000000000);
  EXPECT_EQ(convert_file_size_to_int(7), 7);
  EXPECT_THROW((void)convert_file_size_to_int("five"), ArgumentError);
  EXPECT_THROW((void)convert_file_size_to_int(-7), ArgumentError);
}

}  // namespace
}  // namespace accelerate
