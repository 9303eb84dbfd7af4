#include "accelerate/samplers.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "accelerate/data/batch_samplers.h"
#include "accelerate/data/sampler_adaptors.h"
#include "accelerate/errors.h"
#include "data/index_reference.h"
#include "data/index_samplers.h"
#include "support/message_of.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

using test::message_of;
using test::rest_of;
using test::StridingSampler;
using Json = nlohmann::json;

const Json& python() {
  static const auto values = [] {
    std::ifstream in(test::reference_path("data/samplers.json"));
    return Json::parse(in);
  }();
  return values;
}

/// Whether the reference has these indices: more than 64 as the hash of their text.
testing::AssertionResult are_drawn(const IndexBatch& indices, const Json& expected) {
  const auto text = test::indices_text(indices);
  const bool many = indices.size() > 64;
  if (many ? Json(test::fnv(text)) == expected : Json(indices) == expected) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure()
         << "\n  came:     " << indices.size() << " indices: " << text.substr(0, 400)
         << (text.size() > 400 ? "..." : "")
         << "\n  expected: " << (expected.is_string() ? "indices whose text has the hash " : "")
         << expected.dump();
}

IndexBatch pass_of(Sampler& sampler, std::int64_t epoch = 0) {
  return rest_of(*sampler.begin(epoch));
}

