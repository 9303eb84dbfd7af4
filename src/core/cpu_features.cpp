#include "core/cpu_features.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif

#include <cstdlib>

namespace accelerate::detail::inline core {
namespace {

constexpr std::uint32_t kFeatureLeaf = 7;
constexpr std::uint32_t kTileLeaf = 0x1D;
// EDX of leaf 7: AMX-BF16, AMX-TILE, AMX-INT8.
constexpr std::uint32_t kAmxBits = 1U << 22 | 1U << 24 | 1U << 25;

bool is_set(const char* value) { return value != nullptr && *value != '\0'; }

bool amx_is_avoided = false;  // written once, while the library is loaded

}  // namespace

AmxFacts read_amx_facts() noexcept {
  AmxFacts facts;
#if defined(__x86_64__) || defined(__i386__)
  std::uint32_t a = 0, b = 0, c = 0, d = 0;
  facts.highest_leaf = __get_cpuid_max(0, nullptr);
  if (__get_cpuid_count(kFeatureLeaf, 0, &a, &b, &c, &d) != 0) facts.leaf_7_edx = d;
  if (__get_cpuid_count(kTileLeaf, 0, &a, &b, &c, &d) != 0) facts.highest_palette = a;
#endif
  return facts;
}

bool amx_lacks_palettes(const AmxFacts& facts) noexcept {
  if ((facts.leaf_7_edx & kAmxBits) == 0) return false;
  return facts.highest_leaf < kTileLeaf || facts.highest_palette == 0;
}

bool must_avoid_amx(const AmxFacts& facts, const char* onednn_isa, const char* dnnl_isa) noexcept {
  return amx_lacks_palettes(facts) && !is_set(onednn_isa) && !is_set(dnnl_isa);
}

void avoid_amx_without_palettes() noexcept {
  const AmxFacts facts = read_amx_facts();
  if (!must_avoid_amx(facts, std::getenv(kOnednnIsaVariable), std::getenv("DNNL_MAX_CPU_ISA"))) {
    return;
  }
  amx_is_avoided = ::setenv(kOnednnIsaVariable, kOnednnIsaWithoutAmx, /*overwrite=*/1) == 0;
}

bool avoids_amx() noexcept { return amx_is_avoided; }

}  // namespace accelerate::detail::inline core
