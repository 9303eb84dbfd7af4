#include "core/version.h"

#include <gtest/gtest.h>

#include "accelerate/errors.h"
#include "core/bytes.h"
#include "reference.h"

namespace accelerate::detail::inline core {
namespace {

using test::from_bits;
using test::message_of;
using test::reference;

TEST(Version, ReadsWhatPythonsPackagingAcceptsAndRefusesTheRest) {
  const auto table = reference("versions/versions.json");
  ASSERT_GT(table.as_list().size(), 900U);
  for (const auto& row : table.as_list()) {
    const auto& text = row.items()[0].as_string();
    const auto version = Version::try_parse(text);
    ASSERT_EQ(version.has_value(), !row.items()[1].is_none()) << text;
    if (!version) continue;
    // The same version as its normal form.
    EXPECT_TRUE(*version == Version::parse(row.items()[1].as_string())) << text;
  }
}

TEST(Version, OfAnyLengthIsReadOrRefused) {
  EXPECT_TRUE(Version::parse("1." + std::string(900, '7')) > Version::parse("1.7"));
  EXPECT_FALSE(Version::try_parse(std::string(100'000, '1')).has_value());
}

TEST(Version, OrdersEveryPairAsPythonsPackagingDoes) {
  std::vector<std::pair<Version, std::int64_t>> ranked;
  for (const auto& row : reference("versions/versions.json").as_list()) {
    if (row.items()[2].is_none()) continue;
    ranked.emplace_back(Version::parse(row.items()[0].as_string()), row.items()[2].as_int());
  }
  ASSERT_GT(ranked.size(), 400U);
  std::size_t wrong = 0;
  for (const auto& [a, rank_a] : ranked) {
    for (const auto& [b, rank_b] : ranked) wrong += (a <=> b) != (rank_a <=> rank_b) ? 1 : 0;
  }
  EXPECT_EQ(wrong, 0U);
}

TEST(Version, SaysWhatItCannotRead) {
  EXPECT_EQ(message_of<ArgumentError>([] { (void)Version::parse("two"); }),
            "'two' is not a version. Expected numbers such as 2.11.0, 2.11.0rc1 or 2.11.0+cu130.");
}

TEST(Version, CountsTheLocalPart) {
  const auto local = Version::parse("2.9.1+cu130");
  const auto plain = Version::parse("2.9.1");
  EXPECT_FALSE(compare(local, "==", plain));
  EXPECT_TRUE(compare(local, "!=", plain));
  EXPECT_FALSE(compare(local, "<=", plain));
  EXPECT_TRUE(compare(local, ">", plain));
  EXPECT_TRUE(compare(plain, "<", local));
  EXPECT_TRUE(compare(plain, ">=", plain));
}

TEST(Version, ListsTheOperationsWhenAnUnknownOneIsGiven) {
  const auto version = Version::parse("1");
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)compare(version, "=>", version); }),
            "The operation must be one of >, >=, ==, !=, <=, <, not '=>'.");
}

TEST(ConvertBytes, PrintsWhatPythonPrints) {
  const auto table = reference("values/values.json");
  for (const auto& row : table.at("sizes").as_list()) {
    EXPECT_EQ(convert_bytes(row.items()[0].as_int()), row.items()[1].as_string());
  }
  for (const auto& row : table.at("double_sizes").as_list()) {
    EXPECT_EQ(convert_bytes(from_bits(row.items()[0].as_string())), row.items()[1].as_string());
  }
}

TEST(ConvertFileSizeToInt, ReadsWhatPythonReads) {
  for (const auto& row : reference("values/values.json").at("size_texts").as_list()) {
    const auto& text = row.items()[0].as_string();
    if (row.items()[1].is_none()) {
      EXPECT_THROW((void)convert_file_size_to_int(text), ArgumentError) << text;
    } else {
      EXPECT_EQ(convert_file_size_to_int(text), row.items()[1].as_int()) << text;
    }
  }
}

TEST(ConvertFileSizeToInt, SaysWhatIsWrongWithASize) {
  EXPECT_EQ(message_of<ArgumentError>([] { (void)convert_file_size_to_int("5 apples"); }),
            "The size '5 apples' cannot be read. Use a number of bytes, or a text with a unit such "
            "as '5.0GB'.");
  EXPECT_EQ(message_of<ArgumentError>([] { (void)convert_file_size_to_int("-2GB"); }),
            "The size '-2GB' is negative. Use a number of bytes, or a text with a unit such as "
            "'5.0GB'.");
  EXPECT_EQ(message_of<ArgumentError>([] { (void)convert_file_size_to_int("1e10GiB"); }),
            "The size '1e10GiB' does not fit into 64 bits. Use a number of bytes, or a text with a "
            "unit such as '5.0GB'.");
  EXPECT_EQ(message_of<ArgumentError>([] { (void)convert_file_size_to_int("infGB"); }),
            "The size 'infGB' is not finite. Use a number of bytes, or a text with a unit such as "
            "'5.0GB'.");
}

}  // namespace
}  // namespace accelerate::detail::inline core
