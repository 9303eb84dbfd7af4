#include "formats/shards.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "accelerate/errors.h"
#include "core/bytes.h"
#include "core/reference.h"
#include "formats/shard_index.h"
#include "support/message_of.h"

namespace accelerate::detail::formats {
namespace {

using test::message_of;

TEST(Shards, AreThoseOfPythonForRandomTensors) {
  const auto cases = test::reference("shards/splits.json");
  ASSERT_EQ(cases.items().size(), 220U);
  int sharded = 0;
  for (const auto& one : cases.items()) {
    std::vector<ShardItem> items;
    for (const auto& item : one.at("items").items()) {
      items.push_back({.name = item.items()[0].as_string(),
                       .storage = static_cast<std::size_t>(item.items()[1].as_int()),
                       .bytes = item.items()[2].as_int()});
    }
    const auto split =
        split_into_shards(items, one.at("pattern").as_string(), one.at("limit").as_int());

    EXPECT_EQ(split.is_sharded, one.at("is_sharded").as_bool());
    sharded += split.is_sharded ? 1 : 0;
    ASSERT_EQ(split.filename_to_tensors.size(), one.at("files").items().size());
    std::size_t i = 0;
    for (const auto& [file, tensors] : split.filename_to_tensors) {
      EXPECT_EQ(file, one.at("files").items()[i].items()[0].as_string());
      EXPECT_EQ(Value(tensors), one.at("files").items()[i++].items()[1]);
    }
    Value::List tensors;
    for (const auto& [tensor, file] : split.tensor_to_filename) {
      tensors.push_back(Value::List{tensor, file});
    }
    EXPECT_EQ(Value(tensors), one.at("tensors"));
    if (!one.at("index").is_none()) {
      EXPECT_EQ(write_shard_index(split), one.at("index").as_string());
    }
  }
  EXPECT_GT(sharded, 100);
}

TEST(Shards, PutATensorLargerThanTheLimitBeforeTheOpenShard) {
  const std::vector<ShardItem> items{{"a", {}, 4}, {"big", {}, 20}, {"b", {}, 4}};
  const auto split = split_into_shards(items, "model{suffix}.safetensors", 10);
  using Names = std::vector<std::string>;
  EXPECT_EQ(split.filename_to_tensors.keys(),
            (Names{"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}));
  EXPECT_EQ(split.filename_to_tensors.at("model-00001-of-00002.safetensors"), Names{"big"});
  EXPECT_EQ(split.filename_to_tensors.at("model-00002-of-00002.safetensors"), (Names{"a", "b"}));
  EXPECT_EQ(split.tensor_to_filename.at("b"), "model-00002-of-00002.safetensors");
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)split.tensor_to_filename.at("c"); }),
            "There is no entry 'c'.");
  EXPECT_EQ(split.total_size, 28);
}

TEST(Shards, RefusePatternsWithoutSuffixAndLimitsBelowOneByte) {
  EXPECT_EQ(message_of<ArgumentError>([] { (void)split_into_shards({}, "model.bin", 10); }),
            "The file name pattern 'model.bin' has no {suffix}. Use one such as "
            "'model{suffix}.safetensors'.");
  EXPECT_EQ(message_of<ArgumentError>([] { (void)split_into_shards({}, "m{suffix}", 0); }),
            "The maximum size of a shard is 0 bytes. Use a positive number, or a text such as "
            "'5GB'.");
}

TEST(Shards, AreKnownByTheirNames) {
  constexpr std::string_view kPattern = "model{suffix}.safetensors";
  EXPECT_TRUE(is_shard_name("model-00001-of-00002.safetensors", kPattern));
  for (const auto* name :
       {"model.safetensors", "model-0001-of-00002.safetensors", "model-00001-of-00002.bin",
        "my-model-00001-of-00002.safetensors", "model-00001-of-00002.safetensors.bak",
        "model-0000x-of-00002.safetensors", "model-00001-in-00002.safetensors", ""}) {
    EXPECT_FALSE(is_shard_name(name, kPattern)) << name;
  }
}

TEST(ShardSizes, AreThoseOfPythonButPositive) {
  const auto sizes = test::reference("shards/sizes.json");
  for (const auto& one : sizes.items()) {
    const auto& text = one.items()[0].as_string();
    const auto& bytes = one.items()[1];
    if (bytes.is_none() || bytes.as_int() < 1) {
      EXPECT_THROW((void)parse_size_to_int(text), ArgumentError) << text;
    } else {
      EXPECT_EQ(parse_size_to_int(text), bytes.as_int()) << text;
    }
  }
}

TEST(ShardSizes, QuoteTheTextThatTheyRefuse) {
  EXPECT_EQ(message_of<ArgumentError>([] { (void)parse_size_to_int("1MiB"); }),
            "The size '1MiB' has the unit 'IB'; supported units are TB, GB, MB, KB. Use a number "
            "of bytes, or a text such as '5GB'.");
  EXPECT_EQ(
      message_of<ArgumentError>([] { (void)parse_size_to_int("0KB"); }),
      "The size '0KB' is less than one byte. Use a number of bytes, or a text such as '5GB'.");
}

}  // namespace
}  // namespace accelerate::detail::formats
