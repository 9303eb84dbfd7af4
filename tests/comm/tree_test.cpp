#include "accelerate/tree.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <unordered_set>

#include "accelerate/errors.h"
#include "accelerate/tree/ivalue.h"
#include "accelerate/value/from_value.h"
#include "comm/samples.h"

namespace bakery {

struct Batch {
  torch::Tensor input_ids, labels;
  std::vector<std::string> names;
};
constexpr auto tensor_tree_fields(std::type_identity<Batch>) {
  return std::tuple{accelerate::field("input_ids", &Batch::input_ids),
                    accelerate::field("labels", &Batch::labels)};
}

struct Owner {
  torch::Tensor weight;
  std::unique_ptr<int> handle;
};
constexpr auto tensor_tree_fields(std::type_identity<Owner>) {
  return std::tuple{accelerate::field("weight", &Owner::weight)};
}

struct Score {
  double value = 0;
  std::string unit;
  bool operator==(const Score&) const = default;
};
accelerate::Value to_value(const Score& score) {
  return accelerate::Value::Dict{{"value", score.value}, {"unit", score.unit}};
}
Score from_value(std::type_identity<Score>, const accelerate::Value& value) {
  return {value.at("value").as_double(), value.at("unit").as_string()};
}

}  // namespace bakery

namespace accelerate {
namespace {

using torch::Tensor;
using Named = std::map<std::string, Tensor>;

enum class Color { kRed, kBlue };

static_assert(PureTensorTree<Tensor> && PureTensorTree<std::vector<Named>>);
static_assert(PureTensorTree<std::tuple<Tensor, std::optional<Tensor>, std::array<Tensor, 2>>>);
static_assert(PureTensorTree<torch::OrderedDict<std::string, std::deque<Tensor>>>);
static_assert(PureTensorTree<torch::data::Example<>> && PureTensorTree<torch::data::TensorExample>);
static_assert(PureTensorTree<std::variant<Tensor, std::list<Tensor>>>);
static_assert(PureTensorTree<std::unordered_map<Color, Tensor>>);
static_assert(PureTensorTree<bakery::Batch> && PureTensorTree<Value> &&
              PureTensorTree<Value::Dict>);
static_assert(PureTensorTree<torch::IValue>);
static_assert(TensorTree<std::pair<Tensor, int>> && !PureTensorTree<std::pair<Tensor, int>>);
static_assert(!TensorTree<int> && !TensorTree<std::string> && !TensorTree<std::vector<bool>>);
static_assert(!TensorTree<std::set<int>> && !TensorTree<std::vector<std::string>>);

static_assert(std::same_as<tree::rebind_t<Named, int>, std::map<std::string, int>>);
static_assert(std::same_as<tree::rebind_t<std::pair<Tensor, std::vector<Tensor>>, double>,
                           std::pair<double, std::vector<double>>>);
static_assert(std::same_as<tree::rebind_t<bakery::Batch, int>, Value::Dict>);
static_assert(std::same_as<tree::rebind_t<torch::OrderedDict<std::string, Tensor>, int>,
                           torch::OrderedDict<std::string, int>>);
static_assert(std::same_as<tree::rebind_t<std::variant<Tensor, std::list<Tensor>>, int>,
                           std::variant<int, std::list<int>>>);

Tensor number(double x) { return torch::tensor(x); }
Tensor plus_one(const Tensor& tensor) { return tensor + 1; }

TEST(TreeMap, KeepsEveryContainerAndReachesEveryTensor) {
  std::tuple input{std::vector{number(1), number(2)},
                   Named{{"a", number(3)}},
                   std::array{number(4)},
                   std::pair{number(5), std::optional(number(6))},
                   std::variant<int, Tensor>(number(7)),
                   std::string("kept")};
  const auto output = tree::map(plus_one, input);

  std::vector<double> seen;
  tree::for_each(output,
                 [&](const TreePath&, const Tensor& t) { seen.push_back(t.item<double>()); });
  EXPECT_EQ(seen, (std::vector<double>{2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(std::get<5>(output), "kept");
  EXPECT_EQ(std::get<0>(input)[0].item<double>(), 1);
}

TEST(TreeMap, ReachesOrderedDictsExamplesAndStructs) {
  torch::OrderedDict<std::string, Tensor> dict;
  dict.insert("z", number(1));
  dict.insert("a", number(2));
  const auto mapped = tree::map(plus_one, dict);
  EXPECT_EQ(mapped["z"].item<double>(), 2);
  EXPECT_EQ(mapped.keys(), (std::vector<std::string>{"z", "a"}));

  const auto example = tree::map(plus_one, torch::data::Example<>(number(1), number(2)));
  EXPECT_EQ(example.data.item<double>(), 2);
  EXPECT_EQ(example.target.item<double>(), 3);

  const auto batch = tree::map(plus_one, bakery::Batch{number(1), Tensor(), {"one"}});
  EXPECT_EQ(batch.input_ids.item<double>(), 2);
  EXPECT_FALSE(batch.labels.defined());
  EXPECT_EQ(batch.names, std::vector<std::string>{"one"});
}

TEST(TreeMap, ChangesMoveOnlyTreesInPlace) {
  bakery::Owner owner{number(1), std::make_unique<int>(5)};
  const int* handle = owner.handle.get();
  const auto mapped = tree::map(plus_one, std::move(owner));
  EXPECT_EQ(mapped.weight.item<double>(), 2);
  EXPECT_EQ(mapped.handle.get(), handle);
}

TEST(TreeMap, HandsThePathToFunctionsThatTakeOne) {
  std::vector<std::string> paths;
  const auto note = [&](const TreePath& path, const Tensor& tensor) {
    paths.push_back(path.str());
    return tensor;
  };
  (void)tree::map(note, std::vector{Named{{"it's", number(1)}}});
  EXPECT_EQ(paths, std::vector<std::string>{"[0][\"it's\"]"});
}

TEST(TreeMap, RebuildsValuesWithoutTouchingTheOriginal) {
  const Value value = Value::Dict{
      {"x", Value(number(1))}, {"n", 3}, {"t", Value::tuple({Value(number(2)), "text"})}};
  const auto mapped = tree::map(plus_one, value);
  EXPECT_EQ(mapped.at("x").as_tensor().item<double>(), 2);
  EXPECT_EQ(mapped.at("t").as_tuple()[0].as_tensor().item<double>(), 3);
  EXPECT_EQ(mapped.at("n").as_int(), 3);
  EXPECT_EQ(value.at("x").as_tensor().item<double>(), 1);
}

TEST(TreeMap, RebuildsIValuesWithoutTouchingTheOriginal) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  dict.insert("x", number(1));
  dict.insert("pair", c10::ivalue::Tuple::create(number(2), 7));
  const torch::IValue value(dict);
  const auto mapped = tree::map(plus_one, value);
  EXPECT_EQ(mapped.toGenericDict().at("x").toTensor().item<double>(), 2);
  EXPECT_EQ(mapped.toGenericDict().at("pair").toTuple()->elements()[0].toTensor().item<double>(),
            3);
  EXPECT_EQ(mapped.toGenericDict().at("pair").toTuple()->elements()[1].toInt(), 7);
  EXPECT_EQ(value.toGenericDict().at("x").toTensor().item<double>(), 1);
}

TEST(TreeForEach, NamesEachLeafByItsPath) {
  const std::map<std::string, std::vector<bakery::Batch>> data{
      {"train", {{number(1), number(2), {}}, {number(3), Tensor(), {}}}}};
  EXPECT_EQ(tree::flatten(data).paths,
            (std::vector<std::string>{"['train'][0].input_ids", "['train'][0].labels",
                                      "['train'][1].input_ids"}));
  EXPECT_EQ(tree::flatten(std::unordered_map<int, Tensor>{{7, number(1)}}).paths,
            std::vector<std::string>{"[7]"});
  EXPECT_EQ(tree::flatten(number(1)).paths, std::vector<std::string>{""});
}

TEST(TreeForEach, VisitsMappingsInContainerOrderOrByKey) {
  torch::OrderedDict<std::string, Tensor> dict;
  dict.insert("z", number(1));
  dict.insert("a", number(2));
  EXPECT_EQ(tree::flatten(dict).paths, (std::vector<std::string>{"['z']", "['a']"}));
  EXPECT_EQ(tree::flatten(dict, tree::Order::kSorted).paths,
            (std::vector<std::string>{"['a']", "['z']"}));
  const Value value =
      Value::Dict{{"z", Value(number(1))}, {3, Value(number(2))}, {"a", Value(number(3))}};
  EXPECT_EQ(tree::flatten(value, tree::Order::kSorted).paths,
            (std::vector<std::string>{"['a']", "['z']", "[3]"}));
}

TEST(TreeTransform, ChangesTheLeafTypeAndMarksAbsentTensors) {
  const auto size = [](const Tensor& tensor) { return tensor.numel(); };
  const std::vector<Tensor> list{torch::zeros(3), Tensor(), torch::zeros({2, 2})};
  EXPECT_EQ(tree::transform<std::int64_t>(size, list), (std::vector<std::int64_t>{3, 0, 4}));
  const auto dict = tree::transform<std::int64_t>(size, bakery::Batch{list[0], list[2], {}});
  EXPECT_EQ(Value(dict).repr(), "{'input_ids': 3, 'labels': 4}");
  const Value tuple = Value::tuple({Value(list[0]), Value::List{Value(list[2]), 1.5}});
  EXPECT_EQ(tree::transform<std::int64_t>(size, tuple).repr(), "(3, [4, 1.5])");
}

TEST(TreeUnflatten, PutsTensorsBackInTheOrderOfFlatten) {
  const std::unordered_map<std::string, Tensor> tree{
      {"c", number(1)}, {"a", number(2)}, {"b", number(3)}};
  auto flat = tree::flatten(tree, tree::Order::kSorted);
  EXPECT_EQ(flat.paths, (std::vector<std::string>{"['a']", "['b']", "['c']"}));
  for (auto& tensor : flat.tensors) tensor = tensor * 10;
  const auto back = tree::unflatten(tree, flat.tensors, tree::Order::kSorted);
  EXPECT_EQ(back.at("a").item<double>(), 20);
  EXPECT_EQ(back.at("c").item<double>(), 10);
}

TEST(TreeUnflatten, WantsOneTensorPerLeaf) {
  const std::vector<Tensor> one{number(1)};
  EXPECT_EQ(
      message_of<ArgumentError>([&] { (void)tree::unflatten(std::pair{one[0], one[0]}, one); }),
      "unflatten got 1 tensors for a tree with 2 leaves. Pass one tensor per leaf, in the "
      "order of flatten.");
}

TEST(TreeZip, CombinesCorrespondingLeavesByKey) {
  const std::unordered_map<std::string, Tensor> a{{"x", number(1)}, {"y", number(2)}};
  const std::unordered_map<std::string, Tensor> b{{"y", number(20)}, {"x", number(10)}};
  const auto sum = tree::zip([](const Tensor& x, const Tensor& y) { return x + y; }, a, b);
  EXPECT_EQ(sum.at("x").item<double>(), 11);
  EXPECT_EQ(sum.at("y").item<double>(), 22);
}

TEST(TreeZip, NamesTheLeafThatOnlyOneTreeHas) {
  const auto add = [](const Tensor& x, const Tensor& y) { return x + y; };
  const Named a{{"x", number(1)}};
  const Named b{{"x", number(1)}, {"y", number(2)}};
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)tree::zip(add, a, b); }),
            "zip: the trees differ in structure: only tree 1 has a tensor at ['y'].");
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)tree::zip(add, b, a); }),
            "zip: the trees differ in structure: only tree 0 has a tensor at ['y'].");
}

