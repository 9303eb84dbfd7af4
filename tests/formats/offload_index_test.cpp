#include "formats/offload_index.h"

#include <gtest/gtest.h>

#include "accelerate/errors.h"
#include "support/message_of.h"

namespace accelerate::detail::formats {
namespace {

TEST(OffloadIndex, IsWrittenAsByPython) {
  EXPECT_EQ(write_offload_index({{"linear.weight", {.dtype = "float32", .shape = {4, 3}}},
                                 {"sk\u00e4la", {.dtype = "bfloat16"}}}),
            "{\n  \"linear.weight\": {\n    \"dtype\": \"float32\",\n    \"shape\": [\n      4,\n"
            "      3\n    ]\n  },\n  \"sk\\u00e4la\": {\n    \"dtype\": \"bfloat16\",\n"
            "    \"shape\": []\n  }\n}");
}

TEST(OffloadIndex, ReadsFilesAndSafetensors) {
  const OffloadIndex index{
      {"b", {.dtype = "float16", .shape = {2, 0}}},
      {"a", {.dtype = "float32", .safetensors_file = "/m/x.safetensors", .weight_name = "w"}},
      {"c", {.safetensors_file = "y.safetensors"}}};
  const auto again = parse_offload_index(write_offload_index(index), "index.json");
  EXPECT_EQ(again, index);
  EXPECT_EQ(again.begin()->first, "b");
  EXPECT_TRUE(parse_offload_index("{}", "index.json").empty());
}

TEST(OffloadIndex, NamesWhatIsWrong) {
  const auto problem = [](const std::string& text) {
    return test::message_of<FormatError>(
        [&] { (void)parse_offload_index(text, "spill/index.json"); });
  };
  EXPECT_EQ(problem("[1]"),
            "'spill/index.json' is no index of an offload folder: it is of kind list and no "
            "object. Offload the weights again.");
  EXPECT_NE(problem(R"({"a": 1})").find("the entry of 'a' is of kind int and no object"),
            std::string::npos);
  EXPECT_NE(problem(R"({"a": {"dtype": "int8"}})").find("has no dtype or no shape"),
            std::string::npos);
  EXPECT_NE(problem(R"({"a": {"dtype": 8, "shape": []}})").find("has a dtype of kind int"),
            std::string::npos);
  EXPECT_NE(problem(R"({"a": {"dtype": "int8", "shape": [2.5]}})").find("is no size"),
            std::string::npos);
  EXPECT_NE(problem(R"({"a": {"dtype": "int8", "shape": [4294967296, 4294967296]}})")
                .find("more elements than fit into memory"),
            std::string::npos);
  EXPECT_NE(problem(R"({"../a": {"dtype": "int8", "shape": []}})").find("has a '/'"),
            std::string::npos);
  EXPECT_NE(problem("{\"a\"").find("spill/index.json"), std::string::npos);
  EXPECT_THROW(
      (void)parse_offload_index(
          R"({"a": {"dtype": "int8", "shape": []}, "a": {"dtype": "int8", "shape": []}})", ""),
      FormatError);
}

}  // namespace
}  // namespace accelerate::detail::formats
