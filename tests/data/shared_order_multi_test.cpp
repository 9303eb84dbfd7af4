// Processes with other seeds share out one random order.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "accelerate/operations.h"
#include "accelerate/random.h"
#include "accelerate/state.h"
#include "data/sharing.h"
#include "support/on_processes.h"

namespace accelerate::test {
namespace {

TEST(SharedOrder, IsThatOfProcess0WhateverTheSeeds) {
  on_processes(3, [](PartialState& state) {
    for (const bool seedable : {false, true}) {
      set_seed(static_cast<std::uint64_t>(10 + state.process_index()));
      const auto loader = prepare_data_loader(indexed(30, {.batch_size = 2, .shuffle = true}),
                                              {.use_seedable_sampler = seedable});
      std::vector<IndexBatch> epochs;
      for (int epoch = 0; epoch < 2; ++epoch) {
        IndexBatch seen;
        for (auto& batch : loader) append(seen, indices(gather_for_metrics(batch)));
        epochs.push_back(seen);
        std::ranges::sort(seen);
        EXPECT_EQ(seen, iota(30));
      }
      EXPECT_NE(epochs[0], epochs[1]);
    }
  });
}

TEST(SharedOrder, IsTakenFromProcess0BeforeEachPass) {
  on_processes(2, [](PartialState& state) {
    const auto seed = static_cast<std::uint64_t>(state.process_index());
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    const auto loader =
        prepare_data_loader(indexed(20, {.batch_size = 3, .shuffle = true, .generator = generator}),
                            {.rng_types = {RNGType::kGenerator}});
    IndexBatch seen;
    for (auto& batch : loader) append(seen, indices(gather_for_metrics(batch)));
    std::ranges::sort(seen);
    EXPECT_EQ(seen, iota(20));
  });
}

/// All samples of a pass, sorted.
IndexBatch sorted_pass(const DataLoader<at::Tensor>& loader) {
  IndexBatch seen;
  for (auto& batch : loader) append(seen, indices(gather_for_metrics(batch)));
  std::ranges::sort(seen);
  return seen;
}

/// Draws its order from the default generator.
struct OwnOrder {
  at::Tensor order = {};
  std::int64_t at = 0;
  void begin(std::int64_t) {
    order = torch::randperm(12);
    at = 0;
  }
  std::optional<std::int64_t> next() {
    if (at == 12) return std::nullopt;
    return order[at++].item<std::int64_t>();
  }
};

TEST(SharedOrder, IsOneForSamplersThatDrawFromTheDefaultGenerator) {
  on_processes(2, [](PartialState& state) {
    const auto data = torch::arange(12);
    const DataLoaderOptions options{.batch_size = 2};
    for (const bool seedable : {false, true}) {
      for (const bool synchronized : {false, true}) {
        PrepareDataLoaderOptions how{.use_seedable_sampler = seedable};
        if (synchronized) how.rng_types = {RNGType::kGenerator};
        set_seed(static_cast<std::uint64_t>(20 + state.process_index()));
        auto loaders = std::vector{
            make_data_loader(data, torch::data::samplers::RandomSampler(12), options),
            make_data_loader(data, SubsetRandomSampler(iota(12)), options),
            make_data_loader(data, WeightedRandomSampler(torch::ones(12), 12, false), options),
            make_data_loader(data, SeedableRandomSampler(12), options),
            make_data_loader(data, OwnOrder(), options)};
        for (auto& loader : loaders) loader = prepare_data_loader(loader, how);
        loaders.push_back(prepare_data_loader(indexed(12, options), how));
        loaders.back().set_sampler(std::make_shared<RandomSampler>(12));
        for (std::size_t i = 0; i < loaders.size(); ++i) {
          for (int epoch = 0; epoch < 2; ++epoch) EXPECT_EQ(sorted_pass(loaders[i]), iota(12)) << i;
        }
      }
    }
  });
}

TEST(SharedOrder, LeavesDefaultGeneratorsThatAreInStepAsTheyWouldBe) {
  on_processes(2, [] {
    const PartialState state;
    const auto make = [] {
      return make_data_loader(torch::arange(12), WeightedRandomSampler(torch::ones(12), 12),
                              {.batch_size = 2});
    };
    const auto pass = [](const DataLoader<at::Tensor>& loader) {
      set_seed(3);
      IndexBatch seen;
      for (auto& batch : loader) append(seen, indices(gather_for_metrics(batch)));
      append(seen, indices(torch::randint(1000, {1})));
      return seen;
    };
    IndexBatch alone;
    set_seed(3);
    for (auto& batch : make()) append(alone, indices(batch));
    append(alone, indices(torch::randint(1000, {1})));
    EXPECT_EQ(pass(prepare_data_loader(make(), {.use_seedable_sampler = true})), alone);
  });
}

TEST(SharedOrder, IsThatOfAGeneratorOfProcess0) {
  on_processes(2, [](PartialState& state) {
    const auto seed = static_cast<std::uint64_t>(state.process_index());
    for (const bool seedable : {false, true}) {
      const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
      const auto loaders = {
          indexed(12, {.batch_size = 2, .shuffle = true, .generator = generator}),
          make_data_loader(torch::arange(12), SubsetRandomSampler(iota(12), generator),
                           {.batch_size = 2})};
      for (const auto& plain : loaders) {
        const auto loader = prepare_data_loader(plain, {.use_seedable_sampler = seedable});
        for (int epoch = 0; epoch < 2; ++epoch) EXPECT_EQ(sorted_pass(loader), iota(12));
      }
    }
  });
}

}  // namespace
}  // namespace accelerate::test
