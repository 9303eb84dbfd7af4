#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "accelerate/data_loader.h"
#include "accelerate/logging.h"
#include "data/loading.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using std::chrono::milliseconds;
using test::batches;
using test::iota;
using test::message_of;
using test::number_loader;
using test::Numbers;
using test::numbers;
using test::samples;

/// Everything here holds whatever the number of workers.
class Workers : public testing::TestWithParam<std::int64_t> {
 protected:
  [[nodiscard]] static DataLoaderOptions options(std::int64_t batch_size) {
    return {.batch_size = batch_size, .num_workers = GetParam()};
  }
};
INSTANTIATE_TEST_SUITE_P(Count, Workers, testing::Values(0, 1, 2, 8),
                         [](const auto& about) { return std::to_string(about.param); });

TEST_P(Workers, HandOutBatchesInOrderThoughSomeAreSlow) {
  const auto dawdle = [](std::int64_t i) {
    if (i % 7 == 0) std::this_thread::sleep_for(milliseconds(2));
  };
  const auto loader = number_loader(100, options(3), dawdle);
  EXPECT_EQ(samples(loader), iota(100));
  EXPECT_EQ(samples(loader), iota(100));
}

TEST_P(Workers, DrawTheSameNumbers) {
  const auto drawn = [](const DataLoaderOptions& chosen) {
    torch::manual_seed(5);
    const auto noisy = [](std::int64_t i) {
      return 1000 * i + torch::randint(1000, {}, worker_generator()).item<std::int64_t>();
    };
    const auto loader = make_data_loader(test::NumberDataset(20, noisy), chosen);
    return std::pair{batches(loader), batches(loader)};
  };
  auto shuffled = options(3);
  shuffled.shuffle = true;
  const auto seen = drawn(shuffled);
  EXPECT_EQ(seen, drawn({.batch_size = 3, .shuffle = true}));
  EXPECT_NE(seen.first, seen.second);
}

TEST_P(Workers, ReportAnExceptionInItsPlaceWithTheSamplesAndGoOnWithTheNextPass) {
  std::atomic<bool> fails = true;
  const auto loader = number_loader(20, options(4), [&](std::int64_t i) {
    if (fails && i == 9) throw std::out_of_range("no file 9");
  });

  Numbers seen;
  try {
    for (auto& batch : loader) {
      for (const auto i : numbers(batch)) seen.push_back(i);
    }
    FAIL() << "nothing was thrown";
  } catch (const DataLoaderError& error) {
    EXPECT_STREQ(error.what(),
                 "Batch 2 of the data loader (samples 8, 9, 10, 11) could not be loaded at "
                 "sample 9: std::out_of_range: no file 9");
    EXPECT_EQ(error.batch(), 2);
    EXPECT_EQ(error.indices(), (Numbers{8, 9, 10, 11}));
    EXPECT_EQ(error.sample(), 9);
    EXPECT_EQ(message_of<std::out_of_range>([&] { std::rethrow_if_nested(error); }), "no file 9");
  }
  EXPECT_EQ(seen, iota(8));

  fails = false;
  EXPECT_EQ(samples(loader), iota(20));
}

TEST_P(Workers, ReportThatASamplerThrows) {
  struct Broken {
    std::int64_t left = 0;
    void begin(std::int64_t) { left = 5; }
    std::optional<std::int64_t> next() {
      if (left == 0) throw std::runtime_error("no more indices");
      return --left;
    }
  };
  const auto loader = make_data_loader(torch::arange(5), Broken(), options(1));
  Numbers seen;
  EXPECT_THROW(
      {
        for (auto& batch : loader) seen.push_back(numbers(batch)[0]);
      },
      DataLoaderError);
  EXPECT_LE(seen.size(), 5);
  EXPECT_GE(seen.size(), 3);  // the plan reads ahead
}

TEST_P(Workers, AreNotWaitedForWhenALoopIsLeft) {
  const auto loader = number_loader(1000, options(2));
  for (int pass = 0; pass < 50; ++pass) {
    for (auto& batch : loader) {
      if (numbers(batch)[0] >= pass) break;
    }
  }
  EXPECT_EQ(loader.iteration(), 0);
  EXPECT_EQ(samples(loader), iota(1000));
}