TEST(TreeZip, BlamesTheTreeWithTheExtraKeyAlsoWhenItComesFirst) {
  const auto add = [](const Tensor& x, const Tensor& y) { return x + y; };
  const Named a{{"x", number(1)}};
  const Named b{{"a", number(2)}, {"x", number(1)}};
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)tree::zip(add, a, b); }),
            "zip: the trees differ in structure: only tree 1 has a tensor at ['a'].");
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)tree::zip(add, b, a); }),
            "zip: the trees differ in structure: only tree 0 has a tensor at ['a'].");
}

TEST(ToValue, WritesDtypesByName) {
  EXPECT_EQ(to_value(std::vector{torch::kFloat, torch::kBFloat16}).repr(),
            "['torch.float32', 'torch.bfloat16']");
  for (const auto dtype : {torch::kFloat, torch::kBool, torch::kUInt16, torch::kFloat8_e4m3fn}) {
    EXPECT_EQ(from_value<torch::ScalarType>(to_value(dtype)), dtype);
  }
  EXPECT_EQ(
      message_of<ArgumentError>([] { (void)from_value<torch::ScalarType>(Value("float")); }),
      "the value is of kind string, not the name of a dtype such as 'torch.float32': 'float'");
}

TEST(ToValue, TurnsContainersIntoListsTuplesAndDicts) {
  EXPECT_EQ(to_value(std::map<std::string, std::vector<int>>{{"a", {2, 3}}}).repr(),
            "{'a': [2, 3]}");
  EXPECT_EQ(to_value(std::tuple{1, std::pair{true, "x"}, std::optional<int>()}).repr(),
            "(1, (True, 'x'), None)");
  EXPECT_EQ(to_value(std::array{1.5, 2.5}).repr(), "[1.5, 2.5]");
  EXPECT_EQ(to_value(std::vector<bool>{true, false}).repr(), "[True, False]");
  EXPECT_EQ(to_value(std::map<Color, int>{{Color::kBlue, 4}}).repr(), "{1: 4}");
  EXPECT_EQ(to_value(std::vector{bakery::Score{2.5, "ms"}}).repr(),
            "[{'value': 2.5, 'unit': 'ms'}]");
  EXPECT_TRUE(to_value(Tensor()).is_none());
}

