#include "accelerate/data_loader.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <ranges>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/samplers.h"
#include "data/loading.h"
#include "support/message_of.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

using test::batches;
using test::iota;
using test::message_of;
using test::number_loader;
using test::Numbers;
using test::numbers;
using test::samples;

static_assert(std::ranges::input_range<DataLoader<at::Tensor>>);

TEST(DataLoader, YieldsPairsForAPairOfTensors) {
  const auto inputs = torch::arange(20).reshape({10, 2});
  const auto labels = torch::arange(10);
  auto loader = make_data_loader(std::pair{inputs, labels}, {.batch_size = 4});

  Numbers seen;
  std::vector<std::int64_t> sizes;
  for (auto& [x, y] : loader) {
    EXPECT_TRUE(torch::equal(x, inputs.index_select(0, y)));
    sizes.push_back(x.size(0));
    for (const auto label : numbers(y)) seen.push_back(label);
  }

  EXPECT_EQ(seen, iota(10));
  EXPECT_EQ(sizes, (Numbers{4, 4, 2}));
  EXPECT_EQ(loader.size(), 3);
  EXPECT_EQ(loader.dataset_size(), 10);
}

TEST(DataLoader, BatchesShareNoMemoryWithTheDataset) {
  const auto data = torch::arange(6);
  for (auto& batch : make_data_loader(data, {.batch_size = 6})) batch.zero_();
  for (auto& row : make_data_loader(data, {.batch_size = std::nullopt})) row.zero_();
  EXPECT_EQ(numbers(data), iota(6));
}

TEST(DataLoader, GathersRowsThatAreNotInOnePiece) {
  const auto data = torch::arange(24).reshape({4, 6});
  EXPECT_EQ(samples(make_data_loader(data.t(), {.batch_size = 4})), numbers(data.t()));
  const auto wanted = torch::tensor({3, 0, 1, 2, 2});
  const auto loader = make_data_loader(data, numbers(wanted), {.batch_size = 5});
  EXPECT_EQ(samples(loader), numbers(data.index_select(0, wanted)));
}

TEST(DataLoader, GathersLargeBatches) {
  const auto data = torch::arange(3 << 20).reshape({3 << 10, 1 << 10});
  const auto order = torch::randperm(3 << 10);
  const auto loader = make_data_loader(data, numbers(order), {.batch_size = 1 << 10});
  std::int64_t at = 0;
  for (auto& batch : loader) {
    EXPECT_TRUE(torch::equal(batch, data.index_select(0, order.slice(0, at, at + (1 << 10)))));
    at += 1 << 10;
  }
  EXPECT_EQ(at, 3 << 10);
}

TEST(DataLoader, UsesTheMemoryOfLargeBatchesAgainOnceNobodyHasThem) {
  const auto loader = make_data_loader(torch::rand({8, 1 << 20}), {.batch_size = 1});
  auto pass = loader.begin();
  const void* first = pass->data_ptr();
  ++pass;
  EXPECT_EQ(pass->data_ptr(), first);
  const at::Tensor kept = *pass;
  ++pass;
  const void* third = pass->data_ptr();
  EXPECT_NE(third, first);
  ++pass;
  EXPECT_EQ(pass->data_ptr(), third);
}

struct Columns {
  at::Tensor ids;
  std::map<std::string, at::Tensor> more;
  std::string name;
};
constexpr auto tensor_tree_fields(std::type_identity<Columns>) {
  return std::tuple{field("ids", &Columns::ids), field("more", &Columns::more)};
}

TEST(DataLoader, YieldsStructsForAStructOfTensors) {
  const Columns data{torch::arange(5), {{"mask", torch::arange(5) * 2}}, "train"};
  Numbers seen;
  for (auto& batch : make_data_loader(data, {.batch_size = 2, .drop_last = true})) {
    EXPECT_TRUE(torch::equal(batch.ids * 2, batch.more.at("mask")));
    EXPECT_EQ(batch.name, "train");
    for (const auto id : numbers(batch.ids)) seen.push_back(id);
  }
  EXPECT_EQ(seen, iota(4));
}

