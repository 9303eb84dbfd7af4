// A worker that does not come back from its dataset hides no error and holds up no process.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>

#include "accelerate/accelerate.h"
#include "data/loading.h"
#include "support/message_of.h"
#include "support/on_processes.h"
#include "support/patience.h"

namespace accelerate {
namespace {

using namespace std::chrono_literals;
using test::message_of;
using test::number_loader;

/// Sample `stuck` is never read.
auto stuck_loader(const DataLoaderOptions& options, std::int64_t stuck = 8) {
  return number_loader(1000, options, [stuck](std::int64_t i) {
    if (i == stuck) std::this_thread::sleep_for(1000s);
  });
}

/// As in a `main` that returns what `record` does.
template <class F>
void as_recorded_main(F f) {
  const int code = record([&] {
    f();
    return 0;
  });
  std::cerr << "main returns " << code << std::endl;
}

TEST(StuckWorker, DelaysNoErrorOfItsRank) {
  const auto outcomes = run_processes(2, {.timeout = 60s}, [](PartialState& state) {
    as_recorded_main([&] {
      const auto loader = stuck_loader({.batch_size = 2, .num_workers = 2});
      for ([[maybe_unused]] auto& batch : loader) {
        state.wait_for_everyone();
        if (state.process_index() == 1) throw std::runtime_error("the loss is NaN");
      }
    });
  });
  EXPECT_TRUE(outcomes[1].output_contains("main returns 1\n")) << outcomes[1].output;
  EXPECT_TRUE(outcomes[1].output_contains("the loss is NaN")) << outcomes[1].output;
  EXPECT_TRUE(outcomes[0].output_contains("main returns 70\n")) << outcomes[0].output;
  EXPECT_TRUE(outcomes[0].output_contains("failed after barrier")) << outcomes[0].output;
  EXPECT_TRUE(outcomes[0].output_contains("the loss is NaN")) << outcomes[0].output;
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(outcome.ok()) << outcome.output;
    EXPECT_LT(outcome.seconds, test::patient(test::Seconds(20)).count()) << outcome.output;
  }
}

TEST(StuckWorker, IsNamedByItsTimeoutAndLeftBehind) {
  const auto outcomes = run_processes(1, {.timeout = 60s}, [] {
    as_recorded_main([] {
      const auto loader = stuck_loader({.batch_size = 2, .num_workers = 1, .timeout = 500ms});
      for ([[maybe_unused]] auto& batch : loader) {
      }
    });
  });
  const auto& outcome = outcomes[0];
  EXPECT_TRUE(outcome.ok()) << outcome.output;
  EXPECT_TRUE(outcome.output_contains("main returns 1\n")) << outcome.output;
  EXPECT_TRUE(outcome.output_contains("Batch 4 of the data loader did not come within 500 ms"))
      << outcome.output;
  EXPECT_TRUE(
      outcome.output_contains("A data loader ends without its worker 0, which has been "
                              "loading batch 4 (samples 8, 9) of accelerate::"))
      << outcome.output;
}

TEST(StuckWorker, LetsAProgramEndThatIsThroughWithIt) {
  const auto outcomes = run_processes(1, {.timeout = 60s}, [] {
    as_recorded_main([] {
      const auto loader = stuck_loader({.batch_size = 2, .num_workers = 2});
      for ([[maybe_unused]] auto& batch : loader) {
        std::this_thread::sleep_for(500ms);
        break;
      }
    });
  });
  EXPECT_TRUE(outcomes[0].ok()) << outcomes[0].output;
  EXPECT_TRUE(outcomes[0].output_contains("main returns 0\n")) << outcomes[0].output;
  EXPECT_TRUE(outcomes[0].output_contains("ends without its worker")) << outcomes[0].output;
}

TEST(StuckWorker, OfAStreamIsLeftBehindToo) {
  const auto outcomes = run_processes(1, {.timeout = 60s}, [] {
    as_recorded_main([] {
      const auto generate = [i = std::int64_t{0}]() mutable -> std::optional<std::int64_t> {
        if (i == 8) std::this_thread::sleep_for(1000s);
        return i++;
      };
      const auto loader = make_data_loader(generate, {.batch_size = 2, .num_workers = 2});
      for ([[maybe_unused]] auto& batch : loader) {
        std::this_thread::sleep_for(500ms);
        throw std::runtime_error("the loss is NaN");
      }
    });
  });
  EXPECT_TRUE(outcomes[0].ok()) << outcomes[0].output;
  EXPECT_TRUE(outcomes[0].output_contains("main returns 1\n")) << outcomes[0].output;
  EXPECT_TRUE(outcomes[0].output_contains("the loss is NaN")) << outcomes[0].output;
  EXPECT_TRUE(outcomes[0].output_contains("which has been reading the stream of "))
      << outcomes[0].output;
}

/// How a process ends that calls `std::exit(3)` two seconds after it left a worker behind, which is
/// in a sample for `time`. The code is 4 if it comes to handlers of `atexit`.
int exit_code_without_worker(std::chrono::milliseconds time) {
  const auto outcomes = run_processes(1, {.timeout = 60s}, [time] {
    std::atexit([] { ::_exit(4); });
    try {
      const auto loader = number_loader(8, {.num_workers = 1}, [time](std::int64_t i) {
        const auto end = std::chrono::steady_clock::now() + (i == 0 ? 0ms : time);
        while (std::chrono::steady_clock::now() < end) (void)torch::ones({8}).add(1);
      });
      for ([[maybe_unused]] auto& batch : loader) {
        std::this_thread::sleep_for(100ms);
        throw std::runtime_error("the loss is NaN");
      }
    } catch (const std::runtime_error&) {  // it is left behind after 200 ms
    }
    std::this_thread::sleep_for(2s);
    std::cout << "the last word";  // not flushed
    std::exit(3);
  });
  EXPECT_TRUE(outcomes[0].output_contains("ends without its worker 0")) << outcomes[0].output;
#ifndef __SANITIZE_THREAD__  // its exit flushes
  EXPECT_EQ(outcomes[0].output_contains("the last word"), outcomes[0].exit_code == 3);
#endif
  return outcomes[0].exit_code;
}

TEST(StuckWorker, ThatRunsAtExitMeetsNoDestructors) {
  EXPECT_EQ(exit_code_without_worker(1000s), 3);
  EXPECT_EQ(exit_code_without_worker(1s), 4) << "it has come back";
}

class ForkedProcess : public testing::TestWithParam<std::chrono::milliseconds> {};

/// With samples that take time the child has to wait for batches that nobody loads.
TEST_P(ForkedProcess, HasNoWorkersOfItsParentAndEnds) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the thread sanitizer cannot detach a thread of the parent";
#endif
  const auto loader = number_loader(100, {.batch_size = 2, .num_workers = 2}, [](std::int64_t i) {
    if (i > 1) std::this_thread::sleep_for(GetParam());
  });
  auto pass = loader.begin();
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    const auto text = message_of<StateError>([&] {
      for (;;) ++pass;
    });
    const auto expected = "load a batch with workers: process " + std::to_string(::getpid()) +
                          " was forked from process " + std::to_string(::getppid());
    // Destroys the copies of loader and pass.
    pass = {};
    const_cast<std::remove_const_t<decltype(loader)>&>(loader).reset();
    ::_exit(text.starts_with(expected) ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

INSTANTIATE_TEST_SUITE_P(SamplesTake, ForkedProcess, testing::Values(0ms, 500ms));

}  // namespace
}  // namespace accelerate
