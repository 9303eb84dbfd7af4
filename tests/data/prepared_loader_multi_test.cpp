#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "accelerate/operations.h"
#include "accelerate/state.h"
#include "core/captured_log.h"
#include "data/sharing.h"
#include "support/message_of.h"
#include "support/on_processes.h"

namespace accelerate::test {
namespace {

using Maker = DataLoader<at::Tensor> (*)(std::int64_t size, const DataLoaderOptions& options);

PrepareDataLoaderOptions dispatching() {
  return {.device = torch::kCPU, .put_on_device = true, .dispatch_batches = true};
}

/// A pass as one process sees it.
struct Walk {
  std::string text;     // batches, length and remainder as the reference has them
  IndexBatch gathered;  // of all processes
  bool empty_batch = false;
};

Walk walk(const DataLoader<at::Tensor>& loader) {
  Walk result;
  Batches all;
  std::string remainder = "None";
  for (auto& batch : loader) {
    all.push_back(indices(batch));
    append(result.gathered, indices(gather_for_metrics(batch)));
    result.empty_batch |= batch.numel() == 0;
    if (loader.end_of_dataloader()) remainder = std::to_string(loader.remainder());
  }
  result.text = batches_text(all) + "#" + std::to_string(loader.size()) + ":" + remainder + "|";
  return result;
}

/// The texts of all processes, joined case by case.
std::vector<std::string> joined_texts(const std::vector<std::string>& mine) {
  std::vector<std::string> joined(mine.size());
  for (const auto& texts : all_gather_object(mine)) {
    for (std::size_t i = 0; i < joined.size(); ++i) joined[i] += texts[i];
  }
  return joined;
}

class OnSomeProcesses : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Processes, OnSomeProcesses, testing::Range(1, 6));

// Grids: length 0..60, batch size 1..8.

TEST_P(OnSomeProcesses, DispatchTheBatchesOfPythonAndGatherEachSampleOnce) {
  on_processes(GetParam(), [](PartialState& state) {
    const int world = state.num_processes();
    for (const auto& line : read_grid("dispatcher.txt", EvenColumn::kNo)) {
      const auto& setting = line.setting;
      if (setting.num_processes != world) continue;
      auto options = dispatching();
      options.split_batches = setting.split_batches;
      if (setting.split_batches && setting.batch_size % world != 0) {
        EXPECT_THROW(
            std::ignore = prepare_data_loader(indexed(8, loader_options(setting)), options),
            ArgumentError);
        continue;
      }
      std::vector<std::string> texts;
      for (std::int64_t length = 0; length < std::ssize(line.entries); ++length) {
        const auto seen =
            walk(prepare_data_loader(indexed(length, loader_options(setting)), options));
        texts.push_back(seen.text);
        EXPECT_FALSE(seen.empty_batch) << to_text(length, setting);
        if (!setting.drop_last) {
          ASSERT_EQ(seen.gathered, iota(length)) << to_text(length, setting);
        }
      }
      const auto all = joined_texts(texts);
      for (std::int64_t length = 0; length < std::ssize(line.entries); ++length) {
        const auto& expected = line.entries[static_cast<std::size_t>(length)];
        const auto& found = all[static_cast<std::size_t>(length)];
        if (expected == "-") {  // Python fails where there is nothing to hand out
          EXPECT_TRUE(found.starts_with("#")) << to_text(length, setting) << ": " << found;
        } else if (length >= world) {  // below, Python hands out empty batches
          ASSERT_TRUE(is_entry("dispatcher.txt", length, setting, found, expected));
        }
      }
    }
  });
}

TEST_P(OnSomeProcesses, DispatchAStreamAsTheyDispatchAList) {
  on_processes(GetParam(), [](PartialState& state) {
    for (const auto& line : read_grid("dispatcher.txt", EvenColumn::kNo)) {
      const auto& setting = line.setting;
      const int world = state.num_processes();
      if (setting.num_processes != world) continue;
      if (setting.split_batches && setting.batch_size % world != 0) continue;
      auto options = dispatching();
      options.split_batches = setting.split_batches;
      std::vector<std::string> texts;
      for (std::int64_t length = 0; length < std::ssize(line.entries); ++length) {
        const auto loader = make_data_loader(CountingWithSize(length), loader_options(setting));
        const auto seen = walk(prepare_data_loader(loader, options));
        texts.push_back(seen.text);
        if (!setting.drop_last) {
          ASSERT_EQ(seen.gathered, iota(length)) << to_text(length, setting);
        }
      }
      const auto all = joined_texts(texts);
      for (std::int64_t length = world; length < std::ssize(line.entries); ++length) {
        const auto& expected = line.entries[static_cast<std::size_t>(length)];
        const auto& found = all[static_cast<std::size_t>(length)];
        if (expected != "-") {
          ASSERT_TRUE(is_entry("dispatcher.txt", length, setting, found, expected));
        }
      }
    }
  });
}

TEST_P(OnSomeProcesses, GatherEachSampleOnceFromTheirShares) {
  on_processes(GetParam(), [](PartialState& state) {
    const int world = state.num_processes();
    for (const Maker make : {&indexed, &counted}) {
      for (const auto& line : read_grid("shard.txt", EvenColumn::kYes)) {
        const auto& setting = line.setting;
        if (setting.num_processes != world || setting.drop_last || !setting.even_batches) continue;
        for (std::int64_t length = 0; length < std::ssize(line.entries); ++length) {
          const auto loader =
              prepare_data_loader(make(length, loader_options(setting)), prepare_options(setting));
          IndexBatch gathered;
          for (auto& batch : loader) append(gathered, indices(gather_for_metrics(batch)));
          ASSERT_EQ(gathered, iota(length)) << to_text(length, setting);
        }
      }
    }
  });
}

// --- data that are not the same everywhere ------------------------------------------------------

TEST(AlreadySharded, IsSuspectedOnceAndCanBeDeclared) {
  on_processes(2, [](PartialState& state) {
    const auto rank = state.process_index();
    CapturedLog log;
    const auto same_length = make_data_loader(torch::arange(6) + 6 * rank, {.batch_size = 2});
    for (int i = 0; i < 2; ++i) std::ignore = prepare_data_loader(same_length);
    std::ignore = prepare_data_loader(indexed(8, {.batch_size = 2}));  // the same everywhere
    ASSERT_EQ(log.messages().size(), rank == 0 ? 1U : 0U);
    if (rank == 0) {
      EXPECT_NE(log.messages()[0].find("`already_sharded`"), std::string::npos);
      EXPECT_NE(log.messages()[0].find("6, 6 samples, 12 in all"), std::string::npos);
    }

    const auto loader = prepare_data_loader(same_length, {.already_sharded = true});
    IndexBatch seen;
    for (auto& batch : loader) append(seen, indices(gather_for_metrics(batch)));
    EXPECT_EQ(seen, (IndexBatch{0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11}));
    EXPECT_EQ(log.messages().size(), rank == 0 ? 1U : 0U);
  });
}

TEST(AlreadySharded, EndsForAllAtOnce) {
  on_processes(3, [](PartialState& state) {
    // 1, 3 and 5 batches: who is done repeats its own.
    const auto loader = prepare_data_loader(
        indexed(2 + 4 * state.process_index(), {.batch_size = 2}), {.already_sharded = true});
    const auto seen = batches(loader);
    ASSERT_EQ(seen.size(), 5U);
    if (state.process_index() == 0) {
      EXPECT_EQ(seen, Batches(5, IndexBatch{0, 1}));
    }
    EXPECT_EQ(loader.remainder(), -1);
    EXPECT_EQ(loader.iteration(), 1);
    EXPECT_EQ(batches(loader), seen);
  });
}

TEST(AlreadySharded, GathersEachSampleOnceWhateverTheLengths) {
  on_processes(3, [](PartialState& state) {
    const auto rank = state.process_index();
    for (const auto& sizes : {IndexBatch{3, 5, 9}, IndexBatch{4, 3, 4}, IndexBatch{2, 2, 2}}) {
      std::int64_t begin = 0;
      std::int64_t total = 0;
      for (int i = 0; i < 3; ++i) {
        if (i < rank) begin += sizes[static_cast<std::size_t>(i)];
        total += sizes[static_cast<std::size_t>(i)];
      }
      const auto mine = torch::arange(begin, begin + sizes[static_cast<std::size_t>(rank)]);
      const auto loader =
          prepare_data_loader(make_data_loader(mine, {.batch_size = 2}), {.already_sharded = true});
      EXPECT_EQ(loader.total_dataset_length(), total);
      EXPECT_EQ(loader.total_batch_size(), 6);
      IndexBatch rows;
      IndexBatch objects;
      IndexBatch items;
      for (auto& batch : loader) {
        const auto [samples, loss] = gather_for_metrics(std::pair{batch, batch.sum()});
        EXPECT_EQ(loss.numel(), 3);
        append(rows, indices(samples));
        append(objects, indices(gather_for_metrics(batch, {.use_gather_object = true})));
        append(items, gather_for_metrics(indices(batch)));
      }
      EXPECT_EQ(objects, rows);
      EXPECT_EQ(items, rows);
      std::ranges::sort(rows);
      EXPECT_EQ(rows, iota(total)) << sizes[0];
    }
  });
}

TEST(AlreadySharded, RefusesToSplitBatches) {
  EXPECT_NE(message_of<ArgumentError>([] {
              std::ignore = prepare_data_loader(indexed(8, {.batch_size = 4}),
                                                {.split_batches = true, .already_sharded = true});
            }).find("`split_batches=True` cuts each batch"),
            std::string::npos);
}

/// Cuts itself into parts of 3, 5, 7, ... numbers.
class InParts : public Counting {
 public:
  explicit InParts(std::int64_t size = 0) : Counting(size) {}
  [[nodiscard]] std::int64_t num_shards() const { return 8; }
  [[nodiscard]] InParts shard(std::int64_t /*count*/, std::int64_t index) const {
    return InParts(3 + 2 * index);
  }
};

TEST(NativeShards, EndForAllAtOnceAndAreResumed) {
  on_processes(2, [](PartialState& state) {
    const auto prepared = [] {
      return prepare_data_loader(make_data_loader(InParts(), {.batch_size = 2}));
    };
    const auto all = batches(prepared());
    const bool first = state.process_index() == 0;
    EXPECT_EQ(all, (first ? Batches{{0, 1}, {2}, {0, 1}} : Batches{{0, 1}, {2, 3}, {4}}));

    for (std::int64_t held = 1; held <= 2; ++held) {
      auto loader = prepared();
      DataLoaderState saved;
      for ([[maybe_unused]] auto& batch : loader) {
        saved = loader.state_dict();
        if (saved.batches_yielded == held) break;
      }
      auto other = prepared();
      other.load_state_dict(saved);
      EXPECT_EQ(batches(other), Batches(all.begin() + held, all.end())) << held;
    }
  });
}

TEST(AlreadySharded, NamesTheRankWithoutDataAndTheRankThatFails) {
  on_processes(2, [](PartialState& state) {
    const bool second = state.process_index() == 1;
    const auto empty =
        prepare_data_loader(indexed(second ? 0 : 4, {.batch_size = 2}), {.already_sharded = true});
    EXPECT_NE(
        message_of<ArgumentError>([&] { std::ignore = batches(empty); }).find("Rank 1 has no data"),
        std::string::npos);

    const auto failing =
        prepare_data_loader(make_data_loader(FunctionDataset(second ? 6 : 4,
                                                             [second](std::int64_t i) {
                                                               if (second && i == 3)
                                                                 throw std::runtime_error("torn");
                                                               return i;
                                                             }),
                                             {.batch_size = 2}),
                            {.already_sharded = true});
    if (second) {
      EXPECT_NE(message_of<DataLoaderError>([&] { std::ignore = batches(failing); }).find("torn"),
                std::string::npos);
    } else {
      EXPECT_NE(message_of<CommError>([&] {
                  std::ignore = batches(failing);
                }).find("Rank 1 could not load"),
                std::string::npos);
    }
  });
}

// --- dispatching --------------------------------------------------------------------------------

using Tree = std::map<std::string, std::pair<at::Tensor, std::vector<at::Tensor>>>;

TEST(Dispatcher, BringsNestedBatchesToProcessesThatReadNothing) {
  on_processes(2, [](PartialState& state) {
    const auto collate = [](const std::vector<std::int64_t>& samples) {
      const auto x = torch::tensor(samples);
      return Tree{{"b", {x, {x.to(torch::kFloat), x.unsqueeze(1).expand({-1, 3})}}},
                  {"a", {x * 2, {}}}};
    };
    const auto rank = state.process_index();
    auto reads = std::make_shared<int>(0);
    const auto loader = prepare_data_loader(
        make_data_loader(FunctionDataset(7, [reads](std::int64_t i) { return ++*reads, i; }),
                         {.batch_size = 2}, collate),
        dispatching());
    IndexBatch seen;
    for (auto& batch : loader) {
      const auto& [x, more] = batch.at("b");
      EXPECT_TRUE(torch::equal(batch.at("a").first, x * 2));
      EXPECT_TRUE(batch.at("a").second.empty());
      EXPECT_EQ(more[0].scalar_type(), torch::kFloat);
      EXPECT_TRUE(torch::equal(more[0], x.to(torch::kFloat)));
      EXPECT_TRUE(torch::equal(more[1], x.unsqueeze(1).expand({-1, 3})));
      append(seen, indices(gather_for_metrics(x)));
    }
    EXPECT_EQ(seen, iota(7));
    EXPECT_EQ(*reads, rank == 0 ? 7 : 0);
  });
}

TEST(Dispatcher, ThrowsTheErrorOfProcess0Everywhere) {
  on_processes(3, [](PartialState& state) {
    for (const std::int64_t workers : {0, 2}) {
      const auto loader = prepare_data_loader(
          make_data_loader(FunctionDataset(20,
                                           [](std::int64_t i) {
                                             if (i == 13) throw std::runtime_error("a torn record");
                                             return i;
                                           }),
                           {.batch_size = 2, .num_workers = workers}),
          dispatching());
      std::int64_t rounds = 0;
      std::string message;
      try {
        for ([[maybe_unused]] auto& batch : loader) ++rounds;
      } catch (const DataLoaderError& error) {
        message = error.what();
        EXPECT_EQ(error.batch(), 6);
        EXPECT_EQ(error.indices(), (IndexBatch{12, 13}));
        EXPECT_EQ(error.sample(), 13);
      }
      EXPECT_EQ(rounds, 2);
      EXPECT_NE(message.find("a torn record"), std::string::npos);
      EXPECT_EQ(all_gather_object(message), std::vector<std::string>(3, message));
      EXPECT_FALSE(GradientState().in_dataloader());
    }
    std::ignore = state;
  });
}

struct TornBatches {
  void begin(std::int64_t) { throw std::runtime_error("no order today"); }
  std::optional<IndexBatch> next() { return std::nullopt; }
  [[nodiscard]] std::size_t size() const { return 0; }
};

TEST(Dispatcher, ThrowsEverywhereWhatBeginningAPassThrows) {
  on_processes(2, [] {
    const PartialState state;
    const auto loader =
        prepare_data_loader(make_data_loader(torch::arange(4), TornBatches()), dispatching());
    try {
      std::ignore = batches(loader);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find("no order today"), std::string::npos);
    }
    EXPECT_EQ(indices(gather(torch::ones({1}))).size(), 2U);  // nobody was left behind
  });
}