TEST(DataLoader, LoadsVectorsRangesAndFunctions) {
  EXPECT_EQ(samples(make_data_loader(std::vector<int>{5, 6, 7}, {.batch_size = 2})),
            (Numbers{5, 6, 7}));
  EXPECT_EQ(samples(make_data_loader(std::views::iota(std::int64_t{0}, std::int64_t{4}))), iota(4));
  const auto drawing = FunctionDataset{4, [](std::int64_t i, at::Generator& generator) {
                                         return torch::randint(i, i + 1, {2}, generator);
                                       }};
  EXPECT_EQ(batches(make_data_loader(drawing, {.batch_size = 2})),
            (std::vector<Numbers>{{0, 0, 1, 1}, {2, 2, 3, 3}}));
  const auto shared = std::make_shared<std::vector<bool>>(std::vector<bool>{true, false, true});
  for (auto& batch : make_data_loader(shared, {.batch_size = 3})) {
    EXPECT_EQ(batch.scalar_type(), torch::kBool);
    EXPECT_EQ(numbers(batch), (Numbers{1, 0, 1}));
  }
}

TEST(DataLoader, CallsACollateFunctionWithTheSamples) {
  const auto longest = [](std::vector<std::int64_t> some, at::Generator& generator) {
    EXPECT_TRUE(generator.defined());
    return *std::ranges::max_element(some);
  };
  const auto loader =
      make_data_loader(std::vector<std::int64_t>{1, 5, 4, 2}, {.batch_size = 2}, longest);
  Numbers seen;
  for (auto& batch : loader) seen.push_back(batch);
  EXPECT_EQ(seen, (Numbers{5, 4}));
}

TEST(DataLoader, TakesSamplersOfAllKinds) {
  const auto data = torch::arange(10);
  EXPECT_EQ(samples(make_data_loader(data, SequentialSampler(4))), iota(4));
  EXPECT_EQ(samples(make_data_loader(data, std::vector<int>{7, 1})), (Numbers{7, 1}));
  const auto torchs =
      make_data_loader(data, torch::data::samplers::SequentialSampler(10), {.batch_size = 10});
  EXPECT_EQ(samples(torchs), iota(10));
  EXPECT_EQ(samples(torchs), iota(10));

  const auto halves =
      make_data_loader(data, BatchSampler(std::make_shared<SequentialSampler>(10), 5, false));
  EXPECT_EQ(batches(halves), (std::vector<Numbers>{{0, 1, 2, 3, 4}, {5, 6, 7, 8, 9}}));
  EXPECT_EQ(halves.batch_size(), 5);
  EXPECT_EQ(halves.size(), 2);
}

TEST(DataLoader, YieldsSamplesAsTheyAreWithoutABatchSize) {
  const auto loader =
      make_data_loader(torch::arange(6).reshape({3, 2}), {.batch_size = std::nullopt});
  EXPECT_EQ(batches(loader), (std::vector<Numbers>{{0, 1}, {2, 3}, {4, 5}}));
  EXPECT_EQ(loader.size(), 3);
  EXPECT_FALSE(loader.batch_size());
  const auto twice = make_data_loader(std::vector<int>{1, 2}, {.batch_size = std::nullopt},
                                      [](int sample) { return torch::full({1}, 2 * sample); });
  EXPECT_EQ(samples(twice), (Numbers{2, 4}));
}

TEST(DataLoader, CountsCompletePassesAsEpochs) {
  auto loader = number_loader(4, {.batch_size = 2});
  EXPECT_EQ(loader.iteration(), 0);
  samples(loader);
  EXPECT_EQ(loader.iteration(), 1);
  for ([[maybe_unused]] auto& batch : loader) {
    EXPECT_FALSE(loader.end_of_dataloader());
    break;
  }
  EXPECT_EQ(loader.iteration(), 1);
  loader.set_epoch(7);
  const auto copy = loader;
  EXPECT_EQ(copy.iteration(), 7);
  std::vector<bool> ends;
  for ([[maybe_unused]] auto& batch : loader) ends.push_back(copy.end_of_dataloader());
  EXPECT_EQ(ends, (std::vector<bool>{false, true}));
  EXPECT_EQ(copy.iteration(), 8);
  auto empty = number_loader(0, {});
  EXPECT_EQ(samples(empty), Numbers());
  EXPECT_EQ(empty.iteration(), 0);
}