TEST_P(Workers, ServeNestedLoopsOverOneLoader) {
  const auto loader = number_loader(6, options(2));
  Numbers outer;
  for (auto& batch : loader) {
    EXPECT_EQ(samples(loader), iota(6));
    for (const auto i : numbers(batch)) outer.push_back(i);
  }
  EXPECT_EQ(outer, iota(6));
}

TEST_P(Workers, ServeSeveralThreads) {
  const auto loader = number_loader(60, options(4));
  std::vector<Numbers> seen(3);
  std::vector<std::thread> threads;
  for (auto& mine : seen) threads.emplace_back([&mine, &loader] { mine = samples(loader); });
  for (auto& thread : threads) thread.join();
  for (const auto& each : seen) EXPECT_EQ(each, iota(60));
}

TEST_P(Workers, OutliveTheLoaderWhileAPassIsUnderWay) {
  auto pass = number_loader(10, options(2)).begin();
  Numbers seen;
  for (; pass != std::default_sentinel; ++pass) {
    for (const auto i : numbers(*pass)) seen.push_back(i);
  }
  EXPECT_EQ(seen, iota(10));
}

TEST_P(Workers, ReadAStreamOneAtATimeInOneThread) {
  struct Shared {
    std::mutex mutex;
    std::set<std::thread::id> threads;
  };
  const auto shared = std::make_shared<Shared>();
  struct Counter {
    std::shared_ptr<Shared> shared;
    std::int64_t at = 0;
    void reset() { at = 0; }
    std::optional<std::int64_t> next() {
      const std::unique_lock alone(shared->mutex, std::try_to_lock);
      EXPECT_TRUE(alone.owns_lock());
      shared->threads.insert(std::this_thread::get_id());
      if (at == 50) return std::nullopt;
      return at++;
    }
  };
  const auto loader = make_data_loader(Counter{shared}, options(4));
  for (int pass = 0; pass < 3; ++pass) {
    for ([[maybe_unused]] auto& batch : loader) break;
    EXPECT_EQ(samples(loader), iota(50));
  }
  EXPECT_EQ(shared->threads.size(), 1);
  EXPECT_EQ(shared->threads.contains(std::this_thread::get_id()), GetParam() == 0);
}

TEST_P(Workers, ReportThatAStreamThrows) {
  std::int64_t at = 0;
  const auto failing = [&at]() -> std::optional<std::int64_t> {
    if (at == 5) throw std::runtime_error("the line is down");
    return at++;
  };
  EXPECT_EQ(message_of<DataLoaderError>([&] { samples(make_data_loader(failing, options(2))); }),
            "Batch 2 of the data loader could not be loaded: std::runtime_error: the line is down");
}

TEST(Pipeline, HoldsNoMoreBatchesThanItMay) {
  std::atomic<std::int64_t> made = 0;
  const auto loader = number_loader(40, {.batch_size = 1, .num_workers = 2, .prefetch_factor = 3},
                                    [&](std::int64_t) { ++made; });
  std::int64_t taken = 0;
  for ([[maybe_unused]] auto& batch : loader) {
    ++taken;
    std::this_thread::sleep_for(milliseconds(1));
    EXPECT_LE(made, taken + 6);
  }
  EXPECT_EQ(made, 40);
}

TEST(Pipeline, IsLeftWhileAWorkerIsStuckAndBegunAnew) {
  std::atomic<bool> stuck = true;
  const auto loader = number_loader(8, {.batch_size = 2, .num_workers = 2}, [&](std::int64_t i) {
    while (stuck && i == 2) std::this_thread::sleep_for(milliseconds(1));
  });
  for ([[maybe_unused]] auto& batch : loader) break;
  EXPECT_EQ(numbers(*loader.begin()), (Numbers{0, 1}));
  stuck = false;
  EXPECT_EQ(samples(loader), iota(8));
}

