// 200 random state dicts give the bytes that Python's safetensors writes for them.
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

#include "accelerate/safetensors.h"
#include "random_state.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

std::string fnv1a(const std::string& bytes) {
  std::uint64_t value = 0xCBF29CE484222325;
  for (const char c : bytes) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

// Bytes, so that NaN is equal to itself.
bool same_tensor(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         (a.nbytes() == 0 || std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0);
}

TEST(SafetensorsRandom, StateDictsGiveThePythonLibrarysBytes) {
  const auto files =
      nlohmann::json::parse(std::ifstream(test::reference_path("safetensors/files.json")));
  ASSERT_EQ(files.size(), 200U);
  for (std::size_t seed = 0; seed < files.size(); ++seed) {
    const auto state = test::random_state(seed);
    const auto bytes = safetensors::serialize(state.tensors, state.metadata);
    ASSERT_EQ(bytes.size(), files[seed]["bytes"].get<std::size_t>()) << "seed " << seed;
    ASSERT_EQ(fnv1a(bytes), files[seed]["fnv1a"].get<std::string>()) << "seed " << seed;
  }
}

TEST(SafetensorsRandom, StateDictsSurviveWritingAndReading) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    const auto state = test::random_state(seed);
    const auto file =
        safetensors::File::from_bytes(safetensors::serialize(state.tensors, state.metadata));
    ASSERT_EQ(file.metadata(), state.metadata);
    ASSERT_EQ(file.keys().size(), state.tensors.size());
    for (const auto& item : state.tensors) {
      ASSERT_TRUE(same_tensor(file.get(item.key()), item.value())) << "seed " << seed;
    }
  }
}

TEST(SafetensorsRandom, ReadsAllDtypesFromAFileOfThePythonLibrary) {
  const auto tensors =
      safetensors::load_file(test::reference_path("safetensors/dtypes.safetensors"));
  test::Numbers numbers(1);
  ASSERT_EQ(tensors.size(), test::kSafetensorsTypes.size());
  for (const auto type : test::kSafetensorsTypes) {
    const auto expected = test::tensor_of(numbers, type, {2, 3});
    const auto found = [&](const auto& item) { return same_tensor(item.value(), expected); };
    EXPECT_TRUE(std::any_of(tensors.begin(), tensors.end(), found)) << c10::toString(type);
  }
}

}  // namespace
}  // namespace accelerate
