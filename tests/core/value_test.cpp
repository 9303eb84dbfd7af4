#include "accelerate/value.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>

#include "accelerate/enums.h"
#include "accelerate/errors.h"
#include "accelerate/value/from_value.h"
#include "core/python_text.h"
#include "reference.h"

namespace user {

struct Score {
  double loss = 0.0;
  std::optional<std::int64_t> step = std::nullopt;
  accelerate::PrecisionType precision = accelerate::PrecisionType::kNo;
  std::chrono::milliseconds pause{0};

  bool operator==(const Score&) const = default;
};
ACCELERATE_VALUE_FIELDS(Score, loss, step, precision, pause);

}  // namespace user

namespace accelerate {
namespace {

using test::from_bits;
using test::message_of;
using test::reference;

class Marker : public detail::ValueLeaf {
 public:
  explicit Marker(int number) : number_(number) {}
  std::string_view kind_name() const override { return "marker"; }
  bool equals(const ValueLeaf& other) const override {
    const auto* marker = dynamic_cast<const Marker*>(&other);
    return marker != nullptr && marker->number_ == number_;
  }
  std::string repr() const override { return "marker " + std::to_string(number_); }

 private:
  int number_;
};

Value nested(int depth) {
  Value value;
  for (int i = 0; i < depth; ++i) value = Value::list({std::move(value)});
  return value;
}

TEST(Value, IsBuiltFromPlainThingsAndKnowsItsKind) {
  using enum Value::Kind;
  EXPECT_EQ(Value().kind(), kNone);
  EXPECT_EQ(Value(nullptr).kind(), kNone);
  EXPECT_EQ(Value(std::nullopt).kind(), kNone);
  EXPECT_EQ(Value(true).kind(), kBool);
  EXPECT_EQ(Value(3).kind(), kInt);
  EXPECT_EQ(Value(std::size_t{3}).kind(), kInt);
  EXPECT_EQ(Value(2.5F).kind(), kDouble);
  EXPECT_EQ(Value("x").kind(), kString);
  EXPECT_EQ(Value(std::string("x")).kind(), kString);
  EXPECT_EQ(Value(std::string_view("x")).kind(), kString);
  EXPECT_EQ(Value::bytes("x").kind(), kBytes);
  EXPECT_EQ(Value(Value::List{1}).kind(), kList);
  EXPECT_EQ(Value::tuple({1}).kind(), kTuple);
  EXPECT_EQ(Value(Value::Dict{}).kind(), kDict);
  EXPECT_EQ(Value(std::make_shared<Marker>(1)).kind(), kObject);
  EXPECT_EQ(Value(std::vector<int>{1, 2}).repr(), "[1, 2]");
  EXPECT_EQ(Value(std::vector<bool>{true, false}).repr(), "[True, False]");
  EXPECT_EQ(Value(std::optional<int>(4)), 4);
  EXPECT_TRUE(Value(std::optional<int>()).is_none());
}

TEST(Value, RefusesAnUnsignedNumberBeyond64Bits) {
  const auto most = std::numeric_limits<std::uint64_t>::max();
  EXPECT_EQ(message_of<ArgumentError>([&] { Value{most}; }),
            "The number 18446744073709551615 does not fit into 64 bits with a sign.");
}

TEST(Value, SaysWhichKindItIsWhenAskedForAnother) {
  EXPECT_EQ(message_of<ArgumentError>([] { (void)Value("abc").as_int(); }),
            "The value is of kind string, not int: 'abc'");
  EXPECT_EQ(message_of<ArgumentError>([] { (void)Value(true).as_int(); }),
            "The value is of kind bool, not int: True");
  EXPECT_EQ(message_of<ArgumentError>([] { (void)Value(2.5).as_int(); }),
            "The value is of kind double, not int: 2.5");
  EXPECT_EQ(message_of<ArgumentError>([] { (void)Value::tuple({1}).as_list(); }),
            "The value is of kind tuple, not list: (1,)");
  EXPECT_EQ(message_of<ArgumentError>([] { (void)Value(std::make_shared<Marker>(7)).as_dict(); }),
            "The value is of kind marker, not dict: marker 7");
  EXPECT_EQ(message_of<ArgumentError>([] { (void)Value(std::string(99, 'x')).as_bool(); }),
            "The value is of kind string, not bool: '" + std::string(59, 'x') + "...");
}

TEST(Value, GivesAnIntAsDouble) { EXPECT_EQ(Value(3).as_double(), 3.0); }

TEST(Value, ComparesNumbersAsPythonDoes) {
  EXPECT_EQ(Value(2), Value(2.0));
  EXPECT_EQ(Value(true), Value(1));
  EXPECT_EQ(Value(false), Value(0.0));
  EXPECT_NE(Value(1), Value("1"));
  EXPECT_NE(Value(), Value(0));
  // 2^53 + 1 has no double; rounding it would make these equal.
  EXPECT_NE(Value(9007199254740993), Value(9007199254740992.0));
  EXPECT_NE(Value(std::numeric_limits<std::int64_t>::max()), Value(9223372036854775808.0));
  EXPECT_EQ(Value(std::numeric_limits<std::int64_t>::min()), Value(-9223372036854775808.0));
  EXPECT_NE(Value(std::nan("")), Value(std::nan("")));
  EXPECT_NE(Value(1), Value(std::numeric_limits<double>::infinity()));
}

TEST(Value, ComparesContainersByContent) {
  EXPECT_EQ(Value(Value::List{1, "a"}), Value(Value::List{1.0, "a"}));
  EXPECT_NE(Value(Value::List{1}), Value::tuple({1}));
  EXPECT_NE(Value(Value::List{1}), Value(Value::List{1, 2}));
  EXPECT_EQ(Value(Value::Dict{{"a", 1}, {"b", 2}}), Value(Value::Dict{{"b", 2}, {"a", 1}}));
  EXPECT_NE(Value(Value::Dict{{"a", 1}}), Value(Value::Dict{{"b", 1}}));
  EXPECT_NE(Value::bytes("a"), Value("a"));
  EXPECT_EQ(Value(std::make_shared<Marker>(1)), Value(std::make_shared<Marker>(1)));
  EXPECT_NE(Value(std::make_shared<Marker>(1)), Value(std::make_shared<Marker>(2)));
}

TEST(Value, PrintsNumbersAndStringsAsPythonDoes) {
  const auto table = reference("values/values.json");
  for (const auto& row : table.at("floats").as_list()) {
    EXPECT_EQ(Value(from_bits(row.items()[0].as_string())).repr(), row.items()[1].as_string());
  }
  for (const auto& row : table.at("strings").as_list()) {
    EXPECT_EQ(row.items()[0].repr(), row.items()[1].as_string());
  }
  for (const auto& row : table.at("nested").as_list()) {
    EXPECT_EQ(detail::json_loads(row.items()[0].as_string()).repr(), row.items()[1].as_string());
  }
}

TEST(Value, PrintsBytesAsPythonDoes) {
  for (const auto& row : reference("values/values.json").at("bytes").as_list()) {
    const auto& hex = row.items()[0].as_string();
    std::string bytes;
    for (std::size_t i = 0; i < hex.size(); i += 2) {
      bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
    }
    EXPECT_EQ(Value::bytes(bytes).repr(), row.items()[1].as_string());
  }
}

TEST(Value, PrintsWhatIsNotUtf8AsSurrogateEscapes) {
  // Python: b"a\xff\xc3".decode("utf-8", "surrogateescape")
  EXPECT_EQ(Value("a\xFF\xC3").repr(), "'a\\udcff\\udcc3'");
  EXPECT_EQ(Value("\xED\xA0\x80").repr(), "'\\udced\\udca0\\udc80'");  // half a surrogate pair
}

TEST(Value, PrintsTuplesAndNestsAsPythonDoes) {
  EXPECT_EQ(Value::tuple({}).repr(), "()");
  EXPECT_EQ(Value::tuple({Value::List{1}}).repr(), "([1],)");
  EXPECT_EQ(Value::list({Value::List{1}}).repr(), "[[1]]");
  EXPECT_EQ(Value::tuple(Value::List{1, 2}).repr(), "(1, 2)");
  EXPECT_EQ(Value(Value::Dict{{"a", Value::tuple({1, nullptr})}, {3, true}, {false, 1e-5}}).repr(),
            "{'a': (1, None), 3: True, False: 1e-05}");
}

TEST(Value, RefusesToWalkNestsDeeperThanTheLimit) {
  EXPECT_EQ(nested(kMaxValueDepth).repr().size(), 2 * kMaxValueDepth + 4U);
  EXPECT_EQ(message_of<ArgumentError>([] { (void)nested(kMaxValueDepth + 1).repr(); }),
            "The value is nested deeper than 500 levels.");
  EXPECT_THROW((void)(nested(kMaxValueDepth + 1) == nested(kMaxValueDepth + 1)), ArgumentError);
}

TEST(Value, CanBeReplacedByAPartOfItself) {
  Value value = Value::List{Value::List{1, 2}, 3};
  value = value.as_list()[0];
  EXPECT_EQ(value.repr(), "[1, 2]");
  Value moved = Value::Dict{{"inner", Value::Dict{{"x", 1}}}};
  moved = std::move(moved.as_dict().at("inner"));
  EXPECT_EQ(moved.repr(), "{'x': 1}");
}

TEST(Value, OfATemporaryCanBeWalked) {
  std::int64_t sum = 0;
  for (const auto& item : Value(Value::List{1, 2, 3}).as_list()) sum += item.as_int();
  EXPECT_EQ(sum, 6);
}

TEST(ValueDict, KeepsTheOrderOfInsertionAndChangesInPlace) {
  Value::Dict dict{{"b", 1}, {"a", 2}, {"b", 3}};
  EXPECT_EQ(Value(dict).repr(), "{'b': 3, 'a': 2}");
  dict.set("c", 4);
  dict["b"] = 5;
  EXPECT_TRUE(dict.erase("a"));
  EXPECT_FALSE(dict.erase("a"));
  EXPECT_EQ(Value(dict).repr(), "{'b': 5, 'c': 4}");
  for (auto& [key, value] : dict) value = key.as_string() + "!";
  EXPECT_EQ(Value(dict).repr(), "{'b': 'b!', 'c': 'c!'}");
}

TEST(ValueDict, TakesTrueAndOneForTheSameKey) {
  Value::Dict dict{{1, "one"}, {true, "true"}, {"1", "text"}};
  EXPECT_EQ(Value(dict).repr(), "{1: 'true', '1': 'text'}");
  EXPECT_EQ(dict.at(true), "true");
  EXPECT_FALSE(dict.contains(0));
}

TEST(ValueDict, NamesTheMissingKeyAndTheNearestOne) {
  const Value::Dict dict{{"learning_rate", 1}, {"steps", 2}};
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)dict.at("learning_rat"); }),
            "There is no key 'learning_rat' in the dict; did you mean 'learning_rate'? It has "
            "'learning_rate', 'steps'.");
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)dict.at(3); }),
            "There is no key 3 in the dict. It has 'learning_rate', 'steps'.");
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)Value::Dict{}.at("x"); }),
            "There is no key 'x' in the dict: it is empty.");
  Value::Dict many;
  for (int i = 0; i < 14; ++i) many.set(i, i);
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)many.at("x"); }),
            "There is no key 'x' in the dict. It has 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 2 "
            "more.");
}