TEST(Dispatcher, NamesTheLeafThatIsNoTensor) {
  on_processes(2, [] {
    const PartialState state;
    const auto loader =
        prepare_data_loader(make_data_loader(std::vector<std::int64_t>{1, 2, 3}, {.batch_size = 2},
                                             [](const std::vector<std::int64_t>& samples) {
                                               return std::pair{torch::tensor(samples),
                                                                std::vector<std::string>{"a", "b"}};
                                             }),
                            dispatching());
    std::string message;
    try {
      for ([[maybe_unused]] auto& batch : loader) ADD_FAILURE();
    } catch (const std::exception& error) {
      message = error.what();
    }
    EXPECT_NE(message.find("[1]"), std::string::npos) << message;
    EXPECT_EQ(all_gather_object(message), std::vector<std::string>(2, message));
  });
}

/// One batch of `sizes[i]` times `widths[i]` numbers after the other.
DataLoader<at::Tensor> uneven_batches(std::vector<std::int64_t> sizes,
                                      std::vector<std::int64_t> widths) {
  std::vector<at::Tensor> parts;
  std::int64_t start = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    parts.push_back(torch::arange(start, start + sizes[i]).unsqueeze(1).expand({-1, widths[i]}));
    start += sizes[i];
  }
  return make_data_loader(std::move(parts), {.batch_size = std::nullopt});
}

