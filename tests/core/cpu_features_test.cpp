#include "core/cpu_features.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace accelerate::detail::inline core {
namespace {

constexpr std::uint32_t kBf16 = 1U << 22;
constexpr std::uint32_t kTile = 1U << 24;
constexpr std::uint32_t kInt8 = 1U << 25;
constexpr std::uint32_t kAmx = kBf16 | kTile | kInt8;

// A virtual Xeon whose CPUID ends at leaf 0x1C: EDX as read there.
constexpr AmxFacts kHalfHidden = {.highest_leaf = 0x1C, .leaf_7_edx = 0x23c14010};

TEST(Amx, LacksPalettesWhereItIsAnnouncedAndTheirLeafIsMissingOrEmpty) {
  struct Processor {
    const char* name;
    AmxFacts facts;
    bool lacks_palettes;
  };
  const Processor processors[] = {
      {"Sapphire Rapids, all leaves", {0x20, kAmx, 1}, false},
      {"virtual machine that ends CPUID at 0x1C", kHalfHidden, true},
      {"the same, with a register of another leaf in place of the palettes", {0x1C, kAmx, 7}, true},
      {"virtual machine whose leaf 0x1D is empty", {0x20, kAmx, 0}, true},
      {"leaf 0x1D is the last one", {0x1D, kAmx, 1}, false},
      {"bf16 tiles only", {0x1C, kBf16, 0}, true},
      {"int8 tiles only", {0x1C, kInt8, 0}, true},
      {"tiles without products", {0x1C, kTile, 0}, true},
      {"Ice Lake: no AMX, leaf 0x1B is the last", {0x1B, ~kAmx, 0}, false},
      {"AMD Zen 4: no AMX, leaf 0x10 is the last", {0x10, 0x10000010, 0}, false},
      {"no CPUID at all", {0, 0, 0}, false},
  };
  for (const auto& processor : processors) {
    EXPECT_EQ(amx_lacks_palettes(processor.facts), processor.lacks_palettes) << processor.name;
  }
}

TEST(Amx, IsAvoidedUnlessTheUserHasChosenInstructionSets) {
  EXPECT_TRUE(must_avoid_amx(kHalfHidden, nullptr, nullptr));
  EXPECT_TRUE(must_avoid_amx(kHalfHidden, "", "")) << "oneDNN reads an empty value as none";
  EXPECT_FALSE(must_avoid_amx(kHalfHidden, "ALL", nullptr));
  EXPECT_FALSE(must_avoid_amx(kHalfHidden, nullptr, "AVX2"));
  EXPECT_FALSE(must_avoid_amx({0x20, kAmx, 1}, nullptr, nullptr));
}

TEST(Amx, IsAvoidedOnThisMachineAsItsProcessorDemands) {
  ::unsetenv("DNNL_MAX_CPU_ISA");
  ::unsetenv(kOnednnIsaVariable);
  avoid_amx_without_palettes();

  const char* value = std::getenv(kOnednnIsaVariable);
  EXPECT_EQ(value == nullptr ? "" : std::string(value),
            amx_lacks_palettes(read_amx_facts()) ? kOnednnIsaWithoutAmx : "");
  EXPECT_EQ(avoids_amx(), value != nullptr);
}

}  // namespace
}  // namespace accelerate::detail::inline core
