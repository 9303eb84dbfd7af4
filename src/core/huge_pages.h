// src/core/huge_pages.h - large new memory in pages of 2 MB.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace accelerate::detail::inline core {

inline constexpr std::size_t kHugePage = 2 << 20;

/// Asks the system to serve memory that was not touched yet with huge pages: one fault instead of
/// 512. Does nothing for ranges without a whole huge page, or if the system refuses.
inline void advise_huge_pages(void* data, std::size_t bytes) noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const auto begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const auto end = (address + bytes) / kHugePage * kHugePage;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace accelerate::detail::inline core