TEST(Pipeline, ReadsNoMoreSamplesOfABatchThatNobodyWants) {
  std::atomic<std::int64_t> read = 0;
  {
    const auto loader =
        number_loader(10'000, {.batch_size = 1000, .num_workers = 1}, [&](std::int64_t i) {
          ++read;
          if (i >= 1000) std::this_thread::sleep_for(milliseconds(20));
        });
    for ([[maybe_unused]] auto& batch : loader) break;
  }
  EXPECT_LT(read, 1100);
}

TEST(Pipeline, ReadsNoMoreOfAStreamThatNobodyWants) {
  std::atomic<std::int64_t> read = 0;
  {
    const auto generate = [&]() -> std::optional<std::int64_t> {
      if (++read > 2000) std::this_thread::sleep_for(milliseconds(20));
      return read;
    };
    const auto loader = make_data_loader(generate, {.batch_size = 1000, .num_workers = 1});
    for ([[maybe_unused]] auto& batch : loader) break;
  }
  EXPECT_LT(read, 2100);
}

TEST(Pipeline, KeepsTheDatasetForAWorkerThatItLeavesBehind) {
  auto released = std::make_shared<std::atomic<bool>>(false);
  std::atomic<bool> stuck = false;
  std::vector<std::string> log;
  basic_config({.sink = [&](const LogEntry& entry) { log.push_back(entry.message); }});
  const auto loop = [&] {
    const auto loader =
        number_loader(8, {.batch_size = 2, .num_workers = 1}, [released, &stuck](std::int64_t i) {
          if (i == 3) stuck = true;
          while (i == 3 && !*released) std::this_thread::sleep_for(milliseconds(1));
        });
    for ([[maybe_unused]] auto& batch : loader) {
      while (!stuck) std::this_thread::sleep_for(milliseconds(1));
      throw std::runtime_error("the loss is NaN");
    }
  };
  EXPECT_EQ(message_of<std::runtime_error>(loop), "the loss is NaN");
  basic_config({});
  ASSERT_EQ(log.size(), 1);
  EXPECT_NE(log[0].find("worker 0, which has been loading batch 1 (samples 2, 3) of "),
            std::string::npos)
      << log[0];
  EXPECT_EQ(released.use_count(), 2);
  *released = true;
  for (int i = 0; i < 1000 && released.use_count() > 1; ++i) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_EQ(released.use_count(), 1);  // the worker has ended, and the dataset with it
}

TEST(Pipeline, NamesTheWorkerThatKeepsAPassFromBeginning) {
  struct Epochs {
    std::shared_ptr<std::atomic<bool>> released;
    std::shared_ptr<std::atomic<bool>> stuck;
    void set_epoch(std::int64_t) {}
    [[nodiscard]] std::size_t size() const { return 8; }
    [[nodiscard]] std::int64_t get(std::size_t i) const {
      if (i == 2) *stuck = true;
      while (i == 2 && !*released) std::this_thread::sleep_for(milliseconds(1));
      return static_cast<std::int64_t>(i);
    }
  };
  auto released = std::make_shared<std::atomic<bool>>(false);
  auto stuck = std::make_shared<std::atomic<bool>>(false);
  const auto loader = make_data_loader(
      Epochs{released, stuck}, {.batch_size = 2, .num_workers = 1, .timeout = milliseconds(1000)});
  for ([[maybe_unused]] auto& batch : loader) {
    while (!*stuck) std::this_thread::sleep_for(milliseconds(1));
    break;
  }
  const auto text = message_of<DataLoaderTimeout>([&] { (void)loader.begin(); });
  EXPECT_TRUE(
      text.starts_with("A pass of the data loader cannot begin: worker 0 did not leave the "
                       "pass before within 1000 ms, loading batch 1 (samples 2, 3) of "))
      << text;
  *released = true;
}

TEST(Pipeline, HandsOutWhatIsReadyWhenOrderDoesNotMatter) {
  std::atomic<bool> others_done = false;
  std::atomic<std::int64_t> done = 0;
  const auto loader =
      number_loader(6, {.batch_size = 1, .num_workers = 2, .prefetch_factor = 3, .in_order = false},
                    [&](std::int64_t i) {
                      while (i == 0 && !others_done) std::this_thread::yield();
                      if (++done == 5) others_done = true;
                    });
  Numbers seen;
  std::vector<bool> ends;
  for (auto& batch : loader) {
    seen.push_back(numbers(batch)[0]);
    ends.push_back(loader.end_of_dataloader());
  }
  EXPECT_EQ(seen.back(), 0);
  EXPECT_EQ(std::ranges::count(ends, true), 1);
  EXPECT_TRUE(ends.back());
  std::ranges::sort(seen);
  EXPECT_EQ(seen, iota(6));
}