TEST(FromValue, ReadsBackWhatToValueWrote) {
  using Data = std::tuple<std::map<std::string, std::vector<int>>, std::optional<double>,
                          std::variant<int, std::string>, std::array<Color, 2>, std::set<int>,
                          bakery::Score>;
  const Data data{{{"a", {1, 2}}}, 2.5, "text", {Color::kBlue, Color::kRed}, {3, 1}, {1.0, "s"}};
  EXPECT_EQ(from_value<Data>(to_value(data)), data);
}

TEST(FromValue, ReadsBackStructsExamplesAndOrderedDicts) {
  const bakery::Batch batch{number(1), number(2), {}};
  const auto batch_back = from_value<bakery::Batch>(to_value(batch));
  EXPECT_TRUE(batch_back.input_ids.is_same(batch.input_ids));
  EXPECT_TRUE(batch_back.labels.is_same(batch.labels));
  const torch::data::Example<> example(number(3), number(4));
  EXPECT_TRUE(from_value<torch::data::Example<>>(to_value(example)).target.is_same(example.target));
  const torch::data::TensorExample data_alone(number(5));
  EXPECT_TRUE(
      from_value<torch::data::TensorExample>(to_value(data_alone)).data.is_same(data_alone.data));
  torch::OrderedDict<std::string, std::vector<int>> dict;
  dict.insert("z", {1, 2});
  dict.insert("a", {});
  const auto dict_back =
      from_value<torch::OrderedDict<std::string, std::vector<int>>>(to_value(dict));
  EXPECT_EQ(dict_back.keys(), (std::vector<std::string>{"z", "a"}));
  EXPECT_EQ(dict_back["z"], (std::vector{1, 2}));
  EXPECT_EQ(from_value<Value::Dict>(Value(Value::Dict{{"k", 1}})), (Value::Dict{{"k", 1}}));
  EXPECT_EQ(from_value<std::unordered_set<int>>(to_value(std::unordered_set{3, 1})),
            (std::unordered_set{3, 1}));
  EXPECT_EQ(message_of<ArgumentError>(
                [] { (void)from_value<torch::data::TensorExample>(Value(Value::Dict{{"x", 1}})); }),
            "the value is of kind dict, not a dict with the key 'data': {'x': 1}");
}

TEST(FromValue, SaysWhereAValueDoesNotFit) {
  const Value value = Value::Dict{{"sizes", Value::List{1, "two"}}};
  EXPECT_EQ(message_of<ArgumentError>(
                [&] { (void)from_value<std::map<std::string, std::vector<int>>>(value); }),
            "the value at ['sizes'][1] is of kind string, not an int that fits: 'two'");
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)from_value<std::int8_t>(Value(300)); }),
            "the value is of kind int, not an int that fits: 300");
  EXPECT_EQ(
      message_of<ArgumentError>([&] { (void)from_value<std::pair<int, int>>(Value::List{1}); }),
      "the value is of kind list, not a list or tuple of 2 items: [1]");
}

}  // namespace
}  // namespace accelerate
