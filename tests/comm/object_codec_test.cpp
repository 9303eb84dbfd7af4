#include "accelerate/detail/comm/object_codec.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "accelerate/errors.h"
#include "accelerate/operations.h"
#include "comm/samples.h"

namespace lab {

struct Point {
  int x = 0;
  double y = 0;
  bool operator==(const Point&) const = default;
};

struct Note {
  std::string text;
  bool operator==(const Note&) const = default;
};
accelerate::Value to_value(const Note& note) { return accelerate::Value(note.text); }
Note from_value(std::type_identity<Note>, const accelerate::Value& value) {
  return {value.as_string()};
}

struct Opaque {
  std::string text;
};
struct Borrower {
  std::string_view text;
};

}  // namespace lab

namespace accelerate::detail::comm {
namespace {

enum class Mode : std::uint64_t { kFast, kSlow = ~std::uint64_t{0} };

static_assert(has_codec<lab::Point>() && has_codec<lab::Note>());
static_assert(has_codec<std::vector<std::map<std::string, std::optional<lab::Point>>>>());
static_assert(!has_codec<lab::Opaque>() && !has_codec<std::vector<lab::Opaque>>());
static_assert(!has_codec<int*>() && !has_codec<std::string_view>() && !has_codec<std::span<int>>());
static_assert(!has_codec<std::shared_ptr<int>>());

template <class T>
T round_trip(const T& object) {
  return decode_object<T>(encode_object(object));
}

TEST(ObjectCodec, KeepsScalarsExactly) {
  EXPECT_EQ(round_trip(true), true);
  for (const std::int64_t x :
       {std::int64_t{0}, std::int64_t{-1}, std::int64_t{63}, std::int64_t{-65},
        std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max()}) {
    EXPECT_EQ(round_trip(x), x);
  }
  EXPECT_EQ(round_trip(std::numeric_limits<std::uint64_t>::max()), ~std::uint64_t{0});
  EXPECT_EQ(round_trip(std::int8_t{-128}), -128);
  EXPECT_EQ(round_trip('x'), 'x');
  EXPECT_EQ(round_trip(0.1), 0.1);
  EXPECT_EQ(round_trip(0.1F), 0.1F);
  EXPECT_TRUE(std::isnan(round_trip(std::nan(""))));
  EXPECT_TRUE(std::signbit(round_trip(-0.0)));
  EXPECT_EQ(round_trip(Mode::kSlow), Mode::kSlow);
  EXPECT_EQ(round_trip(std::string("a\0b", 3)), std::string("a\0b", 3));
}

TEST(ObjectCodec, KeepsContainersOfContainers) {
  using Data =
      std::tuple<std::vector<int>, std::vector<bool>, std::array<std::string, 2>,
                 std::map<std::string, std::vector<lab::Point>>, std::unordered_map<int, lab::Note>,
                 std::set<int>, std::optional<int>, std::optional<int>, std::pair<int, double>,
                 std::variant<int, std::string>, std::deque<std::vector<std::string>>>;
  const Data data{{1, -2, 3},
                  {true, false},
                  {"a", "b"},
                  {{"p", {{1, 2.5}, {3, 4.5}}}, {"none", {}}},
                  {{1, {"one"}}, {2, {"two"}}},
                  {5, 4},
                  6,
                  std::nullopt,
                  {7, 8.5},
                  "nine",
                  {{"ten"}, {}}};
  EXPECT_EQ(round_trip(data), data);
}

TEST(ObjectCodec, WritesNumbersAsOneBlock) {
  EXPECT_LT(encode_object(std::vector<float>(1000)).size(), 4100);
  EXPECT_LT(encode_object(std::vector<lab::Point>(100)).size(), 100 * sizeof(lab::Point) + 100);
}

TEST(ObjectCodec, KeepsValuesWithTensorsInThem) {
  const Value value = Value::Dict{{"a", Value::List{1, 2.5, nullptr, true, "text"}},
                                  {3, Value::tuple({Value::bytes("\x01\x02")})},
                                  {true, Value(torch::arange(3))},
                                  {"info", Value(TensorInformation{{2}, torch::kHalf})}};
  const auto back = round_trip(value);
  EXPECT_EQ(back, value);
  EXPECT_EQ(back.repr(), value.repr());
}

TEST(ObjectCodec, KeepsTensorsOfEveryDtypeAndShape) {
  for (const auto dtype :
       {torch::kBool, torch::kByte, torch::kChar, torch::kShort, torch::kInt, torch::kLong,
        torch::kHalf, torch::kBFloat16, torch::kFloat, torch::kDouble, torch::kComplexFloat,
        torch::kUInt16, torch::kFloat8_e4m3fn}) {
    const auto tensor = torch::arange(6).to(dtype).reshape({2, 3}).t();
    const auto back = round_trip(tensor);
    EXPECT_EQ(back.scalar_type(), dtype);
    EXPECT_TRUE(back.to(torch::kComplexDouble).equal(tensor.to(torch::kComplexDouble))) << dtype;
  }
  EXPECT_EQ(round_trip(torch::zeros({0, 4})).sizes(), torch::IntArrayRef({0, 4}));
  EXPECT_EQ(round_trip(torch::tensor(2.5)).item<double>(), 2.5);
  EXPECT_FALSE(round_trip(torch::Tensor()).defined());
}

TEST(ObjectCodec, SaysWhichTypeWasFoundInstead) {
  EXPECT_EQ(message_of<CommError>([] { (void)decode_object<std::string>(encode_object(3)); }),
            "an object from another process could not be read: found an integer where a string was "
            "expected. Do all processes run the same program and send the same type?");
  EXPECT_NE(message_of<CommError>([] {
              (void)decode_object<std::int8_t>(encode_object(300));
            }).find("found a number that does not fit"),
            std::string::npos);
  EXPECT_NE(message_of<CommError>([] {
              (void)decode_object<std::vector<int>>(encode_object(std::vector<float>{1}));
            }).find("found data of another C++ type"),
            std::string::npos);
  EXPECT_NE(message_of<CommError>([] {
              (void)decode_object<std::tuple<int>>(encode_object(std::tuple{1, 2}));
            }).find("found a tuple of another size"),
            std::string::npos);
  EXPECT_NE(message_of<CommError>([] {
              (void)decode_object<std::variant<int>>(encode_object(std::variant<int, double>(2.5)));
            }).find("found an alternative that this variant does not have"),
            std::string::npos);
}

TEST(ObjectCodec, RefusesEveryTruncationAndTrailingBytes) {
  const auto bytes = encode_object(std::tuple{std::vector<std::string>{"a", "bc"}, 3.5,
                                              Value(Value::Dict{{"k", Value(torch::arange(2))}})});
  using Data = std::tuple<std::vector<std::string>, double, Value>;
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_THROW((void)decode_object<Data>(std::string_view(bytes).substr(0, size)), CommError)
        << size;
  }
  EXPECT_THROW((void)decode_object<Data>(bytes + "x"), CommError);
}

TEST(ObjectCodec, RefusesLengthsBeyondTheDataBeforeTakingMemory) {
  ObjectWriter list;
  list.open(ObjectTag::kList, std::uint64_t{1} << 60);
  const auto bytes = std::move(list).bytes();
  EXPECT_THROW((void)decode_object<std::vector<std::string>>(bytes), CommError);
  EXPECT_THROW((void)decode_object<Value>(bytes), CommError);

  ObjectWriter tensor;
  tensor.open(ObjectTag::kTensor, 1);
  tensor.integer(static_cast<std::int64_t>(torch::kDouble));
  write(tensor, std::vector<std::int64_t>{std::int64_t{1} << 40, std::int64_t{1} << 40});
  tensor.raw("tensor", "", 0);
  EXPECT_THROW((void)decode_object<torch::Tensor>(std::move(tensor).bytes()), CommError);
}

TEST(ObjectCodec, RefusesShapesThatAnEmptyTensorHides) {
  constexpr auto kHuge = std::int64_t{1} << 62;
  for (const auto& shape : {std::vector<std::int64_t>{0, kHuge, kHuge}, {kHuge, 0, kHuge}, {-1}}) {
    ObjectWriter tensor;
    tensor.open(ObjectTag::kTensor, 1);
    tensor.integer(static_cast<std::int64_t>(torch::kFloat));
    write(tensor, shape);
    tensor.raw("tensor", "", 0);
    EXPECT_NE(message_of<CommError>([&] {
                (void)decode_object<torch::Tensor>(std::move(tensor).bytes());
              }).find("found a tensor of an impossible shape"),
              std::string::npos);
    const Value information(TensorInformation{shape, torch::kFloat});
    EXPECT_NE(message_of<CommError>([&] {
                (void)round_trip(information);
              }).find("found a tensor of an impossible shape"),
              std::string::npos);
  }
}

TEST(ObjectCodec, ReadsOrRefusesValuesWithAnyByteChanged) {
  const auto bytes = encode_object(Value(Value::List{
      Value(torch::arange(6).reshape({2, 3})), Value(TensorInformation{{2, 0}, torch::kHalf})}));
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    for (int byte = 0; byte < 256; ++byte) {
      auto changed = bytes;
      changed[at] = static_cast<char>(byte);
      try {
        EXPECT_FALSE(decode_object<Value>(changed).is_none());
      } catch (const CommError&) {
        // Any other exception fails the test.
      }
    }
  }
}

