#include "formats/shard_index.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "accelerate/errors.h"
#include "support/message_of.h"

namespace accelerate::detail::formats {
namespace {

using test::message_of;

TEST(ShardIndexTest, ReadsTheFilesSortedAndOnce) {
  const auto index = read_shard_index(
      R"({"metadata": {"total_size": 3}, "weight_map": {"a": "2.bin", "b": "1.bin", "c": "2.bin"}})",
      "index.json");
  EXPECT_EQ(index.files, (std::vector<std::string>{"1.bin", "2.bin"}));
  EXPECT_EQ(index.weight_map.at("c"), "2.bin");
}

TEST(ShardIndexTest, TakesAMapWithoutWeightMapAndFoldersBelow) {
  const auto index = read_shard_index(R"({"a": "parts/1.bin"})", "index.json");
  EXPECT_EQ(index.files, std::vector<std::string>{"parts/1.bin"});
}

std::string refusal(std::string_view text) {
  return message_of<FormatError>([&] { (void)read_shard_index(text, "m.json"); });
}
std::string refused_name(const std::string& json_name) {
  return refusal(R"({"weight_map": {"w": ")" + json_name + "\"}}");
}

TEST(ShardIndexTest, RefusesFileNamesThatLeadElsewhere) {
  constexpr auto kStart = "'m.json' is no index of a sharded checkpoint: the file name ";
  EXPECT_EQ(refused_name("../../etc/passwd"),
            std::string(kStart) + "'../../etc/passwd' of 'w' leads out of the folder, or nowhere.");
  EXPECT_EQ(refused_name("/etc/passwd"), std::string(kStart) + "'/etc/passwd' of 'w' is absolute.");
  EXPECT_EQ(refused_name("a/./b"),
            std::string(kStart) + "'a/./b' of 'w' leads out of the folder, or nowhere.");
  EXPECT_EQ(refused_name("a//b"),
            std::string(kStart) + "'a//b' of 'w' leads out of the folder, or nowhere.");
  EXPECT_EQ(refused_name(R"(..\\a)"), std::string(kStart) + R"('..\\a' of 'w' has a backslash.)");
  EXPECT_EQ(refused_name(R"(a\u0000b)"),
            std::string(kStart) + R"('a\x00b' of 'w' has control characters.)");
  EXPECT_EQ(refused_name(""), std::string(kStart) + "'' of 'w' is empty.");
  EXPECT_EQ(
      refused_name(std::string(5000, 'a')),
      std::string(kStart) + "'" + std::string(200, 'a') + "' of 'w' is longer than 4096 bytes.");
}

TEST(ShardIndexTest, SaysWhatIsWrongWithTheText) {
  EXPECT_EQ(refusal("{"), "'m.json', line 1, column 2: expected a key in double quotes.");
  EXPECT_EQ(refusal(R"({"a": "x", "a": "y"})"),
            "'m.json', line 1, column 12: the key 'a' is here a second time.");
  EXPECT_EQ(refusal("[]"),
            "'m.json' is no index of a sharded checkpoint: it is of kind list and no object.");
  EXPECT_EQ(
      refusal(R"({"weight_map": 3})"),
      "'m.json' is no index of a sharded checkpoint: its weight_map is of kind int and no object.");
  EXPECT_EQ(refusal(R"({"weight_map": {}})"),
            "'m.json' is no index of a sharded checkpoint: its weight_map is empty.");
  EXPECT_EQ(
      refusal(R"({"weight_map": {"w": 3}})"),
      "'m.json' is no index of a sharded checkpoint: the file of 'w' is of kind int and no text.");
  EXPECT_EQ(refusal("{\"\xFF\": \"a\"}"), "'m.json', line 1, column 3: the text is not UTF-8.");
  EXPECT_EQ(refusal(std::string(600, '[')),
            "'m.json', line 1, column 502: the value is nested deeper than 500 levels.");
  EXPECT_EQ(refusal(R"({"weight_map": {"": "a"}})"),
            "'m.json' is no index of a sharded checkpoint: it has the name of a tensor with 0 "
            "bytes; 1 to 65536 are allowed.");
  EXPECT_EQ(refusal(std::string((std::size_t{32} << 20) + 1, ' ')),
            "'m.json' is no index of a sharded checkpoint: it has 33554433 bytes, and 33554432 are "
            "the limit.");
}

}  // namespace
}  // namespace accelerate::detail::formats