TEST(Dispatcher, TakesBatchesOfDifferentLength) {
  on_processes(2, [](PartialState& state) {
    const auto loader =
        prepare_data_loader(uneven_batches({3, 5, 2, 1, 4}, {1, 1, 1, 1, 1}), dispatching());
    IndexBatch seen;
    for (auto& batch : loader) {
      const auto all =
          gather_for_metrics(batch, {.use_gather_object = true});  // 2 and 1 in the second round
      append(seen, indices(all));
    }
    EXPECT_EQ(seen, iota(15));
    std::ignore = state;
  });
}

TEST(Dispatcher, SaysWhatToDoAboutBatchesOfOtherShapes) {
  on_processes(2, [] {
    const PartialState state;
    const auto loader = prepare_data_loader(uneven_batches({2, 2}, {3, 4}), dispatching());
    std::string message;
    try {
      for ([[maybe_unused]] auto& batch : loader) ADD_FAILURE();
    } catch (const std::exception& error) {
      message = error.what();
    }
    EXPECT_NE(message.find("`dispatch_batches=False`"), std::string::npos) << message;
    EXPECT_EQ(all_gather_object(message), std::vector<std::string>(2, message));
  });
}

TEST(Dispatcher, CutsWithTheFunctionOfTheUser) {
  on_processes(2, [](PartialState& state) {
    const auto loader = prepare_data_loader(
        indexed(8, {.batch_size = 2}), dispatching(),
        [](const at::Tensor& round, const DispatchSlice& slice) {
          return round.slice(0, slice.process_index, std::nullopt, slice.num_processes);
        });
    const auto rank = state.process_index();
    EXPECT_EQ(batches(loader), (Batches{{rank, 2 + rank}, {4 + rank, 6 + rank}}));
  });
}

