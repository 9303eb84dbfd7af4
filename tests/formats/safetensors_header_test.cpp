// Each way in which a file can be wrong, with the exact error.
#include "formats/safetensors_header.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "accelerate/errors.h"
#include "core/files.h"
#include "formats/mapped_file.h"
#include "support/command.h"
#include "support/message_of.h"

namespace accelerate::detail::formats {
namespace {

using test::message_of;

std::string length_prefix(std::uint64_t length) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(length >> (8 * i) & 0xFF);
  return bytes;
}

std::string file_of(const std::string& json, std::size_t data_bytes = 0) {
  return length_prefix(json.size()) + json + std::string(data_bytes, '\0');
}

// A header with one tensor, its fields as given.
std::string tensor(const std::string& fields, std::size_t data_bytes = 8) {
  return file_of(R"({"w":{)" + fields + "}}", data_bytes);
}

std::string error_of(const std::string& file) {
  return message_of<FormatError>([&] { (void)read_safetensors_header(file, "f"); });
}

struct Attack {
  const char* name;
  std::string file;
  const char* error;
};

void PrintTo(const Attack& attack, std::ostream* out) { *out << attack.name; }

class SafetensorsAttack : public testing::TestWithParam<Attack> {};

TEST_P(SafetensorsAttack, IsRefused) { EXPECT_EQ(error_of(GetParam().file), GetParam().error); }

const std::string kGood = R"("dtype":"F32","shape":[2],"data_offsets":[0,8])";

INSTANTIATE_TEST_SUITE_P(
    Length, SafetensorsAttack,
    testing::Values(
        Attack{"Empty", "",
               "'f', byte 0: the file has 0 bytes; a safetensors file begins with 8 that tell the "
               "length of its header."},
        Attack{"SevenBytes", std::string(7, '\0'),
               "'f', byte 0: the file has 7 bytes; a safetensors file begins with 8 that tell the "
               "length of its header."},
        Attack{"HeaderLongerThanAllowed", length_prefix(100'000'001) + "{}",
               "'f', byte 0: the header would have 100000001 bytes, more than the 100000000 that "
               "are allowed. It may be no safetensors file."},
        Attack{"LengthThatOverflows", length_prefix(~std::uint64_t{0}) + "{}",
               "'f', byte 0: the header would have 18446744073709551615 bytes, more than the "
               "100000000 that are allowed. It may be no safetensors file."},
        Attack{"HeaderBeyondTheEnd", length_prefix(3) + "{}",
               "'f', byte 0: the header has 3 bytes, but the file ends after 2 of them."}),
    [](const auto& test) { return test.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Json, SafetensorsAttack,
    testing::Values(
        Attack{"NoHeader", file_of(""), "'f', byte 8: the header does not begin with '{'."},
        Attack{"List", file_of("[]"), "'f', byte 8: the header does not begin with '{'."},
        Attack{"BlankBeforeTheHeader", file_of(" {}"),
               "'f', byte 8: the header does not begin with '{'."},
        Attack{"NotUtf8", file_of("{\"\xff\":{}}"), "'f', byte 10: the header is not UTF-8."},
        Attack{"OverlongUtf8", file_of("{\"abcdefgh\xc0\xaf\":{}}"),
               "'f', byte 18: the header is not UTF-8."},
        Attack{"SurrogateInUtf8", file_of("{\"\xed\xa0\x80\":{}}"),
               "'f', byte 10: the header is not UTF-8."},
        Attack{"NotClosed", file_of("{"), "'f', byte 9: expected a key in double quotes."},
        Attack{"CommaBeforeTheEnd", file_of(R"({"__metadata__":{},})"),
               "'f', byte 27: expected a key in double quotes."},
        Attack{"TwoDocuments", file_of("{}{}"),
               "'f', byte 10: the header goes on behind its JSON."},
        Attack{"ZeroByteBehindTheJson", file_of(std::string("{}\0", 3)),
               "'f', byte 10: the header goes on behind its JSON."},
        Attack{"NoColon", file_of(R"({"w" {}})"), "'f', byte 13: expected ':' behind a key."},
        Attack{"KeyWithoutQuotes", file_of("{w:{}}"),
               "'f', byte 9: expected a key in double quotes."},
        Attack{"StringWithoutEnd", file_of(R"({"w)"), "'f', byte 9: the string has no end."},
        Attack{"StringThatEndsInAnEscape", file_of(R"({"w\)"),
               "'f', byte 9: the string has no end."},
        Attack{"ControlCharacter", file_of("{\"w\n\":{}}"),
               "'f', byte 11: a control character must be escaped inside a string."},
        Attack{"UnknownEscape", file_of(R"({"\x":{}})"),
               "'f', byte 9: the string has an escape that JSON does not know."},
        Attack{"HalfASurrogatePair", file_of(R"({"\ud800":{}})"),
               "'f', byte 9: the string has an escape that JSON does not know."},
        Attack{"DeepNesting", file_of("{\"w\":" + std::string(100'000, '[')),
               "'f', byte 13: expected '{' before the fields of a tensor."},
        Attack{"LongName", file_of("{\"" + std::string(65'537, 'x') + "\":{}}"),
               "'f', byte 9: the string has more than 65536 bytes."}),
    [](const auto& test) { return test.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Metadata, SafetensorsAttack,
    testing::Values(Attack{"MetadataIsAList", file_of(R"({"__metadata__":[]})"),
                           "'f', byte 24: expected '{' before the metadata."},
                    Attack{"MetadataIsNoText", file_of(R"({"__metadata__":{"a":1}})"),
                           "'f', byte 29: expected a text as metadata in double quotes."},
                    Attack{"MetadataTwice", file_of(R"({"__metadata__":{},"__metadata__":{}})"),
                           "'f', byte 27: '__metadata__' is there a second time."},
                    Attack{"MetadataKeyTwice",
                           file_of(R"({"__metadata__":{"a":"1","\u0061":"2"}})"),
                           "'f', byte 33: metadata 'a' is there a second time."}),
    [](const auto& test) { return test.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Fields, SafetensorsAttack,
    testing::Values(
        Attack{"TensorIsANumber", file_of(R"({"w":1})"),
               "'f', byte 13: expected '{' before the fields of a tensor."},
        Attack{"NoDtype", tensor(R"("shape":[2],"data_offsets":[0,8])"),
               "'f', byte 9: tensor 'w' has no field 'dtype'."},
        Attack{"NoShape", tensor(R"("dtype":"F32","data_offsets":[0,8])"),
               "'f', byte 9: tensor 'w' has no field 'shape'."},
        Attack{"NoOffsets", tensor(R"("dtype":"F32","shape":[2])"),
               "'f', byte 9: tensor 'w' has no field 'data_offsets'."},
        Attack{"UnknownField", tensor(kGood + R"(,"code":"rm")"),
               "'f', byte 61: tensor 'w' has the unknown field 'code'."},
        Attack{"FieldTwice", tensor(kGood + R"(,"dtype":"F32")"),
               "'f', byte 61: 'dtype' is there a second time."},
        Attack{"DtypeIsANumber", tensor(R"("dtype":32,"shape":[2],"data_offsets":[0,8])"),
               "'f', byte 22: expected a dtype in double quotes."},
        Attack{"UnknownDtype", tensor(R"("dtype":"F33","shape":[2],"data_offsets":[0,8])"),
               "'f', byte 22: tensor 'w' has the unknown dtype 'F33'."},
        Attack{"ShapeIsANumber", tensor(R"("dtype":"F32","shape":2,"data_offsets":[0,8])"),
               "'f', byte 36: expected '[' before a shape."},
        Attack{"NegativeSize", tensor(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"),
               "'f', byte 37: a size in a shape is no unsigned integer."},
        Attack{"MinusZero", tensor(R"("dtype":"F32","shape":[-0],"data_offsets":[0,8])"),
               "'f', byte 37: a size in a shape is no unsigned integer."},
        Attack{"SizeWithAPoint", tensor(R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])"),
               "'f', byte 37: a size in a shape is no unsigned integer."},
        Attack{"SizeWithAnExponent", tensor(R"("dtype":"F32","shape":[1e3],"data_offsets":[0,8])"),
               "'f', byte 37: a size in a shape is no unsigned integer."},
        Attack{"SizeWithALeadingZero", tensor(R"("dtype":"F32","shape":[02],"data_offsets":[0,8])"),
               "'f', byte 37: a size in a shape is no unsigned integer."},
        Attack{"SizeInQuotes", tensor(R"("dtype":"F32","shape":["2"],"data_offsets":[0,8])"),
               "'f', byte 37: a size in a shape is no unsigned integer."},
        Attack{"SizeBeyond64Bits",
               tensor(R"("dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,8])"),
               "'f', byte 37: a size in a shape does not fit into 64 bits."},
        Attack{"NestedShape", tensor(R"("dtype":"F32","shape":[[2]],"data_offsets":[0,8])"),
               "'f', byte 37: a size in a shape is no unsigned integer."},
        Attack{"OneOffset", tensor(R"("dtype":"F32","shape":[2],"data_offsets":[8])"),
               "'f', byte 57: expected ',' between the two data_offsets."},
        Attack{"ThreeOffsets", tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8,8])"),
               "'f', byte 59: expected ']' behind the two data_offsets."},
        Attack{"NegativeOffset", tensor(R"("dtype":"F32","shape":[2],"data_offsets":[-8,0])"),
               "'f', byte 56: an offset is no unsigned integer."}),
    [](const auto& test) { return test.param.name; });

// Two tensors at these places, each of as many bytes as its place has.
std::string two(std::size_t begin_a, std::size_t end_a, std::size_t begin_b, std::size_t end_b,
                std::size_t data_bytes) {
  const auto one = [](char name, std::size_t begin, std::size_t end) {
    return "\"" + std::string(1, name) + R"(":{"dtype":"U8","shape":[)" +
           std::to_string(end - begin) + R"(],"data_offsets":[)" + std::to_string(begin) + "," +
           std::to_string(end) + "]}";
  };
  return file_of("{" + one('a', begin_a, end_a) + "," + one('b', begin_b, end_b) + "}", data_bytes);
}

std::string many_dimensions(std::size_t count) {
  std::string shape = "1";
  for (std::size_t i = 1; i < count; ++i) shape += ",1";
  return tensor(R"("dtype":"U8","shape":[)" + shape + R"(],"data_offsets":[0,1])", 1);
}

INSTANTIATE_TEST_SUITE_P(
    Places, SafetensorsAttack,
    testing::Values(
        Attack{"ProductOverflows",
               tensor(R"("dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,8])"),
               "'f', byte 9: tensor 'w' has a size beyond 64 bits: shape [4294967296, 4294967296] "
               "of U8."},
        Attack{"BitsOverflow",
               tensor(R"("dtype":"F64","shape":[1152921504606846976],"data_offsets":[0,8])"),
               "'f', byte 9: tensor 'w' has a size beyond 64 bits: shape [1152921504606846976] of "
               "F64."},
        Attack{"StridesOverflowThoughItIsEmpty",
               tensor(R"("dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0])", 0),
               "'f', byte 9: tensor 'w' has a size beyond 64 bits: shape [0, 4294967296, "
               "4294967296] of U8."},
        Attack{"HalfAByte", tensor(R"("dtype":"F4","shape":[3],"data_offsets":[0,2])", 2),
               "'f', byte 9: tensor 'w' does not fill its last byte: shape [3] of F4."},
        Attack{"EndBeforeBegin", tensor(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"),
               "'f', byte 9: tensor 'w' ends before it begins: data_offsets [8, 0]."},
        Attack{"PlaceOfAnotherSize", tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,7])"),
               "'f', byte 9: tensor 'w' has 7 bytes (data_offsets [0, 7]), but shape [2] of F32 "
               "needs 8."},
        Attack{"HugeOffsets",
               tensor(R"("dtype":"U8","shape":[8],"data_offsets":[0,9223372036854775807])"),
               "'f', byte 9: tensor 'w' has 9223372036854775807 bytes (data_offsets [0, "
               "9223372036854775807]), but shape [8] of U8 needs 8."},
        Attack{"MoreDimensionsThanTorchHas", many_dimensions(65),
               "'f', byte 35: tensor 'w' has more than 64 dimensions."},
        Attack{"FirstTensorNotAtTheStart", two(1, 4, 4, 8, 8),
               "'f', byte 9: tensor 'a' begins at 1 of the data, which leaves a gap of 1 bytes "
               "before it."},
        Attack{"Gap", two(0, 3, 4, 8, 8),
               "'f', byte 61: tensor 'b' begins at 4 of the data, which leaves a gap of 1 bytes "
               "before it."},
        Attack{"Overlap", two(0, 5, 4, 8, 8),
               "'f', byte 61: tensor 'b' begins at 4 of the data, but 'a' ends at 5: they "
               "overlap."},
        Attack{"SamePlace", two(0, 8, 0, 8, 8),
               "'f', byte 61: tensor 'b' begins at 0 of the data, but 'a' ends at 8: they "
               "overlap."},
        Attack{"CutFile", two(0, 4, 4, 8, 7),
               "'f', byte 120: the file has 7 bytes of data, but its tensors have 8. It was cut, "
               "or its download is not complete."},
        Attack{"BytesBehindTheTensors", two(0, 4, 4, 8, 9),
               "'f', byte 122: the file has 9 bytes of data, but its tensors have 8."},
        Attack{"NameTwice",
               file_of(R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)"
                       R"("\u0061":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})"),
               "'f', byte 61: tensor 'a' is there a second time."},
        Attack{"EscapesForTheTerminal",
               file_of(R"({"\u001b[2J":{"dtype":"U9","shape":[0],"data_offsets":[0,0]}})"),
               R"('f', byte 30: tensor '\x1b[2J' has the unknown dtype 'U9'.)"}),
    [](const auto& test) { return test.param.name; });

TEST(SafetensorsHeader, ReadsWhatTheSpecificationGivesAsExample) {
  const std::string json =
      R"({"__metadata__":{"format":"pt"},"n":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
      R"("w":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})";
  const auto header = read_safetensors_header(file_of(json + std::string(6, ' '), 16), "f");
  ASSERT_EQ(header.tensors.size(), 2U);
  EXPECT_EQ(header.data_offset, 152);
  EXPECT_EQ(header.metadata, (SafetensorsHeader::Metadata{{"format", "pt"}}));
  const auto* w = header.find("w");
  ASSERT_NE(w, nullptr);
  EXPECT_EQ(to_string(w->dtype), "F32");
  EXPECT_EQ(w->shape, std::vector<std::int64_t>{2});
  EXPECT_EQ(w->begin, 8);
  EXPECT_EQ(w->end, 16);
  EXPECT_EQ(header.find("v"), nullptr);
}

TEST(SafetensorsHeader, TakesFieldsInAnyOrderWithAnyBlanks) {
  const auto header =
      read_safetensors_header(file_of(R"({ "w" : { "data_offsets" : [ 0 , 8 ] , "shape" : [ 2 ] ,)"
                                      "\t\"dtype\"\n:\r\"F32\" } } \n",
                                      8),
                              "f");
  EXPECT_EQ(header.find("w")->bytes(), 8);
}

TEST(SafetensorsHeader, TensorsComeInTheOrderOfTheirBytes) {
  const auto header = read_safetensors_header(two(4, 8, 0, 4, 8), "f");
  EXPECT_EQ(header.tensors[0].name, "b");
  EXPECT_EQ(header.find("a")->begin, 4);
  EXPECT_EQ(header.find("b")->begin, 0);
}

TEST(SafetensorsHeader, TakesEmptyAndZeroDimensionalTensorsAnd64Dimensions) {
  EXPECT_EQ(read_safetensors_header(two(0, 0, 0, 0, 0), "f").tensors.size(), 2U);
  EXPECT_EQ(read_safetensors_header(file_of("{}"), "f").tensors.size(), 0U);
  EXPECT_EQ(read_safetensors_header(many_dimensions(64), "f").find("w")->shape.size(), 64U);
}

TEST(SafetensorsHeader, DecodesEscapesInNames) {
  const auto header = read_safetensors_header(
      file_of(R"({"\u00e9\n\"\\\/\ud83d\ude00":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})"),
      "f");
  EXPECT_EQ(header.tensors[0].name, "\u00e9\n\"\\/\U0001F600");
}

TEST(SafetensorsHeader, ReadsAFileWithoutItsTensors) {
  const test::Folder folder;
  write_file_atomically(folder / "a", two(0, 4, 4, 8, 8));
  EXPECT_EQ(read_safetensors_header(*MappedFile::open(folder / "a")).tensors.size(), 2U);
  write_file_atomically(folder / "b", "1234");
  EXPECT_EQ(
      message_of<FormatError>(
          [&] { (void)read_safetensors_header(*MappedFile::open(folder / "b")); }),
      "'" + folder / "b" +
          "', byte 0: the file has 4 bytes; a safetensors file begins with 8 that tell the length "
          "of its header.");
}

TensorEntry entry(const std::string& name, Dtype dtype, std::vector<std::int64_t> shape) {
  return {.name = name, .dtype = dtype, .shape = std::move(shape)};
}

TEST(SafetensorsHeader, WritesWhatTheSpecificationGivesAsExample) {
  const auto header = plan_safetensors({entry("w", Dtype::kF32, {2}), entry("n", Dtype::kI64, {})},
                                       {{"format", "pt"}});
  EXPECT_EQ(
      safetensors_header_bytes(header),
      length_prefix(144) +
          R"({"__metadata__":{"format":"pt"},"n":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
          R"("w":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})" +
          std::string(6, ' '));
}

TEST(SafetensorsHeader, WhatIsWrittenIsRead) {
  std::vector<TensorEntry> tensors;
  for (int i = 0; i < kDtypeCount; ++i) {
    const auto dtype = static_cast<Dtype>(i);
    tensors.push_back(entry("t" + std::to_string(i), dtype, {3, 8}));
  }
  tensors.push_back(entry("\u00e9\n\"\\/\x7f\x1f", Dtype::kU8, {0, 5}));
  const auto written = plan_safetensors(tensors, {{"a\"", "\\b"}, {"", ""}});
  auto bytes = safetensors_header_bytes(written);
  EXPECT_EQ(bytes.size() % 8, 0U);
  bytes.resize(bytes.size() + static_cast<std::size_t>(written.tensors.back().end));
  const auto read = read_safetensors_header(bytes, "f");
  EXPECT_EQ(read.metadata, written.metadata);
  ASSERT_EQ(read.tensors.size(), written.tensors.size());
  for (std::size_t i = 0; i < read.tensors.size(); ++i) {
    EXPECT_EQ(read.tensors[i].name, written.tensors[i].name);
    EXPECT_EQ(read.tensors[i].dtype, written.tensors[i].dtype);
    EXPECT_EQ(read.tensors[i].begin, written.tensors[i].begin);
  }
}

TEST(SafetensorsHeader, RefusesToWriteWhatCannotBeRead) {
  const auto error = [](std::vector<TensorEntry> tensors,
                        SafetensorsHeader::Metadata metadata = {}) {
    return message_of<ArgumentError>(
        [&] { (void)safetensors_header_bytes(plan_safetensors(tensors, metadata)); });
  };
  EXPECT_EQ(error({entry("w", Dtype::kU8, {1}), entry("w", Dtype::kF32, {1})}),
            "Two tensors have the name 'w'.");
  EXPECT_EQ(error({entry("__metadata__", Dtype::kU8, {1})}),
            "A tensor cannot have the name '__metadata__', which safetensors files use for "
            "something else.");
  EXPECT_EQ(error({entry("\xff", Dtype::kU8, {1})}),
            R"(The name '\udcff' is not UTF-8, which a safetensors file needs.)");
  EXPECT_EQ(error({entry(std::string(65'537, 'x'), Dtype::kU8, {1})}),
            "The name '" + std::string(60, 'x') +
                "'... has 65537 bytes; a safetensors file takes 65536.");
  EXPECT_EQ(error({}, {{"a", "\xff"}}),
            R"(The metadata '\udcff' is not UTF-8, which a safetensors file needs.)");
  EXPECT_EQ(error({entry("w", Dtype::kF4, {3})}),
            "The tensor 'w' of dtype F4 and shape [3] cannot be written: its size is no number of "
            "whole bytes.");
}

TEST(SafetensorsHeader, TakesLongMetadata) {
  const SafetensorsHeader::Metadata metadata{{"config", std::string(1 << 20, 'x')},
                                             {"lines", std::string(100'000, '\n')}};
  const auto bytes = safetensors_header_bytes(plan_safetensors({}, metadata));
  EXPECT_EQ(read_safetensors_header(bytes, "f").metadata, metadata);
}

}  // namespace
}  // namespace accelerate::detail::formats