at::Generator seeded(std::uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

std::string next_number(const std::optional<at::Generator>& generator) {
  return std::to_string(torch::empty({}, torch::kLong).random_(generator).item<std::int64_t>());
}

/// A generator of the sampler's own, or none and a seeded default one.
std::optional<at::Generator> start(const Json& about) {
  const auto seed = about["seed"].get<std::uint64_t>();
  torch::manual_seed(seed);
  if (!about["own"].get<bool>()) return std::nullopt;
  return seeded(seed);
}

/// Complete passes, one that is left after five indices, one more, and where the generator stands.
void expect_drawn(Sampler& sampler, const std::optional<at::Generator>& generator,
                  const Json& expected) {
  SCOPED_TRACE(expected.dump());
  const auto& passes = expected["passes"];
  for (std::size_t i = 0; i + 1 < passes.size(); ++i)
    EXPECT_TRUE(are_drawn(pass_of(sampler), passes[i]));
  std::array<std::int64_t, 5> some{};
  sampler.begin(0)->take(some);
  EXPECT_TRUE(are_drawn(pass_of(sampler), passes.back()));
  EXPECT_EQ(next_number(generator), expected["then"].get<std::string>());
}

TEST(SequentialSampler, CountsUp) {
  SequentialSampler sampler(3);
  EXPECT_EQ(pass_of(sampler), (IndexBatch{0, 1, 2}));
  EXPECT_EQ(sampler.size(), 3);
  EXPECT_FALSE(sampler.can_own_generator());
  EXPECT_THROW(sampler.set_generator(seeded(1)), UnsupportedError);
  EXPECT_THROW(SequentialSampler(-1), ArgumentError);
}

TEST(SeedableRandomSampler, DrawsPythonsPermutationOfEachEpoch) {
  for (const auto& expected : python()["seedable"]) {
    SeedableRandomSampler sampler(expected["length"].get<std::int64_t>(),
                                  {.replacement = expected["replacement"].get<bool>(),
                                   .num_samples = expected["num_samples"].get<std::int64_t>(),
                                   .data_seed = expected["seed"].get<std::int64_t>()});
    for (std::int64_t epoch = 0; epoch < 4; ++epoch) {
      EXPECT_TRUE(
          are_drawn(pass_of(sampler, epoch), expected["epochs"][static_cast<std::size_t>(epoch)]))
          << expected.dump() << epoch;
    }
  }
}

TEST(SeedableRandomSampler, DrawsTheSameFromAGeneratorThatItIsGiven) {
  const SeedableRandomSamplerOptions options{.generator = seeded(5), .data_seed = 0};
  SeedableRandomSampler sampler(10, options);
  EXPECT_EQ(pass_of(sampler, 0), (IndexBatch{4, 1, 7, 5, 3, 9, 0, 8, 6, 2}));
  EXPECT_EQ(pass_of(sampler, 1), (IndexBatch{5, 6, 1, 2, 0, 8, 9, 3, 7, 4}));
  EXPECT_EQ(pass_of(sampler, 0), (IndexBatch{4, 1, 7, 5, 3, 9, 0, 8, 6, 2}));
}

TEST(SeedableRandomSampler, TakesItsSeedFromTheDefaultGenerator) {
  const auto& expected = python()["inherited"];
  torch::manual_seed(7);
  SeedableRandomSampler sampler(10, {.generator = seeded(99)});
  EXPECT_EQ(sampler.initial_seed(), expected["initial_seed"].get<std::uint64_t>());
  for (std::int64_t epoch = 0; epoch < 2; ++epoch) {
    EXPECT_TRUE(
        are_drawn(pass_of(sampler, epoch), expected["epochs"][static_cast<std::size_t>(epoch)]));
  }
}

TEST(SeedableRandomSampler, LeavesTheDefaultGeneratorAlone) {
  torch::manual_seed(3);
  const auto expected = next_number(std::nullopt);
  torch::manual_seed(3);
  SeedableRandomSampler sampler(100, {.data_seed = 1});
  std::ignore = pass_of(sampler);
  EXPECT_EQ(next_number(std::nullopt), expected);
}

TEST(RandomSampler, DrawsPythonsNumbers) {
  for (const auto& expected : python()["random"]) {
    const auto generator = start(expected);
    RandomSampler sampler(expected["length"].get<std::int64_t>(),
                          {.replacement = expected["replacement"].get<bool>(),
                           .num_samples = expected["num_samples"].get<std::int64_t>(),
                           .generator = generator});
    expect_drawn(sampler, generator, expected);
  }
}

TEST(RandomSampler, DrawsPythonsNumbersUnderALoader) {
  for (const auto& expected : python()["loader"]) {
    const auto generator = start(expected);
    const auto length = expected["length"].get<std::int64_t>();
    BatchSampler batches(
        std::make_shared<RandomSampler>(length, RandomSamplerOptions{.generator = generator}), 4,
        false);
    for (const auto& epoch : expected["epochs"]) {
      std::ignore = next_number(generator);  // the base seed of the workers
      IndexBatch indices;
      for (const auto& batch : test::batches_of(batches)) {
        indices.insert(indices.end(), batch.begin(), batch.end());
      }
      EXPECT_TRUE(are_drawn(indices, epoch)) << expected.dump();
    }
    EXPECT_EQ(next_number(generator), expected["then"].get<std::string>()) << expected.dump();
  }
}

TEST(RandomSampler, RefusesAPassWithoutIndices) {
  EXPECT_THROW(RandomSampler(0), ArgumentError);
  EXPECT_THROW(RandomSampler(0, {.num_samples = 3}), ArgumentError);
  EXPECT_EQ(message_of<ArgumentError>([] { RandomSampler(5, {.num_samples = 0}); }),
            "num_samples should be a positive integer value, but got num_samples=0. A random "
            "sampler needs at least one sample to draw.");
}

TEST(RandomSampler, CanBeGivenAGeneratorLater) {
  RandomSampler sampler(10);
  EXPECT_TRUE(sampler.can_own_generator());
  EXPECT_FALSE(sampler.generator());
  sampler.set_generator(seeded(42));
  EXPECT_EQ(pass_of(sampler), (IndexBatch{2, 6, 1, 8, 4, 5, 0, 9, 3, 7}));
}

TEST(SubsetRandomSampler, DrawsPythonsNumbers) {
  for (const auto& expected : python()["subset"]) {
    const auto generator = start(expected);
    IndexBatch indices = test::iota(expected["length"].get<std::int64_t>());
    for (auto& index : indices) index = 3 * index + 1;
    SubsetRandomSampler sampler(indices, generator);
    EXPECT_EQ(sampler.size(), std::ssize(indices));
    expect_drawn(sampler, generator, expected);
  }
}

TEST(WeightedRandomSampler, DrawsPythonsNumbers) {
  for (const auto& expected : python()["weighted"]) {
    const auto generator = start(expected);
    std::vector<double> weights;
    for (std::int64_t i = 0; i < expected["length"].get<std::int64_t>(); ++i) {
      weights.push_back(1.0 / static_cast<double>(1 + i % 7));
    }
    WeightedRandomSampler sampler(weights, expected["num_samples"].get<std::int64_t>(),
                                  expected["replacement"].get<bool>(), generator);
    EXPECT_EQ(sampler.size(), expected["num_samples"].get<std::int64_t>());
    expect_drawn(sampler, generator, expected);
  }
}

TEST(WeightedRandomSampler, RefusesWhatItCannotDrawFrom) {
  EXPECT_THROW(WeightedRandomSampler(std::vector{1.0}, 0), ArgumentError);
  EXPECT_EQ(message_of<ArgumentError>([] { WeightedRandomSampler(torch::ones({2, 3}), 4); }),
            "weights should be a 1d sequence but given weights have shape [2, 3].");
}

TEST(ListSampler, KeepsTheOrderOfAList) {
  const auto sampler = as_sampler(std::vector<unsigned>{4, 2, 7});
  EXPECT_EQ(pass_of(*sampler), (IndexBatch{4, 2, 7}));
  EXPECT_EQ(sampler->size(), 3);
  EXPECT_EQ(pass_of(*as_sampler(std::vector<int>{})), IndexBatch{});
}

TEST(TorchSampler, IsWalkedAsLibTorchWalksIt) {
  torch::manual_seed(11);
  torch::data::samplers::RandomSampler theirs(20);
  theirs.reset();
  const auto expected = *theirs.next(20);

  torch::manual_seed(11);
  const auto sampler = as_sampler(torch::data::samplers::RandomSampler(20));
  EXPECT_EQ(pass_of(*sampler), IndexBatch(expected.begin(), expected.end()));
  EXPECT_EQ(pass_of(*as_sampler(torch::data::samplers::SequentialSampler(3))),
            (IndexBatch{0, 1, 2}));
}

TEST(TorchSampler, IsToldTheEpoch) {
  const auto sampler = as_sampler(torch::data::samplers::DistributedRandomSampler(20, 2, 1));
  EXPECT_EQ(sampler->size(), std::nullopt) << "LibTorch keeps it to itself";
  const auto first = pass_of(*sampler, 0);
  EXPECT_NE(first, pass_of(*sampler, 1));
  EXPECT_EQ(first, pass_of(*sampler, 0));
}

TEST(UserSampler, IsWalked) {
  const auto sampler = as_sampler(StridingSampler(5));
  EXPECT_EQ(sampler->size(), 5);
  EXPECT_EQ(pass_of(*sampler, 1), (IndexBatch{1, 3, 0, 2, 4}));
}

TEST(UserSampler, EndsAnOlderPassWhenANewOneBegins) {
  const auto shared = std::make_shared<StridingSampler>(5);
  const auto sampler = as_sampler(shared);
  auto older = sampler->begin(0);
  const auto newer = sampler->begin(0);
  EXPECT_THROW(std::ignore = next_index(*older), StateError);
  EXPECT_EQ(next_index(*newer), 0);
}

/// Every kind of sampler over 50 indices, made anew at each call.
struct Kind {
  const char* name;
  std::function<std::shared_ptr<Sampler>()> make;
  bool several_passes = true;
};

std::vector<Kind> kinds() {
  const auto numbers = [] {
    auto indices = test::iota(50);
    std::ranges::reverse(indices);
    return indices;
  };
  const std::vector<double> weights(50, 1.0);
  using R = RandomSamplerOptions;
  return {
      {"sequential", [] { return std::make_shared<SequentialSampler>(50); }},
      {"list", [=] { return std::make_shared<ListSampler>(numbers()); }},
      {"random", [] { return std::make_shared<RandomSampler>(50); }},
      {"random, own",
       [] { return std::make_shared<RandomSampler>(50, R{.generator = seeded(3)}); }},
      {"random, more",
       [] {
         return std::make_shared<RandomSampler>(20, R{.num_samples = 50, .generator = seeded(3)});
       }},
      {"random, twice",
       [] {
         return std::make_shared<RandomSampler>(25, R{.num_samples = 50, .generator = seeded(3)});
       }},
      {"replacement",
       [] {
         return std::make_shared<RandomSampler>(9, R{.replacement = true, .num_samples = 50});
       }},
      {"replacement, own",
       [] {
         return std::make_shared<RandomSampler>(
             9, R{.replacement = true, .num_samples = 50, .generator = seeded(3)});
       }},
      {"seedable", [] { return std::make_shared<SeedableRandomSampler>(50); }},
      {"subset", [=] { return std::make_shared<SubsetRandomSampler>(numbers()); }},
      {"subset, own", [=] { return std::make_shared<SubsetRandomSampler>(numbers(), seeded(3)); }},
      {"weighted", [=] { return std::make_shared<WeightedRandomSampler>(weights, 50); }},
      {"weighted, own",
       [=] { return std::make_shared<WeightedRandomSampler>(weights, 50, true, seeded(3)); }},
      {"LibTorch's", [] { return as_sampler(torch::data::samplers::RandomSampler(50)); }, false},
      {"a user's", [] { return as_sampler(StridingSampler(50)); }, false},
  };
}

TEST(Samplers, SkipAsManyAsTheyWouldTake) {
  for (const auto& kind : kinds()) {
    for (const std::int64_t before : {0, 1, 24, 25, 33, 50}) {
      for (const std::int64_t count : {0, 1, 7, 17, 25, 26, 32, 49, 50, 51, 1000}) {
        SCOPED_TRACE(std::string(kind.name) + " " + std::to_string(before) + " " +
                     std::to_string(count));
        const auto sampler = kind.make();
        auto pass = sampler->begin(0);
        auto all = rest_of(*pass);
        pass->rewind();
        IndexBatch taken(static_cast<std::size_t>(before));
        ASSERT_EQ(pass->take(taken), taken.size());
        const auto skipped = std::min<std::int64_t>(count, 50 - before);
        EXPECT_EQ(pass->skip(count), skipped);
        EXPECT_EQ(rest_of(*pass), IndexBatch(all.begin() + before + skipped, all.end()));
      }
    }
  }
}

TEST(Samplers, RepeatAnOrderFromTheStateOfItsGenerator) {
  for (const auto& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    torch::manual_seed(5);
    const auto sampler = kind.make();
    std::ignore = pass_of(*sampler);
    const auto pass = sampler->begin(1);
    const auto expected = rest_of(*pass);
    const auto following = pass_of(*sampler, 2);

    torch::manual_seed(6);  // another process, which did not see the first pass
    const auto repeated = kind.make();
    EXPECT_EQ(rest_of(*repeated->begin(1, pass->generator_state())), expected);
    // From a generator of its own the orders go on as they did.
    if (repeated->generator()) {
      EXPECT_EQ(pass_of(*repeated, 2), following);
    }
  }
}

TEST(Samplers, RepeatingAnOrderLeavesTheDefaultGeneratorAlone) {
  for (const auto& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    const auto sampler = kind.make();
    const auto pass = sampler->begin(0);
    torch::manual_seed(8);
    std::ignore = rest_of(*sampler->begin(0, pass->generator_state()));
    const auto number = next_number(std::nullopt);
    torch::manual_seed(8);
    EXPECT_EQ(number, next_number(std::nullopt));
  }
}

TEST(SeedableRandomSampler, DrawsWhenAPassBegins) {
  SeedableRandomSampler sampler(10, {.generator = seeded(5), .data_seed = 0});
  const auto first = sampler.begin(0);
  const auto second = sampler.begin(1);
  EXPECT_EQ(rest_of(*first), (IndexBatch{4, 1, 7, 5, 3, 9, 0, 8, 6, 2}));
  EXPECT_EQ(rest_of(*second), (IndexBatch{5, 6, 1, 2, 0, 8, 9, 3, 7, 4}));
}

TEST(Samplers, HaveSeveralPassesUnderWay) {
  for (const auto& kind : kinds()) {
    const auto sampler = kind.make();
    // A user's sampler holds its position itself; numbers of one generator go to who draws first.
    if (!kind.several_passes || sampler->generator()) continue;
    SCOPED_TRACE(kind.name);
    auto first = sampler->begin(0);
    IndexBatch indices(20);
    first->take(indices);
    auto second = sampler->begin(0);
    std::ignore = rest_of(*second);
    for (const auto index : rest_of(*first)) indices.push_back(index);
    EXPECT_EQ(indices, rest_of(*sampler->begin(0, first->generator_state())));
  }
}

}  // namespace
}  // namespace accelerate