TEST(Dispatcher, GivesRanksOfOneModelTheWholeBatch) {
  on_processes(2, [] {
    const PartialState state;
    auto options = dispatching();
    options.device_mesh = MeshLayout({"tp"}, {2});
    const auto loader = prepare_data_loader(indexed(5, {.batch_size = 2}), options);
    EXPECT_EQ(batches(loader), (Batches{{0, 1}, {2, 3}, {4}}));
  });
}

TEST(Dispatcher, GivesEachCopyOfACutModelItsPart) {
  on_processes(4, [](PartialState& state) {
    auto options = dispatching();
    options.device_mesh = MeshLayout({"dp_shard", "tp"}, {2, 2});
    const auto loader = prepare_data_loader(counted(8, {.batch_size = 2}), options);
    const auto data = state.process_index() / 2;
    EXPECT_EQ(batches(loader), (Batches{{2 * data, 2 * data + 1}, {4 + 2 * data, 5 + 2 * data}}));
  });
}

TEST(Dispatcher, ResumesAndSkipsOnEveryProcess) {
  on_processes(3, [](PartialState& state) {
    for (const Maker make : {&indexed, &counted}) {
      for (const std::int64_t workers : {0, 2}) {
        const auto prepared = [&] {
          return prepare_data_loader(make(23, {.batch_size = 2, .num_workers = workers}),
                                     dispatching());
        };
        const auto all = batches(prepared());
        for (std::int64_t held = 0; held + 1 < std::ssize(all); ++held) {
          auto loader = prepared();
          DataLoaderState saved;
          for ([[maybe_unused]] auto& batch : loader) {
            saved = loader.state_dict();
            if (saved.batches_yielded == held + 1) break;
          }
          const Batches rest(all.begin() + held + 1, all.end());
          auto other = prepared();
          other.load_state_dict(saved);
          EXPECT_EQ(batches(other), rest) << held;
          EXPECT_EQ(batches(skip_first_batches(prepared(), held + 1)), rest) << held;

          // The same place for processes that load their own part.
          auto shard = prepare_data_loader(make(23, {.batch_size = 2}));
          shard.load_state_dict(saved);
          IndexBatch seen;
          for (auto& batch : shard) append(seen, indices(gather_for_metrics(batch)));
          const auto order = iota(23);
          EXPECT_EQ(seen, IndexBatch(order.begin() + *saved.samples_yielded, order.end()));
        }
      }
    }
    std::ignore = state;
  });
}