TEST(Pipeline, NamesTheBatchThatDoesNotCome) {
  std::atomic<bool> released = false;
  {
    const auto loader = number_loader(
        8, {.batch_size = 2, .num_workers = 2, .timeout = milliseconds(1000)}, [&](std::int64_t i) {
          while (i == 4 && !released) std::this_thread::sleep_for(milliseconds(1));
        });
    Numbers seen;
    const auto loop = [&] {
      for (auto& batch : loader) seen.push_back(numbers(batch)[0]);
    };
    EXPECT_EQ(message_of<DataLoaderTimeout>(loop),
              "Batch 2 of the data loader did not come within 1000 ms. Raise "
              "DataLoaderOptions::timeout, load with more workers, or find out what the dataset is "
              "waiting for.");
    EXPECT_EQ(seen, (Numbers{0, 2}));
    released = true;
  }
}

TEST(Pipeline, StartsEachWorkerOncePerPassOrOnceForAll) {
  for (const bool persistent : {false, true}) {
    std::mutex mutex;
    std::vector<std::pair<std::uint64_t, std::int64_t>> started;  // seed of the pass, worker
    DataLoaderOptions options{.batch_size = 1, .num_workers = 2, .persistent_workers = persistent};
    options.worker_init_fn = [&](std::int64_t worker, std::uint64_t seed) {
      const std::lock_guard lock(mutex);
      started.emplace_back(seed - static_cast<std::uint64_t>(worker), worker);
    };
    // Slow, so that both workers come to it.
    const auto loader = number_loader(
        10, options, [](std::int64_t) { std::this_thread::sleep_for(milliseconds(2)); });
    samples(loader);
    samples(loader);
    ASSERT_EQ(started.size(), persistent ? 2 : 4);
    std::ranges::sort(started);
    for (std::size_t i = 0; i < started.size(); i += 2) {
      EXPECT_EQ(started[i], std::pair(started[i].first, std::int64_t{0}));
      EXPECT_EQ(started[i + 1], std::pair(started[i].first, std::int64_t{1}));
    }
  }
}

TEST(Pipeline, ReportsThatAWorkerCannotStart) {
  DataLoaderOptions options{.batch_size = 2, .num_workers = 1};
  options.worker_init_fn = [](std::int64_t, std::uint64_t) { throw std::runtime_error("no disk"); };
  EXPECT_EQ(message_of<DataLoaderError>([&] { samples(number_loader(4, options)); }),
            "Batch 0 of the data loader (samples 0, 1) could not be loaded: std::runtime_error: no "
            "disk");
}

TEST(Pipeline, KeepsOperatorsOfAWorkerInItsThread) {
  const int here = at::get_num_threads();
  std::atomic<int> there = 0;
  samples(
      number_loader(1, {.num_workers = 1}, [&](std::int64_t) { there = at::get_num_threads(); }));
  EXPECT_EQ(there, 1);
  EXPECT_EQ(at::get_num_threads(), here);
}

TEST(Pipeline, LoadersInsideADatasetKeepTheirRandomNumbersApart) {
  const auto draw = [] {
    return torch::randint(1 << 30, {}, worker_generator()).item<std::int64_t>();
  };
  const auto drawn = [&](bool with_inner) {
    torch::manual_seed(1);
    const auto inner = number_loader(2, {}, [&](std::int64_t) { (void)draw(); });
    const auto outer = [&](std::int64_t) {
      const auto first = draw();
      if (with_inner) {
        for ([[maybe_unused]] auto& batch : inner) {
        }
      }
      return first + draw();
    };
    return samples(make_data_loader(test::NumberDataset(3, outer)));
  };
  EXPECT_EQ(drawn(true), drawn(false));
}

}  // namespace
}  // namespace accelerate
