#include "accelerate/data/collate.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "accelerate/data_loader.h"
#include "accelerate/errors.h"
#include "data/loading.h"
#include "support/message_of.h"

namespace accelerate {
namespace {

using test::message_of;
using test::Numbers;
using test::numbers;

template <class T>
auto collate(std::vector<T> samples) {
  return DefaultCollate()(std::move(samples));
}

TEST(DefaultCollate, MakesColumnsOfNumbers) {
  EXPECT_TRUE(torch::equal(collate<float>({1.5F, 2.5F}), torch::tensor({1.5F, 2.5F})));
  EXPECT_TRUE(torch::equal(collate<double>({1.5}), torch::tensor({1.5}, torch::kDouble)));
  EXPECT_TRUE(torch::equal(collate<short>({3, 4}), torch::tensor({3, 4}, torch::kLong)));
  EXPECT_EQ(collate<std::uint8_t>({3}).scalar_type(), torch::kLong);
  EXPECT_TRUE(torch::equal(collate<bool>({true, false}), torch::tensor({true, false})));
}

TEST(DefaultCollate, StacksTensors) {
  const auto a = torch::arange(4).reshape({2, 2});
  EXPECT_TRUE(torch::equal(collate<at::Tensor>({a, a + 1}), torch::stack({a, a + 1})));
  EXPECT_TRUE(torch::equal(collate<at::Tensor>({a.t(), a}), torch::stack({a.t(), a})));
  EXPECT_EQ(collate<at::Tensor>({torch::ones({}), torch::ones({})}).sizes(), (Numbers{2}));
  EXPECT_EQ(collate<at::Tensor>({torch::ones({0}), torch::ones({0})}).sizes(), (Numbers{2, 0}));
  // As torch.stack: the wider type.
  EXPECT_EQ(collate<at::Tensor>({torch::ones(1), torch::ones(1, torch::kDouble)}).scalar_type(),
            torch::kDouble);
}

TEST(DefaultCollate, KeepsText) {
  EXPECT_EQ(collate<std::string>({"a", "b"}), (std::vector<std::string>{"a", "b"}));
}

TEST(DefaultCollate, TakesContainersApart) {
  using Sample = std::tuple<std::pair<int, std::string>, std::array<float, 2>,
                            std::map<std::string, std::vector<int>>, std::optional<int>>;
  const auto [pair, array, map, maybe] = collate<Sample>(
      {{{1, "a"}, {1, 2}, {{"k", {7, 8}}}, 5}, {{2, "b"}, {3, 4}, {{"k", {9, 0}}}, 6}});

  EXPECT_EQ(numbers(pair.first), (Numbers{1, 2}));
  EXPECT_EQ(pair.second, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(numbers(array[1]), (Numbers{2, 4}));
  // As Python: a list of columns.
  ASSERT_EQ(map.at("k").size(), 2);
  EXPECT_EQ(numbers(map.at("k")[0]), (Numbers{7, 9}));
  EXPECT_EQ(numbers(maybe.value()), (Numbers{5, 6}));
}

TEST(DefaultCollate, JoinsExamples) {
  using Sample = torch::data::Example<at::Tensor, int>;
  const torch::data::Example<> batch = collate<Sample>({{torch::ones(2), 3}, {torch::ones(2), 4}});
  EXPECT_EQ(batch.data.sizes(), (Numbers{2, 2}));
  EXPECT_EQ(numbers(batch.target), (Numbers{3, 4}));
}

struct Image {
  at::Tensor pixels;
  int label;
};
struct Images {
  at::Tensor pixels, label;
};
constexpr auto tensor_tree_fields(std::type_identity<Image>) {
  return std::tuple{field("pixels", &Image::pixels), field("label", &Image::label)};
}
constexpr auto tensor_tree_fields(std::type_identity<Images>) {
  return std::tuple{field("pixels", &Images::pixels), field("label", &Images::label)};
}
constexpr std::type_identity<Images> collated_as(std::type_identity<Image>) { return {}; }

TEST(DefaultCollate, MakesTheStructThatAUserNames) {
  const Images batch = collate<Image>({{torch::zeros(3), 1}, {torch::ones(3), 2}});
  EXPECT_EQ(batch.pixels.sizes(), (Numbers{2, 3}));
  EXPECT_EQ(numbers(batch.label), (Numbers{1, 2}));
}

TEST(DefaultCollate, JoinsValuesByTheirKinds) {
  const auto sample = [](int i) {
    return Value(Value::Dict{{"n", i},
                             {"x", 0.5 * i},
                             {"t", torch::full({2}, i)},
                             {"s", "text"},
                             {"l", Value::List{i, true}}});
  };
  const Value batch = collate<Value>({sample(1), sample(2)});
  EXPECT_EQ(numbers(batch.at("n").as_tensor()), (Numbers{1, 2}));
  EXPECT_TRUE(torch::equal(batch.at("x").as_tensor(), torch::tensor({0.5, 1.0}, torch::kDouble)));
  EXPECT_EQ(numbers(batch.at("t").as_tensor()), (Numbers{1, 1, 2, 2}));
  EXPECT_EQ(batch.at("s"), Value(Value::List{"text", "text"}));
  EXPECT_EQ(batch.at("l").as_list()[1].as_tensor().scalar_type(), torch::kBool);
}

TEST(DefaultCollate, NamesTheLeafThatDoesNotFit) {
  using Sample = std::pair<Image, std::vector<int>>;
  EXPECT_EQ(
      message_of<ArgumentError>([] {
        (void)collate<Sample>({{{torch::ones({2, 3}), 1}, {}}, {{torch::ones({2, 4}), 1}, {}}});
      }),
      "The samples of a batch cannot be stacked: the tensors at [0].pixels have shapes [2, 3] "
      "and [2, 4]. Pad them in the dataset, or pass a collate function that does.");
  EXPECT_EQ(message_of<ArgumentError>([] {
              (void)collate<Sample>({{{torch::ones(1), 1}, {1}}, {{torch::ones(1), 1}, {1, 2}}});
            }),
            "The samples of a batch cannot be joined: [1] have 1 and 2 items. Make them equally "
            "long in the dataset, or pass a collate function that does.");
  using Entries = std::map<std::string, int>;
  EXPECT_EQ(message_of<ArgumentError>([] { (void)collate<Entries>({{{"a", 1}}, {{"b", 2}}}); }),
            "The samples of a batch cannot be joined: only some of them have ['a'].");
  EXPECT_EQ(message_of<ArgumentError>([] { (void)collate<at::Tensor>({torch::ones(1), {}}); }),
            "The samples of a batch cannot be stacked: the tensor is not defined in some of them.");
  EXPECT_EQ(message_of<ArgumentError>([] { (void)collate<int>({}); }),
            "A batch without samples cannot be collated: the sampler made an empty one.");
}

// Samples of a dataset are put into the batch as they are read. What comes out is the same.

template <class F>
auto batch_of(std::int64_t size, F sample) {
  const auto loader =
      make_data_loader(FunctionDataset(size, std::move(sample)), {.batch_size = size});
  return *loader.begin();
}

TEST(CollateWhileReading, DoesNotShareMemoryWithTheDataset) {
  const auto rows = torch::arange(6).view({3, 2});
  const auto batch = batch_of(3, [&](std::int64_t i) { return rows[i]; });
  EXPECT_TRUE(torch::equal(batch, rows));
  EXPECT_FALSE(batch.is_alias_of(rows));
}

TEST(CollateWhileReading, NamesTheShapesThatDiffer) {
  const auto message = message_of<DataLoaderError>([] {
    (void)batch_of(4, [](std::int64_t i) { return std::pair{torch::ones({2, i / 2}), i}; });
  });
  EXPECT_NE(message.find("the tensors at [0] have shapes [2, 0] and [2, 1]"), std::string::npos)
      << message;
}

TEST(CollateWhileReading, StacksOtherDtypesAndStridesAsTorchDoes) {
  const auto sample = [](std::int64_t i) {
    auto tensor = torch::full({2, 3}, i, i < 2 ? torch::kFloat : torch::kDouble);
    return i == 1 ? tensor.t().contiguous().t() : tensor;
  };
  EXPECT_TRUE(
      torch::equal(batch_of(4, sample),
                   torch::stack({sample(0), sample(1), sample(2).to(torch::kDouble), sample(3)})));
}

TEST(CollateWhileReading, MatchesEntriesByKeyWhateverTheirOrder) {
  const auto sample = [](std::int64_t i) {
    torch::OrderedDict<std::string, at::Tensor> entries;
    for (const auto* key : {i % 2 == 0 ? "a" : "b", i % 2 == 0 ? "b" : "a"}) {
      entries.insert(key, torch::full({2}, i + (*key == 'b' ? 10 : 0)));
    }
    return entries;
  };
  const auto batch = batch_of(4, sample);
  EXPECT_EQ(numbers(batch["a"]), (Numbers{0, 0, 1, 1, 2, 2, 3, 3}));
  EXPECT_EQ(numbers(batch["b"]), (Numbers{10, 10, 11, 11, 12, 12, 13, 13}));
}

TEST(CollateWhileReading, SaysWhichTensorIsMissing) {
  const auto message = message_of<DataLoaderError>([] {
    (void)batch_of(3, [](std::int64_t i) {
      return std::pair{i == 1 ? at::Tensor() : torch::ones(2), torch::full({2}, i)};
    });
  });
  EXPECT_NE(message.find("the tensor at [0] is not defined in some of them"), std::string::npos)
      << message;
}

TEST(PadToMultipleOf, PutsTheValueBehindATensor) {
  const auto x = torch::arange(6).reshape({2, 3});
  EXPECT_TRUE(torch::equal(pad_to_multiple_of(x, 4, {.value = 9}),
                           torch::tensor({{0, 1, 2, 9}, {3, 4, 5, 9}})));
  EXPECT_EQ(pad_to_multiple_of(x, 4, {.dim = 0}).sizes(), (std::vector<std::int64_t>{4, 3}));
  EXPECT_TRUE(pad_to_multiple_of(x, 3).is_same(x));
}

TEST(PadToMultipleOf, StacksSequencesOfManyLengths) {
  const std::vector<torch::Tensor> sequences{torch::tensor({1, 2, 3}), torch::tensor({4})};
  EXPECT_TRUE(torch::equal(pad_to_multiple_of(sequences, 4, {.value = -1}),
                           torch::tensor({{1, 2, 3, -1}, {4, -1, -1, -1}})));
  const std::vector<torch::Tensor> rows{torch::ones({2, 5}), torch::ones({3, 5})};
  EXPECT_EQ(pad_to_multiple_of(rows, 4, {.dim = 0}).sizes(), (std::vector<std::int64_t>{2, 4, 5}));
}

TEST(PadToMultipleOf, RefusesWhatCannotBePadded) {
  const auto x = torch::ones({2, 3});
  EXPECT_NE(message_of<ArgumentError>([&] {
              (void)pad_to_multiple_of(x, 0);
            }).find("multiple is 0; it must be 1 or more"),
            std::string::npos);
  EXPECT_NE(message_of<ArgumentError>([&] {
              (void)pad_to_multiple_of(x, 4, {.dim = 2});
            }).find("dim is 2, but a tensor has shape [2, 3]"),
            std::string::npos);
  const std::vector<torch::Tensor> none;
  EXPECT_THROW((void)pad_to_multiple_of(none, 4), ArgumentError);
  const std::vector<torch::Tensor> others{torch::ones({2, 3}), torch::ones({3, 3})};
  EXPECT_NE(message_of<ArgumentError>([&] {
              (void)pad_to_multiple_of(others, 4);
            }).find("Float [2, 3] and of Float [3, 3] differ in more than dimension 1"),
            std::string::npos);
}

}  // namespace
}  // namespace accelerate