TEST(Dispatcher, ShufflesInTheOrderOfProcess0AndResumesIt) {
  on_processes(2, [](PartialState& state) {
    const auto prepared = [&] {
      const auto seed = static_cast<std::uint64_t>(state.process_index());
      auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
      return prepare_data_loader(
          indexed(11, {.batch_size = 2, .shuffle = true, .generator = generator}), dispatching());
    };
    const auto pass = [](const DataLoader<at::Tensor>& loader) {
      IndexBatch seen;
      for (auto& batch : loader) append(seen, indices(gather_for_metrics(batch)));
      return seen;
    };
    const auto loader = prepared();
    DataLoaderState saved;
    for ([[maybe_unused]] auto& batch : loader) {
      saved = loader.state_dict();
      break;
    }
    const auto whole = prepared();
    const auto seen = pass(whole);
    auto resumed = prepared();
    resumed.load_state_dict(saved);
    EXPECT_EQ(pass(resumed), IndexBatch(seen.begin() + 4, seen.end()));
    EXPECT_EQ(pass(resumed), pass(whole));  // the next epoch
    auto sorted = seen;
    std::ranges::sort(sorted);
    EXPECT_EQ(sorted, iota(11));
  });
}

TEST(Dispatcher, NestsInALoopOverShares) {
  on_processes(2, [] {
    const PartialState state;
    const GradientState gradients;
    const auto train = prepare_data_loader(indexed(9, {.batch_size = 2}));
    const auto validation = prepare_data_loader(counted(5, {.batch_size = 2}), dispatching());
    IndexBatch seen;
    for (auto& batch : train) {
      IndexBatch inner;
      for (auto& other : validation) append(inner, indices(gather_for_metrics(other)));
      EXPECT_EQ(inner, iota(5));
      EXPECT_EQ(gradients.active_dataloader(), train._core());
      append(seen, indices(gather_for_metrics(batch)));
    }
    EXPECT_EQ(seen, iota(9));
    EXPECT_FALSE(gradients.in_dataloader());
  });
}