TEST(ObjectCodec, KeepsUnorderedSetsAndOrderedDicts) {
  const std::unordered_set<std::string> set{"a", "b"};
  EXPECT_EQ(round_trip(set), set);
  torch::OrderedDict<std::string, std::vector<int>> dict;
  dict.insert("z", {1});
  dict.insert("a", {2, 3});
  const auto back = round_trip(dict);
  EXPECT_EQ(back.keys(), (std::vector<std::string>{"z", "a"}));
  EXPECT_EQ(back["a"], (std::vector{2, 3}));
  const Value::Dict values{{"t", Value(torch::arange(2))}, {3, true}};
  EXPECT_EQ(round_trip(values), values);
  EXPECT_THROW((void)decode_object<Value::Dict>(encode_object(Value(3))), CommError);

  ObjectWriter twice;
  twice.open(ObjectTag::kMap, 2);
  for (int i = 0; i < 2; ++i) {
    write(twice, std::string("k"));
    write(twice, i);
  }
  EXPECT_NE(message_of<CommError>([&] {
              (void)decode_object<torch::OrderedDict<std::string, int>>(std::move(twice).bytes());
            }).find("found a key that was there before"),
            std::string::npos);
}

TEST(ObjectCodec, RefusesNestingWithoutEnd) {
  ObjectWriter deep;
  for (int i = 0; i < 100000; ++i) deep.open(ObjectTag::kList, 1);
  const auto bytes = std::move(deep).bytes();
  EXPECT_NE(message_of<CommError>([&] {
              (void)decode_object<Value>(bytes);
            }).find("nested deeper than 500 levels"),
            std::string::npos);
}

TEST(ObjectCodec, RefusesTensorsThatHaveNoDenseData) {
  EXPECT_THROW((void)encode_object(torch::ones(2, torch::kMeta)), ArgumentError);
  EXPECT_THROW((void)encode_object(torch::eye(2).to_sparse()), ArgumentError);
}

}  // namespace
}  // namespace accelerate::detail::comm