TEST(DataLoader, TellsADatasetTheEpoch) {
  struct Dataset {
    std::int64_t epoch = -1;
    void set_epoch(std::int64_t of_pass) { epoch = of_pass; }
    [[nodiscard]] std::size_t size() const { return 2; }
    std::int64_t get(std::size_t) { return epoch; }
  };
  auto loader = make_data_loader(Dataset(), {.num_workers = 2});
  EXPECT_EQ(samples(loader), (Numbers{0, 0}));
  EXPECT_EQ(samples(loader), (Numbers{1, 1}));
  loader.set_epoch(5);
  EXPECT_EQ(samples(loader), (Numbers{5, 5}));
}

TEST(DataLoader, DrawsTheNumbersThatPythonDraws) {
  std::ifstream in(test::reference_path("data/loader.json"));
  for (const auto& about : nlohmann::json::parse(in)) {
    for (const std::int64_t workers : {0, 1}) {
      SCOPED_TRACE(about.dump());
      const auto seed = about["seed"].get<std::uint64_t>();
      torch::manual_seed(seed);
      DataLoaderOptions options{.batch_size = about["batch_size"].get<std::int64_t>(),
                                .shuffle = about["kind"] == "shuffle",
                                .num_workers = workers,
                                .drop_last = about["drop_last"].get<bool>()};
      if (about["own"]) options.generator = at::make_generator<at::CPUGeneratorImpl>(seed + 100);
      std::vector<std::string> base_seeds;
      if (workers == 1) {
        options.worker_init_fn = [&](std::int64_t, std::uint64_t base) {
          base_seeds.push_back(std::to_string(static_cast<std::int64_t>(base)));
        };
      }
      const auto size = about["size"].get<std::int64_t>();
      const auto loader = [&] {
        const auto data = torch::arange(size);
        if (about["kind"] == "weighted") {
          const auto weights = torch::arange(size).remainder(3).add(1).to(torch::kDouble);
          const std::vector<double> list(weights.data_ptr<double>(),
                                         weights.data_ptr<double>() + size);
          return make_data_loader(data, WeightedRandomSampler(list, size, true, options.generator),
                                  options);
        }
        if (about["kind"] == "subset") {
          const auto some = numbers(torch::arange(0, size, 2));
          return make_data_loader(data, SubsetRandomSampler(some, options.generator), options);
        }
        return make_data_loader(data, options);
      }();
      EXPECT_EQ(loader.size(), about["length"].get<std::int64_t>());
      for (const auto& pass : about["passes"]) {
        EXPECT_EQ(batches(loader), pass.get<std::vector<Numbers>>());
      }
      const auto after = torch::empty({}, torch::kLong).random_(options.generator);
      EXPECT_EQ(std::to_string(after.item<std::int64_t>()), about["after"].get<std::string>());
      if (workers == 1) {
        EXPECT_EQ(base_seeds, about["base_seeds"].get<std::vector<std::string>>());
      }
    }
  }
}

void expect_refused(const DataLoaderOptions& options, const std::string& text) {
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)make_data_loader(torch::arange(4), options); }),
            text);
}

TEST(DataLoader, RefusesOptionsThatContradict) {
  using std::chrono::milliseconds;
  expect_refused({.batch_size = 0},
                 "batch_size is 0, but a batch needs at least one sample. Leave it unset "
                 "(std::nullopt) where the dataset yields batches.");
  expect_refused({.num_workers = -1},
                 "num_workers is -1, but must not be negative; 0 loads in the calling thread.");
  expect_refused({.num_workers = 1, .timeout = milliseconds(-5)},
                 "timeout is -5 ms, but must not be negative; 0 sets no limit.");
  expect_refused({.num_workers = 1, .prefetch_factor = 0},
                 "prefetch_factor is 0, but a worker needs at least one batch to load.");
  expect_refused({.prefetch_factor = 2},
                 "prefetch_factor is for workers, but num_workers is 0. Set num_workers, or leave "
                 "prefetch_factor as it is.");
  expect_refused({.persistent_workers = true},
                 "persistent_workers is for workers, but num_workers is 0. Set num_workers, or "
                 "leave persistent_workers as it is.");
  expect_refused({.timeout = milliseconds(5)},
                 "timeout is for workers, but num_workers is 0. Set num_workers, or leave timeout "
                 "as it is.");
  expect_refused({.batch_size = std::nullopt, .drop_last = true},
                 "drop_last is set and batch_size is not, but without a batch size no batch is "
                 "incomplete. Set batch_size, or leave drop_last out.");
  const auto data = torch::arange(4);
  EXPECT_EQ(message_of<ArgumentError>(
                [&] { (void)make_data_loader(data, SequentialSampler(4), {.shuffle = true}); }),
            "There is a sampler and shuffle is set as well, but each of them decides the order. "
            "Leave one of them out.");
  const BatchSampler pairs(std::make_shared<SequentialSampler>(4), 2, false);
  for (const DataLoaderOptions& options :
       {DataLoaderOptions{.batch_size = 2}, DataLoaderOptions{.shuffle = true},
        DataLoaderOptions{.drop_last = true}}) {
    EXPECT_EQ(message_of<ArgumentError>([&] { (void)make_data_loader(data, pairs, options); }),
              "A batch sampler decides on batch_size, shuffle and drop_last itself. Leave these "
              "options out.");
  }
}