// --- gather_for_metrics -------------------------------------------------------------------------

TEST(GatherForMetrics, CutsOnlyWhatHasOneRowPerSample) {
  on_processes(2, [](PartialState& state) {
    CapturedLog log;
    const auto loader = prepare_data_loader(indexed(10, {.batch_size = 4}));
    Batches rows;
    std::int64_t names = 0;
    for (auto& batch : loader) {
      const auto [samples, loss] =
          gather_for_metrics(std::pair{batch, batch.to(torch::kFloat).mean().reshape({1})});
      EXPECT_EQ(loss.numel(), 2);  // one per process, whole also with the last batch
      rows.push_back(indices(samples));
      std::vector<std::string> mine(static_cast<std::size_t>(batch.numel()), "name");
      names += std::ssize(gather_for_metrics(mine));
    }
    EXPECT_EQ(rows, (Batches{iota(8), {8, 9}}));
    EXPECT_EQ(names, 10);
    if (state.process_index() == 0) {
      ASSERT_EQ(log.messages().size(), 1U);
      EXPECT_NE(log.messages()[0].find("2 gathered rows whole"), std::string::npos);
    }
  });
}

TEST(GatherForMetrics, KeepsTheValueOfEachProcessAlsoWithBatchesOfOne) {
  on_processes(2, [](PartialState& state) {
    const CapturedLog log;
    const auto expect_two = [&](const DataLoader<at::Tensor>& loader) {
      for (auto& batch : loader) {
        const auto mine = torch::tensor(static_cast<float>(state.process_index()));
        for (const bool as_objects : {false, true}) {
          EXPECT_EQ(indices(gather_for_metrics(mine, {.use_gather_object = as_objects})),
                    (IndexBatch{0, 1}))
              << batch;
        }
      }
    };
    expect_two(prepare_data_loader(indexed(5, {.batch_size = 1})));  // one sample in the last round
    expect_two(prepare_data_loader(indexed(5, {.batch_size = 2}), dispatching()));
    EXPECT_TRUE(log.messages().empty()) << log.messages()[0];
  });
}

TEST(GatherForMetrics, CutsNothingWithDropLastOrOutsideOfALoop) {
  on_processes(2, [] {
    const PartialState state;
    const auto loader = prepare_data_loader(indexed(11, {.batch_size = 2, .drop_last = true}));
    for (auto& batch : loader) EXPECT_EQ(gather_for_metrics(batch).numel(), 4);
    EXPECT_EQ(gather_for_metrics(torch::ones({3})).numel(), 6);
  });
}

TEST(GatherForMetrics, GathersTensorsOfDifferentShapesAsObjects) {
  on_processes(2, [](PartialState& state) {
    const auto mine = torch::full({1 + state.process_index()}, state.process_index());
    EXPECT_EQ(indices(gather_for_metrics(mine, {.use_gather_object = true})),
              (IndexBatch{0, 1, 1}));
    EXPECT_EQ(gather_for_metrics(std::vector{mine}, {.use_gather_object = true}).size(), 2U);
    EXPECT_THROW(
        std::ignore = gather_for_metrics(std::pair{mine, mine}, {.use_gather_object = true}),
        ArgumentError);
    const Value mixed = Value::List{Value(mine), "text"};
    EXPECT_EQ(gather_for_metrics(mixed).as_list().size(), 4U);
  });
}

}  // namespace
}  // namespace accelerate::test
