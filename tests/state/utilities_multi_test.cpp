#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string>

#include "accelerate/errors.h"
#include "accelerate/memory.h"
#include "accelerate/operations.h"
#include "accelerate/random.h"
#include "accelerate/state.h"
#include "support/on_processes.h"

namespace accelerate {
namespace {

[[noreturn]] void run_out_of_memory() {
  throw std::runtime_error(
      "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.");
}

/// Row i holds what process i has.
torch::Tensor rows(const torch::Tensor& tensor) { return gather(tensor.unsqueeze(0)); }

TEST(SetSeed, DeviceSpecificAddsTheRank) {
  on_processes(2, [](PartialState& state) {
    set_seed(42, {.device_specific = true});
    const auto mine = torch::rand({3});
    torch::manual_seed(42 + state.process_index());
    EXPECT_TRUE(torch::equal(mine, torch::rand({3})));
  });
}

TEST(SynchronizeRngState, GivesEveryProcessTheStateOfProcess0) {
  on_processes(3, [](PartialState& state) {
    torch::manual_seed(100 + state.process_index());
    synchronize_rng_state(RNGType::kTorch);
    const auto drawn = torch::rand({4});
    torch::manual_seed(100);
    EXPECT_TRUE(torch::equal(drawn, torch::rand({4})));
  });
}

TEST(SynchronizeRngStates, HandlesSeveralStatesAtOnceAndByName) {
  on_processes(2, [](PartialState& state) {
    torch::manual_seed(state.process_index());
    auto generator = at::make_generator<at::CPUGeneratorImpl>(50 + state.process_index());
    synchronize_rng_states({"torch", "generator"}, generator);
    const auto from_torch = rows(torch::rand({4}));
    const auto from_generator = rows(torch::rand({4}, generator));
    EXPECT_TRUE(torch::equal(from_torch[0], from_torch[1]));
    EXPECT_TRUE(torch::equal(from_generator[0], from_generator[1]));
    EXPECT_FALSE(torch::equal(from_torch[0], from_generator[0]));
  });
}

TEST(SynchronizeRngStates, TakesOneCollectiveForAllStates) {
  on_processes(2, [](PartialState& state) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(1);
    const auto before = state.process_group()->getSequenceNumberForGroup();
    synchronize_rng_states({RNGType::kTorch, RNGType::kGenerator}, generator);
    EXPECT_EQ(state.process_group()->getSequenceNumberForGroup() - before, 1U);
  });
}

TEST(SynchronizeRngStates, SaysWhichTypesDifferBetweenProcesses) {
  on_processes(2, [](PartialState& state) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(1);
    const auto type = state.is_main_process() ? RNGType::kTorch : RNGType::kGenerator;
    if (state.is_main_process()) {
      EXPECT_NO_THROW(synchronize_rng_state(type, generator));
      return;
    }
    try {
      synchronize_rng_state(type, generator);
      FAIL() << "nothing was thrown";
    } catch (const CommError& error) {
      EXPECT_EQ(error.rank(), 0);
      EXPECT_EQ(
          std::string(error.what()),
          "Random states cannot be synchronized: process 0 sent that of 'torch' with 5056 bytes "
          "where this process has 'generator' with 5056 bytes. Pass the same types, in one order, "
          "and generators of one device.");
    }
  });
}

TEST(FindExecutableBatchSize, AgreesOnTheSmallestSizeThatFitsEverywhere) {
  on_processes(3, [](PartialState& state) {
    // Process 1 has the least memory and process 2 starts lowest.
    const std::int64_t limit = state.process_index() == 1 ? 12 : 100;
    std::vector<std::int64_t> tried;
    auto train = find_executable_batch_size(
        [&](std::int64_t batch_size) {
          tried.push_back(batch_size);
          if (batch_size > limit) run_out_of_memory();
          return batch_size;
        },
        {.starting_batch_size = state.process_index() == 2 ? 20 : 30,
         .agree_across_processes = true});
    EXPECT_EQ(train(), 12);
    EXPECT_EQ(tried, (std::vector<std::int64_t>{20, 18, 16, 14, 12}));
  });
}

TEST(FindExecutableBatchSize, TellsTheOthersWhichProcessFailed) {
  on_processes(2, [](PartialState& state) {
    auto train = find_executable_batch_size(
        [&](std::int64_t) {
          if (state.process_index() == 1) throw ArgumentError("the data is broken");
        },
        {.starting_batch_size = 4, .agree_across_processes = true});
    try {
      train();
      FAIL() << "nothing was thrown";
    } catch (const ArgumentError& error) {
      EXPECT_EQ(state.process_index(), 1);
      EXPECT_STREQ(error.what(), "the data is broken");
    } catch (const CommError& error) {
      EXPECT_EQ(state.process_index(), 0);
      EXPECT_EQ(error.rank(), 1);
      EXPECT_STREQ(error.what(),
                   "find_executable_batch_size: rank 1 failed at batch size 4, and not for want of "
                   "memory. Its own message says why.");
    }
  });
}

TEST(FindExecutableBatchSize, SaysWhatHappenedWhereTheOthersAreInTheAttemptStill) {
  on_processes(3, [](PartialState& state) {
    auto train = find_executable_batch_size(
        [&](std::int64_t) {
          if (state.process_index() == 1) run_out_of_memory();
          (void)gather(torch::ones({4}));
        },
        {.starting_batch_size = 2, .agree_across_processes = true});
    try {
      train();
      FAIL() << "nothing was thrown";
    } catch (const CommError& error) {
      EXPECT_EQ(error.rank(), 1);
      const std::string text = error.what();
      EXPECT_NE(text.find(", after std::runtime_error: DefaultCPUAllocator: can't allocate memory"),
                std::string::npos)
          << text;
    }
  });
}

TEST(FindExecutableBatchSize, ReachesZeroOnAllProcessesTogether) {
  on_processes(2, [](PartialState& state) {
    auto train = find_executable_batch_size(
        [&](std::int64_t) {
          if (state.process_index() == 1) run_out_of_memory();
        },
        {.starting_batch_size = 2, .agree_across_processes = true});
    EXPECT_THROW(train(), StateError);
  });
}

}  // namespace
}  // namespace accelerate
