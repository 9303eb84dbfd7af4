// src/core/cpu_features.h - processors whose announced features cannot be used, without Torch.
//
// oneDNN, which computes LibTorch's bfloat16 products on CPUs, uses AMX tiles where CPUID leaf 7
// announces them, and takes the layout of the tiles from leaf 0x1D. Some hypervisors announce AMX
// but end CPUID before leaf 0x1D: oneDNN then configures palette 0 and the process dies of SIGILL.
#pragma once

#include <cstdint>

namespace accelerate::detail::inline core {

/// What CPUID says about AMX.
struct AmxFacts {
  std::uint32_t highest_leaf = 0;  // EAX of leaf 0
  std::uint32_t leaf_7_edx = 0;    // EDX of leaf 7, sub-leaf 0
  std::uint32_t highest_palette =
      0;  // EAX of leaf 0x1D, sub-leaf 0; ignored if that leaf is missing
};

/// Reads the CPUID of this processor. All zero on processors without CPUID.
[[nodiscard]] AmxFacts read_amx_facts() noexcept;

/// True if AMX is announced but its tile palettes are missing.
[[nodiscard]] bool amx_lacks_palettes(const AmxFacts& facts) noexcept;

/// The variable that limits oneDNN's instruction sets, and its value without AMX.
inline constexpr const char* kOnednnIsaVariable = "ONEDNN_MAX_CPU_ISA";
inline constexpr const char* kOnednnIsaWithoutAmx = "AVX512_CORE_FP16";

/// True if oneDNN must be kept from AMX on a processor with these facts, given the values of
/// ONEDNN_MAX_CPU_ISA and DNNL_MAX_CPU_ISA (nullptr: not set). A value that the user has set wins;
/// oneDNN treats an empty value as not set, and so does this function.
[[nodiscard]] bool must_avoid_amx(const AmxFacts& facts, const char* onednn_isa,
                                  const char* dnnl_isa) noexcept;

/// Sets ONEDNN_MAX_CPU_ISA for this process where `must_avoid_amx`. Called when the library is
/// loaded: oneDNN reads the variable at its first operator.
void avoid_amx_without_palettes() noexcept;

/// True if this process has set the variable by `avoid_amx_without_palettes`.
[[nodiscard]] bool avoids_amx() noexcept;

}  // namespace accelerate::detail::inline core