TEST(ValueDict, GivesAPointerOrAFallback) {
  const Value::Dict dict{{"a", 1}};
  ASSERT_NE(dict.get("a"), nullptr);
  EXPECT_EQ(*dict.get("a"), 1);
  EXPECT_EQ(dict.get("b"), nullptr);
  EXPECT_EQ(dict.get("b", "other"), "other");
}

TEST(ValueDict, FindsEveryKeyAmongManyAlsoAfterErasuresAndCopies) {
  constexpr int kCount = 2000;
  Value::Dict dict;
  for (int i = 0; i < kCount; ++i) {
    dict.set(i, i);
    dict.set("key" + std::to_string(i), -i);
  }
  for (int i = 0; i < kCount; i += 97) EXPECT_TRUE(dict.erase(i));
  const Value::Dict copy = dict;
  dict.clear();
  EXPECT_TRUE(dict.empty());
  EXPECT_EQ(copy.size(), 2U * kCount - 21);
  for (int i = 0; i < kCount; ++i) {
    EXPECT_EQ(copy.contains(i), i % 97 != 0) << i;
    EXPECT_EQ(copy.at("key" + std::to_string(i)), -i);
  }
  EXPECT_EQ(copy.keys().front().as_string(), "key0");
}

TEST(ValueDict, LooksUpInTimeThatDoesNotGrowWithItsSize) {
  // Linear search over 200,000 keys would take minutes here.
  Value::Dict dict;
  for (int i = 0; i < 200'000; ++i) dict.set("layers." + std::to_string(i) + ".weight", i);
  std::int64_t sum = 0;
  for (int i = 0; i < 200'000; ++i) {
    sum += dict.at("layers." + std::to_string(i) + ".weight").as_int();
  }
  EXPECT_EQ(sum, 19'999'900'000);
}

TEST(MergeDicts, LetsTheSourceWinLevelByLevel) {
  const Value::Dict source{{"a", Value::Dict{{"x", 1}}}, {"c", 4}};
  Value::Dict destination{{"a", Value::Dict{{"x", 0}, {"y", 2}}}, {"b", 3}};
  EXPECT_EQ(&merge_dicts(source, destination), &destination);
  EXPECT_EQ(Value(destination).repr(), "{'a': {'x': 1, 'y': 2}, 'b': 3, 'c': 4}");
}

TEST(MergeDicts, RefusesADictAgainstAScalarAndLeavesTheDestinationAlone) {
  const Value::Dict source{{"b", 1}, {"a", Value::Dict{{"x", Value::Dict{{"y", 1}}}}}};
  Value::Dict destination{{"a", Value::Dict{{"x", 0}}}};
  EXPECT_EQ(message_of<ArgumentError>([&] { merge_dicts(source, destination); }),
            "The dicts cannot be merged: 'a.x' is a dict on one side and not on the other.");
  EXPECT_EQ(Value(destination).repr(), "{'a': {'x': 0}}");
}

TEST(MergeDicts, TakesAPartOfTheDestinationAsSource) {
  Value::Dict dict{{"inner", Value::Dict{}}};
  for (int i = 0; i < 50; ++i) dict.at("inner").as_dict().set(i, i);
  merge_dicts(dict.at("inner").as_dict(), dict);
  EXPECT_EQ(dict.size(), 51U);
  EXPECT_EQ(dict.at(49), 49);
}

TEST(PythonRound, RoundsHalfToEvenOnTheExactValue) {
  for (const auto& row : reference("values/values.json").at("rounded").as_list()) {
    const double number = from_bits(row.items()[0].as_string());
    EXPECT_EQ(detail::python_round(number, 2), from_bits(row.items()[1].as_string())) << number;
  }
}

TEST(Fields, OfAStructAreConvertedUnderTheirNames) {
  using namespace std::chrono_literals;
  const std::vector<user::Score> scores = {{2.5, 3, PrecisionType::kBf16, 1500ms}, {}};
  const Value value = to_value(scores);
  EXPECT_EQ(value.repr(),
            "[{'loss': 2.5, 'step': 3, 'precision': 'bf16', 'pause': 1.5}, "
            "{'loss': 0.0, 'step': None, 'precision': 'no', 'pause': 0.0}]");
  EXPECT_EQ(from_value<std::vector<user::Score>>(value), scores);
}

TEST(Fields, ThatAreMissingOrDoNotFitAreNamed) {
  const auto read = [](Value::Dict dict) {
    return message_of<ArgumentError>(
        [&] { static_cast<void>(from_value<user::Score>(Value(std::move(dict)))); });
  };
  EXPECT_EQ(read({{"loss", "low"}}), "the value at .loss is of kind string, not a number: 'low'");
  EXPECT_EQ(read({{"loss", 1}}),
            "the value is of kind dict, not a dict with the key 'step': {'loss': 1}");
  EXPECT_EQ(read({{"loss", 1}, {"step", 2}, {"precision", "fp4"}}),
            "the value at .precision is of kind string, not one of: no, fp8, fp16, bf16: 'fp4'");
}

}  // namespace
}  // namespace accelerate