TEST(DataLoader, RefusesNumbersThatNoMemoryHolds) {
  const auto refusal = [](const DataLoaderOptions& options) {
    return message_of<ArgumentError>([&] { (void)number_loader(10, options); });
  };
  EXPECT_EQ(refusal({.batch_size = std::int64_t{1} << 60}),
            "batch_size is 1152921504606846976, but a batch has at most 1099511627776 samples "
            "(2^40). To load all data at once pass their number.");
  EXPECT_EQ(refusal({.num_workers = std::int64_t{1} << 60}),
            "num_workers is 1152921504606846976, but a data loader has at most 65536 threads. One "
            "per core is usual.");
  EXPECT_EQ(
      refusal({.num_workers = 2, .prefetch_factor = std::int64_t{1} << 40}),
      "prefetch_factor is 1099511627776 and num_workers is 2, but a data loader holds at most "
      "1048576 batches (2^20). A prefetch_factor of 2 to 16 is usual.");
}

TEST(DataLoader, TakesMemoryForTheDataThatAreThere) {
  const DataLoaderOptions options{.batch_size = std::int64_t{1} << 40};
  EXPECT_EQ(batches(number_loader(10, options)), std::vector<Numbers>{iota(10)});
  auto ahead = options;
  ahead.num_workers = 2;
  ahead.prefetch_factor = 1 << 19;
  EXPECT_EQ(batches(number_loader(10, ahead)), std::vector<Numbers>{iota(10)});
  // Larger than what is taken at once.
  EXPECT_EQ(batches(number_loader(100'000, {.batch_size = 70'000})),
            (std::vector<Numbers>{iota(70'000), Numbers(numbers(torch::arange(70'000, 100'000)))}));
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they take all addresses
TEST(DataLoader, RefusesMoreWorkersThanTheSystemStarts) {
  const auto loader = number_loader(10, {.num_workers = 60'000, .prefetch_factor = 1});
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &before), 0);
  rlimit tight = before;
  tight.rlim_cur = std::size_t{8} << 30;  // a stack has 8 MiB
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &tight), 0);
  const auto text = message_of<ArgumentError>([&] { (void)loader.begin(); });
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &before), 0);
  EXPECT_TRUE(text.starts_with("num_workers is 60000, but the system starts no more than "))
      << text;
}
#endif

TEST(DataLoader, RefusesDataThatCannotBeLoaded) {
  EXPECT_EQ(message_of<ArgumentError>(
                [] { (void)make_data_loader(std::pair{torch::arange(4), torch::arange(5)}); }),
            "The tensors of a dataset must have equally many rows, but [0] has 4 and [1] has 5.");
  EXPECT_EQ(message_of<ArgumentError>([] { (void)make_data_loader(torch::tensor(1)); }),
            "A dataset of tensors needs rows, but the tensor has no dimension.");
  EXPECT_EQ(message_of<DataLoaderError>(
                [] { samples(make_data_loader(torch::arange(4), std::vector<int>{1, 4})); }),
            "Batch 1 of the data loader (sample 4) could not be loaded: "
            "accelerate::ArgumentError: Sample 4 was asked for, but the dataset has 4 samples.");
  EXPECT_EQ(
      message_of<ArgumentError>(
          [] { (void)make_data_loader(std::vector<int>{1}, {.batch_size = std::nullopt}); }),
      "batch_size is not set, so each sample of the dataset is to be a batch, but what is set "
      "to collate makes a batch of several samples. Set batch_size, or pass a collate "
      "function that takes one sample.");
}

}  // namespace
}  // namespace accelerate
